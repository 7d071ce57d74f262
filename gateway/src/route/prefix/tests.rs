#![expect(clippy::unwrap_used, reason = "tests")]

//! The index against a plain model: per worker a set of pages, a prompt walked page by page.

use std::collections::HashSet;

use proptest::prelude::*;

use super::{CacheChange, PrefixIndex, SharedPrefixIndex, Table};

const NUM_WORKERS: u16 = 9;

/// Prompts are paths in a small tree: page names are hashes of the path, as in workers.
fn path(turns: &[u8]) -> Vec<u64> {
    let step = |parent: &mut u64, turn: &u8| {
        *parent = parent.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(*turn) + 1).rotate_left(23);
        Some(*parent)
    };
    turns.iter().scan(1, step).collect()
}

fn paths() -> impl Strategy<Value = Vec<u64>> {
    (prop::collection::vec(0_u8..2, 0..4), 0_usize..70).prop_map(|(turns, length)| {
        path(&turns.iter().copied().chain(std::iter::repeat_n(0, length)).collect::<Vec<_>>())
    })
}

proptest! {
    #[test]
    fn depths_are_those_of_a_walk_page_by_page(
        stored in prop::collection::vec((0..NUM_WORKERS, paths()), 0..40),
        cut in prop::collection::vec((0..NUM_WORKERS, paths(), 0_usize..70), 0..20),
        cleared in prop::option::of(0..NUM_WORKERS),
        prompts in prop::collection::vec(paths(), 1..10),
    ) {
        let index = SharedPrefixIndex::default();
        let mut model = vec![HashSet::new(); usize::from(NUM_WORKERS)];
        (0..NUM_WORKERS).for_each(|worker| index.begin(worker, 1 << 20));
        for (worker, pages) in stored {
            model[usize::from(worker)].extend(pages.iter().copied());
            index.apply(worker, &CacheChange::Stored(pages));
        }
        for (worker, pages, kept) in cut {
            // Caches drop leaves first: whatever hangs below goes with it.
            let gone: Vec<u64> = pages.iter().skip(kept).rev().copied().collect();
            let is_leaf_cut = model[usize::from(worker)].iter().all(|page| pages.contains(page));
            if is_leaf_cut {
                gone.iter().for_each(|page| _ = model[usize::from(worker)].remove(page));
                index.apply(worker, &CacheChange::Removed(gone));
            }
        }
        if let Some(worker) = cleared {
            model[usize::from(worker)].clear();
            index.apply(worker, &CacheChange::Cleared);
        }
        for prompt in prompts {
            let expected: Vec<u32> = model
                .iter()
                .map(|held| u32::try_from(prompt.iter().take_while(|page| held.contains(page)).count()).unwrap())
                .collect();
            prop_assert_eq!(index.read(|index| index.depths(prompt.iter().copied())), expected);
        }
        for worker in 0..NUM_WORKERS {
            prop_assert_eq!(index.read(|index| index.num_pages(worker)), model[usize::from(worker)].len());
            index.forget(worker);
        }
        prop_assert!(index.read(|index| index.shards.iter().all(Table::is_empty)));
    }
}

#[test]
fn a_worker_is_not_believed_to_hold_more_than_it_can() {
    let mut index = PrefixIndex::default();
    index.track(0, 3);
    index.stored(0, &[1, 2, 3, 4, 5]);
    index.stored(0, &[1, 2]);
    assert_eq!(index.num_pages(0), 3);
    index.removed(0, &[3, 9]);
    index.stored(0, &[7]);
    assert_eq!((index.num_pages(0), index.depths([7])), (3, vec![1]));
}

#[test]
fn a_worker_that_was_never_reached_is_ignored() {
    let mut index = PrefixIndex::default();
    index.stored(4, &[1]);
    index.removed(4, &[1]);
    assert!(index.depths([1]).is_empty());
    assert_eq!(index.bytes(), 0);
}

#[test]
fn a_worker_that_is_reached_again_begins_empty() {
    let index = SharedPrefixIndex::default();
    index.begin(0, 100);
    index.apply(0, &CacheChange::Stored(vec![1, 2]));
    index.begin(0, 1);
    assert_eq!(index.read(|index| (index.num_pages(0), index.depths([1]))), (0, vec![0]));
    index.apply(0, &CacheChange::Stored(vec![1, 2]));
    assert_eq!(index.read(|index| index.num_pages(0)), 1);
}

#[test]
fn a_tracked_page_takes_at_most_64_bytes() {
    let mut index = PrefixIndex::default();
    let mut worst = 0.0_f64;
    index.track(0, usize::MAX);
    for page in 0..200_000_u64 {
        index.stored(0, &[page.wrapping_mul(0x9E37_79B9_7F4A_7C15)]);
        if page > 20_000 && page % 10_000 == 0 {
            worst = worst.max(index.bytes() as f64 / (page + 1) as f64);
        }
    }
    assert!(worst <= 64.0, "{worst}");
}
