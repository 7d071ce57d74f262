//! Which workers hold which pages of prompts, learnt from the events of their prefix caches and from nothing else.
//!
//! One table for all workers: a page's name to those that hold it. A worker holds a page only together with all pages
//! before it, so between two pages with equal holders nothing needs to be looked up: a prompt of any length costs few
//! look-ups when few workers know it.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use foldhash::fast::FixedState;

use super::holders::Holders;

/// The table is cut so that forgetting a worker never locks out decisions for long.
const NUM_SHARDS: u64 = 64;

/// See the module. Numbers of workers are their places in the pool.
#[derive(Debug)]
pub struct PrefixIndex {
    shards: Vec<HashMap<u64, Holders, FixedState>>,
    workers: Vec<Tracked>,
}

/// What is known of one worker as a whole.
#[derive(Clone, Copy, Debug, Default)]
struct Tracked {
    num_pages: usize,
    /// More than the worker can hold is not believed, so that a faulty one cannot fill this machine's memory.
    max_pages: usize,
}

/// A change in one worker's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheChange {
    Stored(Vec<u64>),
    Removed(Vec<u64>),
    Cleared,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self { shards: (0..NUM_SHARDS).map(|_| HashMap::default()).collect(), workers: Vec::new() }
    }
}

impl PrefixIndex {
    /// A worker that can hold `max_pages` pages; none of them is known.
    pub fn track(&mut self, worker: u16, max_pages: usize) {
        let index = usize::from(worker);
        if self.workers.len() <= index {
            self.workers.resize(index + 1, Tracked::default());
        }
        self.workers[index].max_pages = max_pages;
    }

    /// These pages are found in the worker from now on.
    pub fn stored(&mut self, worker: u16, pages: &[u64]) {
        let Some(tracked) = self.workers.get_mut(usize::from(worker)) else { return };
        for &page in pages {
            if tracked.num_pages >= tracked.max_pages {
                return;
            }
            tracked.num_pages += usize::from(self.shards[shard_of(page)].entry(page).or_default().insert(worker));
        }
    }

    /// These pages are no longer found in the worker.
    pub fn removed(&mut self, worker: u16, pages: &[u64]) {
        let Some(tracked) = self.workers.get_mut(usize::from(worker)) else { return };
        for &page in pages {
            let shard = &mut self.shards[shard_of(page)];
            let Some(holders) = shard.get_mut(&page) else { continue };
            tracked.num_pages -= usize::from(holders.remove(worker));
            if holders.is_empty() {
                shard.remove(&page);
            }
        }
    }

    /// Forgets what the worker holds in one of the table's parts.
    fn forget_in(&mut self, worker: u16, shard: usize) {
        let Some(tracked) = self.workers.get_mut(usize::from(worker)) else { return };
        if tracked.num_pages == 0 {
            return;
        }
        self.shards[shard].retain(|_, holders| {
            tracked.num_pages -= usize::from(holders.remove(worker));
            !holders.is_empty()
        });
    }

    /// How many of the first pages of a prompt each worker holds, by its number.
    #[must_use]
    pub fn depths(&self, prompt: &[u64]) -> Vec<u32> {
        let mut depths = vec![0; self.workers.len()];
        let Some(first) = prompt.first().and_then(|&page| self.holders(page)) else { return depths };
        let span = Span { index: self, prompt };
        let last = prompt.len() - 1;
        let at_last = span.holders(last);
        span.fill((0, Some(first)), (last, at_last), &mut depths);
        for worker in at_last.into_iter().flat_map(Holders::iter).filter(|&worker| first.contains(worker)) {
            depths[usize::from(worker)] = count(prompt.len());
        }
        depths
    }

    /// Pages that this worker is known to hold.
    #[must_use]
    pub fn num_pages(&self, worker: u16) -> usize {
        self.workers.get(usize::from(worker)).map_or(0, |tracked| tracked.num_pages)
    }

    /// Memory of the table, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // hashbrown keeps a control byte beside every slot and fills at most 7 of 8.
        let slot = size_of::<(u64, Holders)>() + 1;
        let shard_bytes = |shard: &HashMap<u64, Holders, FixedState>| {
            (shard.capacity() * 8).div_ceil(7) * slot + shard.values().map(Holders::heap_bytes).sum::<usize>()
        };
        self.shards.iter().map(shard_bytes).sum()
    }

    fn holders(&self, page: u64) -> Option<&Holders> {
        self.shards[shard_of(page)].get(&page)
    }
}

fn shard_of(page: u64) -> usize {
    usize::try_from(page % NUM_SHARDS).unwrap_or_default()
}

fn count(pages: usize) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}

/// A prompt's pages, seen in the table.
struct Span<'a> {
    index: &'a PrefixIndex,
    prompt: &'a [u64],
}

impl<'a> Span<'a> {
    fn holders(&self, place: usize) -> Option<&'a Holders> {
        self.index.holders(self.prompt[place])
    }

    /// Finds where each worker that holds page `low` and not page `high` stops.
    fn fill(&self, low: (usize, Option<&'a Holders>), high: (usize, Option<&'a Holders>), depths: &mut [u32]) {
        let Some(from) = low.1 else { return };
        if high.1.is_some_and(|to| to == from) || low.0 == high.0 {
            return;
        }
        if high.0 - low.0 == 1 {
            for worker in from.iter().filter(|&worker| !high.1.is_some_and(|to| to.contains(worker))) {
                depths[usize::from(worker)] = count(high.0);
            }
            return;
        }
        let middle = low.0.midpoint(high.0);
        let middle = (middle, self.holders(middle));
        self.fill(low, middle, depths);
        self.fill(middle, high, depths);
    }
}

/// The index that connections write and decisions read.
#[derive(Debug, Default)]
pub struct SharedPrefixIndex {
    index: RwLock<PrefixIndex>,
}

impl SharedPrefixIndex {
    /// A worker was reached: nothing that was known of it holds any more.
    pub fn begin(&self, worker: u16, max_pages: usize) {
        self.forget(worker);
        self.write(|index| index.track(worker, max_pages));
    }

    /// Applies one change.
    pub fn apply(&self, worker: u16, change: &CacheChange) {
        match change {
            CacheChange::Stored(pages) => self.write(|index| index.stored(worker, pages)),
            CacheChange::Removed(pages) => self.write(|index| index.removed(worker, pages)),
            CacheChange::Cleared => self.forget(worker),
        }
    }

    /// Forgets a worker, part by part.
    pub fn forget(&self, worker: u16) {
        for shard in 0..NUM_SHARDS as usize {
            self.write(|index| index.forget_in(worker, shard));
        }
    }

    /// Reads the index.
    pub fn read<T>(&self, look: impl FnOnce(&PrefixIndex) -> T) -> T {
        look(&self.index.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self, change: impl FnOnce(&mut PrefixIndex)) {
        change(&mut self.index.write().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests;
