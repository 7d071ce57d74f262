#![expect(clippy::unwrap_used, reason = "tests")]

//! Pairs of workers made up for the purpose.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::super::cost::CostModel;
use super::super::load::WorkerLoad;
use super::super::pages::page_hashes;
use super::super::policy::{Policies, Policy};
use super::super::prefix::{CacheChange, SharedPrefixIndex};
use super::super::{Candidate, RouteRequest, Router};
use super::PairChoice;

const PAGE: usize = 64;
const LONG: usize = 60_000;

fn workers(first: u16, layouts: &[u64]) -> Vec<Candidate> {
    let candidate = |(worker, &layout): (u16, &u64)| Candidate {
        worker,
        name_hash: u64::from(worker).wrapping_mul(0x9E37_79B9_7F4A_7C15),
        layout,
        load: WorkerLoad::default(),
    };
    (first..).zip(layouts).map(candidate).collect()
}

fn request(prompt: &[u32]) -> RouteRequest<'_> {
    RouteRequest { prompt, cache_salt: "", session: None, page_size_tokens: PAGE, cost: CostModel::SPARSE }
}

fn choose(router: &Router, prompt: &[u32], prefills: &[Candidate], decodes: &[Candidate]) -> Option<PairChoice> {
    router.choose_pair(&request(prompt), prefills, decodes, &HashSet::new())
}

fn router(policies: impl Into<Policies>) -> (Router, Arc<SharedPrefixIndex>) {
    let prefixes = Arc::new(SharedPrefixIndex::default());
    (Router::new(policies, prefixes.clone()), prefixes)
}

#[test]
fn only_workers_of_one_layout_make_a_pair() {
    for policy in [
        Policy::CacheAware,
        Policy::LeastLoad,
        Policy::RoundRobin,
        Policy::PowerOfTwo,
        Policy::PrefixHash,
        Policy::ConsistentHashing,
    ] {
        let (router, _) = router(policy);
        let (prefills, decodes) = (workers(0, &[1, 2, 3]), workers(3, &[9, 3, 2]));
        for _ in 0..20 {
            let pair = choose(&router, &[1; 200], &prefills, &decodes).unwrap();
            assert_eq!(prefills[pair.prefill].layout, decodes[pair.decode].layout, "{policy:?}");
        }
        assert_eq!(choose(&router, &[1], &workers(0, &[1]), &workers(1, &[2])), None, "{policy:?}");
        assert_eq!(choose(&router, &[1], &[], &decodes), None);
        assert_eq!(choose(&router, &[1], &prefills, &[]), None);
    }
}

#[test]
fn a_session_keeps_its_pair() {
    let (router, _) = router(Policy::ConsistentHashing);
    let (prefills, decodes) = (workers(0, &[1; 3]), workers(3, &[1; 3]));
    let pair_of = |session: u64, prompt: &[u32]| {
        let request = RouteRequest { session: Some(session), ..request(prompt) };
        let pair = router.choose_pair(&request, &prefills, &decodes, &HashSet::new()).unwrap();
        (pair.prefill, pair.decode)
    };
    let pairs: HashSet<_> = (0..200).map(|session| pair_of(session, &[1; 9])).collect();
    assert_eq!(pairs.len(), 9, "sessions are spread over all pairs");
    assert!((0..200).all(|session| pair_of(session, &[1; 9]) == pair_of(session, &[7; 300])));
}

#[test]
fn a_closed_pair_is_never_chosen() {
    for policy in [Policy::CacheAware, Policy::LeastLoad, Policy::RoundRobin, Policy::PowerOfTwo, Policy::PrefixHash] {
        let (router, _) = router(policy);
        let (prefills, mut decodes) = (workers(0, &[1; 3]), workers(3, &[1; 2]));
        // The cheaper decode worker is the one that most cannot reach.
        decodes[1].load.in_flight = 50;
        let closed = HashSet::from([(0, 3), (0, 4), (1, 3)]);
        let mut seen = BTreeSet::new();
        for first in 0..40 {
            let pair = router.choose_pair(&request(&[first; 300]), &prefills, &decodes, &closed).unwrap();
            let numbers = (prefills[pair.prefill].worker, decodes[pair.decode].worker);
            assert!(!closed.contains(&numbers), "{policy:?} {numbers:?}");
            seen.insert(numbers);
        }
        match policy {
            Policy::CacheAware => assert_eq!(seen, BTreeSet::from([(2, 3)]), "the idle one's only partner"),
            _ => assert!(seen.contains(&(1, 4)), "{policy:?} {seen:?}"),
        }
        let all: HashSet<_> = (0..3).flat_map(|prefill| [(prefill, 3), (prefill, 4)]).collect();
        assert_eq!(router.choose_pair(&request(&[1]), &prefills, &decodes, &all), None);
    }
}

#[test]
fn a_busy_decode_worker_is_left_alone_with_its_layout() {
    let (router, _) = router(Policy::CacheAware);
    let (prefills, mut decodes) = (workers(0, &[1, 2]), workers(2, &[1, 2]));
    decodes[0].load.in_flight = 40;
    for _ in 0..4 {
        let pair = choose(&router, &[1; 200], &prefills, &decodes).unwrap();
        assert_eq!((pair.prefill, pair.decode), (1, 1));
    }
}

#[test]
fn cached_pages_draw_the_prompt_to_both_halves() {
    let (router, prefixes) = router(Policy::CacheAware);
    let prompt: Vec<u32> = (0..2_048).collect();
    let (prefills, decodes) = (workers(0, &[1; 3]), workers(3, &[1; 3]));
    for worker in [1, 5] {
        prefixes.begin(worker, 1_000);
        prefixes.apply(worker, &CacheChange::Stored(page_hashes(&prompt, "", PAGE)));
    }
    for _ in 0..6 {
        let pair = choose(&router, &prompt, &prefills, &decodes).unwrap();
        assert_eq!((pair.prefill, pair.decode, pair.cached_tokens), (1, 2, 2_047));
    }
}

#[test]
fn a_decode_worker_without_room_is_passed_over() {
    let (router, _) = router(Policy::CacheAware);
    let (prefills, mut decodes) = (workers(0, &[1]), workers(1, &[1, 1]));
    decodes[0].load.free_pages = Some(2);
    decodes[1].load.in_flight = 1;
    for _ in 0..4 {
        assert_eq!(choose(&router, &[1; 9_000], &prefills, &decodes).unwrap().decode, 1);
        assert_eq!(choose(&router, &[1; 100], &prefills, &decodes).unwrap().decode, 0);
    }
}

#[test]
fn long_prompts_leave_half_of_the_prefill_workers_to_short_ones() {
    let (router, _) = router(Policy::RoundRobin);
    let (prefills, decodes) = (workers(0, &[1; 5]), workers(5, &[1]));
    let used = |length: usize| -> BTreeSet<usize> {
        (0..20).map(|_| choose(&router, &vec![1; length], &prefills, &decodes).unwrap().prefill).collect()
    };
    assert_eq!((used(LONG).len(), used(500).len()), (3, 5));
    assert_eq!(choose(&router, &[1; LONG], &prefills[..1], &decodes).unwrap().prefill, 0);
}

#[test]
fn every_gateway_draws_the_same_half_for_long_prompts() {
    let decodes = workers(5, &[1]);
    let takes_long = |prefills: &[Candidate]| -> BTreeSet<u16> {
        let (router, _) = router(Policy::RoundRobin);
        let chosen = (0..20).map(|_| choose(&router, &vec![1; LONG], prefills, &decodes).unwrap().prefill);
        chosen.map(|place| prefills[place].worker).collect()
    };
    let prefills = workers(0, &[1; 5]);
    let reversed: Vec<Candidate> = prefills.iter().rev().copied().collect();
    assert_eq!(takes_long(&prefills), takes_long(&reversed));
}

#[test]
fn a_long_prompt_that_is_cached_is_a_short_one() {
    let (router, prefixes) = router(Policy::CacheAware);
    let (prefills, decodes) = (workers(0, &[1; 4]), workers(4, &[1]));
    let prompt = vec![3; LONG];
    for worker in 0..4 {
        prefixes.begin(worker, 1_000);
        prefixes.apply(worker, &CacheChange::Stored(page_hashes(&prompt, "", PAGE)));
        let pair = choose(&router, &prompt, &prefills, &decodes).unwrap();
        assert_eq!(pair.prefill, usize::from(worker));
        prefixes.apply(worker, &CacheChange::Cleared);
    }
}

#[test]
fn each_half_has_its_policy() {
    let policies = Policies { unified: Policy::CacheAware, prefill: Policy::RoundRobin, decode: Policy::LeastLoad };
    let (router, _) = router(policies);
    let (mut prefills, mut decodes) = (workers(0, &[1; 2]), workers(2, &[1; 2]));
    prefills[0].load.in_flight = 9;
    decodes[0].load.in_flight = 1;
    let pairs: Vec<_> = (0..4).map(|_| choose(&router, &[1; 99], &prefills, &decodes).unwrap()).collect();
    assert_eq!(pairs.iter().map(|pair| pair.prefill).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert!(pairs.iter().all(|pair| pair.decode == 1));
}

proptest! {
    #[test]
    fn the_default_pair_is_the_cheapest_of_all(
        prefill_loads in prop::collection::vec((0_usize..20, 0_u64..3), 1..6),
        decode_loads in prop::collection::vec((0_usize..20, 0_u64..3), 1..6),
    ) {
        let (router, _) = router(Policy::CacheAware);
        let made = |first, loads: &[(usize, u64)]| {
            let mut made = workers(first, &loads.iter().map(|load| load.1).collect::<Vec<_>>());
            made.iter_mut().zip(loads).for_each(|(worker, load)| worker.load.in_flight = load.0);
            made
        };
        let (prefills, decodes) = (made(0, &prefill_loads), made(10, &decode_loads));
        let pairs = || {
            let with = |prefill: Candidate| {
                decodes.iter().filter(move |decode| decode.layout == prefill.layout).map(move |&decode| (prefill, decode))
            };
            prefills.iter().copied().flat_map(with)
        };
        let cost = |(prefill, decode): (Candidate, Candidate)| prefill.load.in_flight + decode.load.in_flight;
        let chosen = choose(&router, &[1; 300], &prefills, &decodes);
        let chosen = chosen.map(|pair| cost((prefills[pair.prefill], decodes[pair.decode])));
        prop_assert_eq!(chosen, pairs().map(cost).min());
    }
}
