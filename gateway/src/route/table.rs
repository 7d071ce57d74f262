//! From the names of pages to the workers that hold them.
//!
//! Open addressing with linear probing: a name is a hash already, a slot has 24 bytes and its neighbours lie beside it,
//! so that a look-up waits for memory once, and several look-ups wait together.

use super::holders::Holders;

const LEAST_SLOTS: usize = 16;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Vacant where nobody holds the page.
    slots: Vec<Slot>,
    len: usize,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    page: u64,
    holders: Holders,
}

impl Slot {
    fn is_vacant(&self) -> bool {
        self.holders.is_empty()
    }
}

impl Table {
    /// Adds a holder; false where it was there.
    pub(super) fn insert(&mut self, page: u64, worker: u16) -> bool {
        // At most four of five slots are taken: beyond that runs grow long.
        if (self.len + 1) * 5 > self.slots.len() * 4 {
            self.resize((self.slots.len() * 3 / 2).max(LEAST_SLOTS));
        }
        let at = self.place(page);
        let slot = &mut self.slots[at];
        self.len += usize::from(slot.is_vacant());
        slot.page = page;
        slot.holders.insert(worker)
    }

    /// Takes a holder away; false where it was not there.
    pub(super) fn remove(&mut self, page: u64, worker: u16) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let at = self.place(page);
        let was_there = self.slots[at].holders.remove(worker);
        if was_there && self.slots[at].is_vacant() {
            self.len -= 1;
            self.close_gap(at);
        }
        was_there
    }

    /// Takes a holder away from all pages; returns from how many.
    pub(super) fn forget(&mut self, worker: u16) -> usize {
        let num_removed = self.slots.iter_mut().map(|slot| usize::from(slot.holders.remove(worker))).sum();
        if num_removed > 0 {
            self.len = self.slots.iter().filter(|slot| !slot.is_vacant()).count();
            self.resize((self.len * 3 / 2 + 1).max(LEAST_SLOTS));
        }
        num_removed
    }

    /// Where a look-up of `page` begins, and the name that stands there. To read several of these before the first
    /// `find` lets the waits for memory overlap.
    pub(super) fn begin(&self, page: u64) -> (usize, Option<u64>) {
        let home = self.home(page);
        (home, self.slots.get(home).map(|slot| slot.page))
    }

    /// Who holds `page`, whose look-up has begun as `begin` says.
    pub(super) fn find(&self, page: u64, (home, first): (usize, Option<u64>)) -> Option<&Holders> {
        let at = if first? == page { home } else { self.place(page) };
        Some(&self.slots[at].holders)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory, bytes.
    pub(super) fn bytes(&self) -> usize {
        let heap: usize = self.slots.iter().map(|slot| slot.holders.heap_bytes()).sum();
        self.slots.capacity() * size_of::<Slot>() + heap
    }

    /// The slot that a page takes where nothing is in its way: its share of the range of all names.
    fn home(&self, page: u64) -> usize {
        // Low bits have chosen the table; an odd factor carries them to the top.
        let spread = u128::from(page.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        usize::try_from((spread * self.slots.len() as u128) >> 64).unwrap_or_default()
    }

    /// The slot of `page`, or the vacant one that it would take. There are slots, and one of them is vacant.
    fn place(&self, page: u64) -> usize {
        let mut at = self.home(page);
        while self.slots[at].page != page && !self.slots[at].is_vacant() {
            at = self.after(at);
        }
        at
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Moves what a vacant slot separates from its home.
    fn close_gap(&mut self, mut gap: usize) {
        let distance = |from: usize, to: usize| if to >= from { to - from } else { to + self.slots.len() - from };
        let mut moves = Vec::new();
        let mut at = self.after(gap);
        while !self.slots[at].is_vacant() {
            if distance(self.home(self.slots[at].page), at) >= distance(gap, at) {
                moves.push((gap, at));
                gap = at;
            }
            at = self.after(at);
        }
        for (to, from) in moves {
            self.slots.swap(to, from);
        }
    }

    fn resize(&mut self, num_slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![Slot::default(); num_slots]);
        for slot in old.into_iter().filter(|slot| !slot.is_vacant()) {
            let at = self.place(slot.page);
            self.slots[at] = slot;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::{Holders, Table};

    fn found(table: &Table, page: u64) -> Vec<u16> {
        table.find(page, table.begin(page)).map(|holders: &Holders| holders.iter().collect()).unwrap_or_default()
    }

    proptest! {
        /// Names that share a home stand beside names that are spread, so that runs form, wrap around and are closed.
        #[test]
        fn a_table_is_a_map_of_sets(
            changes in prop::collection::vec((0..8_u8, prop_oneof![0..40_u64, any::<u64>(), u64::MAX - 20..], 0..3_u16), 0..300),
        ) {
            let (mut table, mut model) = (Table::default(), BTreeMap::<u64, BTreeSet<u16>>::new());
            for (what, page, worker) in changes {
                match what {
                    0 => {
                        let expected = model.values_mut().map(|held| usize::from(held.remove(&worker))).sum::<usize>();
                        prop_assert_eq!(table.forget(worker), expected);
                    }
                    1..4 => {
                        // Mostly a page that is there.
                        let page = model.range(page..).next().map_or(page, |entry| *entry.0);
                        let was_there = model.get_mut(&page).is_some_and(|held| held.remove(&worker));
                        prop_assert_eq!(table.remove(page, worker), was_there);
                    }
                    _ => prop_assert_eq!(table.insert(page, worker), model.entry(page).or_default().insert(worker)),
                }
                model.retain(|_, held| !held.is_empty());
                prop_assert_eq!(table.is_empty(), model.is_empty());
            }
            for (&page, held) in &model {
                prop_assert_eq!(found(&table, page), held.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(found(&table, page ^ (1 << 40)).is_empty(), !model.contains_key(&(page ^ (1 << 40))));
            }
            prop_assert!(model.len() * 5 <= table.slots.len() * 4 || model.is_empty());
        }
    }
}
