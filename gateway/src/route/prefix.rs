//! Which workers hold which pages of prompts, learnt from the events of their prefix caches and from nothing else.
//!
//! One table for all workers: a page's name to the set of those that hold it. A worker holds a page only together with
//! all pages before it, so one walk along a prompt, which keeps the set of workers that have had every page so far, says
//! for all of them where they stop, and ends where nobody is left.

use std::sync::{PoisonError, RwLock};

use super::holders::Holders;
use super::table::Table;

/// Pages of a prompt that are looked up together.
const BATCH: usize = 32;

/// The table is cut so that neither its growth nor forgetting a worker ever locks out decisions for long.
const NUM_SHARDS: u64 = 256;

/// See the module. Numbers of workers are their places in the pool.
#[derive(Debug)]
pub struct PrefixIndex {
    shards: Vec<Table>,
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
        Self { shards: (0..NUM_SHARDS).map(|_| Table::default()).collect(), workers: Vec::new() }
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
            tracked.num_pages += usize::from(self.shards[shard_of(page)].insert(page, worker));
        }
    }

    /// These pages are no longer found in the worker.
    pub fn removed(&mut self, worker: u16, pages: &[u64]) {
        let Some(tracked) = self.workers.get_mut(usize::from(worker)) else { return };
        for &page in pages {
            tracked.num_pages -= usize::from(self.shards[shard_of(page)].remove(page, worker));
        }
    }

    /// Forgets what the worker holds in one of the table's parts.
    fn forget_in(&mut self, worker: u16, shard: usize) {
        let Some(tracked) = self.workers.get_mut(usize::from(worker)) else { return };
        if tracked.num_pages > 0 {
            tracked.num_pages -= self.shards[shard].forget(worker);
        }
    }

    /// How many of the first pages of a prompt each worker holds, by its number. No more of `prompt` is taken than
    /// somebody holds, and a few pages beyond.
    #[must_use]
    pub fn depths(&self, prompt: impl IntoIterator<Item = u64>) -> Vec<u32> {
        let mut depths = vec![0; self.workers.len()];
        let mut prompt = prompt.into_iter();
        let mut here = vec![u64::MAX; self.workers.len().div_ceil(64)];
        let mut place = 0;
        loop {
            let mut names = [0; BATCH];
            let mut num_pages = 0;
            for (name, page) in names.iter_mut().zip(&mut prompt) {
                *name = page;
                num_pages += 1;
            }
            // Looked up together, so that waits for memory overlap.
            let begun = names.map(|page| self.shards[shard_of(page)].begin(page));
            let held: [_; BATCH] = std::array::from_fn(|at| {
                let page = names[at];
                self.shards[shard_of(page)].find(page, begun[at])
            });
            for holders in &held[..num_pages] {
                let goes_on = keep(&mut here, *holders, |worker| {
                    if let Some(depth) = depths.get_mut(worker) {
                        *depth = place;
                    }
                });
                if !goes_on {
                    return depths;
                }
                place += 1;
            }
            if num_pages < BATCH {
                break;
            }
        }
        let stays = |(worker, depth): (usize, &mut u32)| {
            if here[worker / 64] & (1 << (worker % 64)) != 0 {
                *depth = place;
            }
        };
        depths.iter_mut().enumerate().for_each(stays);
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
        self.shards.iter().map(Table::bytes).sum()
    }
}

fn shard_of(page: u64) -> usize {
    usize::try_from(page % NUM_SHARDS).unwrap_or_default()
}

/// Takes those who do not hold a page out of `here`, and tells `leaves` of each. False where nobody is left.
fn keep(here: &mut [u64], holders: Option<&Holders>, mut leaves: impl FnMut(usize)) -> bool {
    let mut left = 0;
    for (index, word) in here.iter_mut().enumerate() {
        let kept = *word & holders.map_or(0, |holders| holders.word(index));
        let mut gone = *word ^ kept;
        while gone != 0 {
            leaves(index * 64 + gone.trailing_zeros() as usize);
            gone &= gone - 1;
        }
        *word = kept;
        left |= kept;
    }
    left != 0
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
