#![expect(clippy::unwrap_used, reason = "tests")]

//! Each policy on workers made up for the purpose.

use std::sync::Arc;

use super::cost::CostModel;
use super::load::WorkerLoad;
use super::pages::page_hashes;
use super::policy::Policy;
use super::prefix::{CacheChange, SharedPrefixIndex};
use super::{Candidate, RouteRequest, Router};

const PAGE: usize = 64;

fn workers(loads: &[WorkerLoad]) -> Vec<Candidate> {
    let candidate = |(number, &load): (u16, &WorkerLoad)| Candidate {
        worker: number,
        name_hash: u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15),
        layout: 0,
        load,
    };
    (0..).zip(loads).map(candidate).collect()
}

fn busy(in_flight: usize, reported_requests: usize) -> WorkerLoad {
    WorkerLoad { in_flight, reported_requests, ..WorkerLoad::default() }
}

fn request(prompt: &[u32]) -> RouteRequest<'_> {
    RouteRequest { prompt, cache_salt: "", session: None, page_size_tokens: PAGE, cost: CostModel::SPARSE }
}

fn choices(router: &Router, prompt: &[u32], workers: &[Candidate], times: usize) -> Vec<usize> {
    (0..times).map(|_| router.choose(&request(prompt), workers).unwrap().index).collect()
}

fn router(policy: Policy) -> (Router, Arc<SharedPrefixIndex>) {
    let prefixes = Arc::new(SharedPrefixIndex::default());
    (Router::new(policy, prefixes.clone()), prefixes)
}

#[test]
fn no_worker_is_no_choice() {
    for policy in [
        Policy::CacheAware,
        Policy::LeastLoad,
        Policy::RoundRobin,
        Policy::PowerOfTwo,
        Policy::PrefixHash,
        Policy::ConsistentHashing,
    ] {
        assert_eq!(router(policy).0.choose(&request(&[1]), &[]), None);
        assert_eq!(choices(&router(policy).0, &[], &workers(&[busy(9, 9)]), 2), [0, 0], "{policy:?}");
    }
}

#[test]
fn equal_workers_take_turns() {
    for policy in [Policy::CacheAware, Policy::LeastLoad, Policy::RoundRobin] {
        assert_eq!(choices(&router(policy).0, &[1; 99], &workers(&[busy(0, 0); 3]), 6), [0, 1, 2, 0, 1, 2]);
    }
}

#[test]
fn the_least_loaded_worker_is_chosen() {
    for policy in [Policy::CacheAware, Policy::LeastLoad] {
        let workers = workers(&[busy(3, 0), busy(1, 2), busy(0, 4)]);
        assert_eq!(choices(&router(policy).0, &[1; 99], &workers, 4), [1; 4]);
    }
}

#[test]
fn of_equally_many_requests_those_with_fewer_tokens_to_compute_are_lighter() {
    let waiting = |tokens: u64| WorkerLoad { waiting_prompt_tokens: tokens, ..busy(2, 0) };
    let workers = workers(&[waiting(900), waiting(100), waiting(500)]);
    assert_eq!(choices(&router(Policy::LeastLoad).0, &[1; 99], &workers, 3), [1; 3]);
}

#[test]
fn of_two_drawn_workers_the_lighter_one_is_chosen() {
    let router = router(Policy::PowerOfTwo).0;
    let loads = [busy(9, 0), busy(5, 0), busy(7, 0), busy(1, 0)];
    let mut counts = [0; 4];
    choices(&router, &[1], &workers(&loads), 6_000).into_iter().for_each(|index| counts[index] += 1);
    // Of the six pairs the heaviest wins none, the lightest three.
    assert_eq!(counts[0], 0);
    for (index, pairs) in [(1, 2), (2, 1), (3, 3)] {
        assert!((counts[index] - pairs * 1_000_i32).abs() < 200, "{counts:?}");
    }
}

#[test]
fn a_known_prefix_outweighs_a_small_difference_of_load_and_no_great_one() {
    let (router, prefixes) = router(Policy::CacheAware);
    let prompt: Vec<u32> = (0..6_400).collect();
    prefixes.begin(0, 1_000);
    prefixes.begin(1, 1_000);
    prefixes.apply(1, &CacheChange::Stored(page_hashes(&prompt[..4_096], "", PAGE)));
    let choice = router.choose(&request(&prompt), &workers(&[busy(2, 0), busy(5, 0)])).unwrap();
    assert_eq!((choice.index, choice.cached_tokens), (1, 4_096));
    assert!(choice.prefill_us < CostModel::SPARSE.prefill_us(0, 6_400));
    let choice = router.choose(&request(&prompt), &workers(&[busy(2, 0), busy(90, 0)])).unwrap();
    assert_eq!((choice.index, choice.cached_tokens), (0, 0));
}

#[test]
fn prompts_that_wait_to_be_computed_count_by_their_cost() {
    let router = router(Policy::CacheAware).0;
    let pending = |us: f64| WorkerLoad { in_flight: 1, pending_prefill_us: us, ..WorkerLoad::default() };
    assert_eq!(choices(&router, &[1; 999], &workers(&[pending(9e6), pending(2e6), busy(3, 0)]), 3), [2; 3]);
    let reported = WorkerLoad { waiting_prompt_tokens: 100_000, ..WorkerLoad::default() };
    assert_eq!(choices(&router, &[1; 999], &workers(&[reported, busy(9, 0)]), 3), [1; 3]);
}

#[test]
fn tenants_do_not_see_each_others_pages() {
    let (router, prefixes) = router(Policy::CacheAware);
    let prompt = [7; 640];
    prefixes.begin(1, 1_000);
    prefixes.apply(1, &CacheChange::Stored(page_hashes(&prompt, "tenant", PAGE)));
    let workers = workers(&[busy(0, 0), busy(0, 0)]);
    let cached = |cache_salt| {
        let request = RouteRequest { cache_salt, ..request(&prompt) };
        router.choose(&request, &workers).unwrap().cached_tokens
    };
    // All but the last token, which is always computed.
    assert_eq!(cached("tenant"), 639);
    assert_eq!((cached(""), cached("other")), (0, 0));
}

#[test]
fn equal_beginnings_go_to_one_worker_until_it_is_busier_than_the_others() {
    let router = router(Policy::PrefixHash).0;
    let loads = [busy(4, 0); 5];
    let prompt: Vec<u32> = (0..400).collect();
    let home = choices(&router, &prompt, &workers(&loads), 3);
    assert_eq!(home, [home[0]; 3]);
    let other_end: Vec<u32> = (0..300).chain(900..990).collect();
    assert_eq!(choices(&router, &other_end, &workers(&loads), 1), home[..1]);
    let spread: std::collections::HashSet<usize> =
        (0..200).flat_map(|first| choices(&router, &[first; 300], &workers(&loads), 1)).collect();
    assert_eq!(spread.len(), 5);
    // The names decide, in whatever order they are given.
    let named: Vec<Candidate> = workers(&loads).into_iter().rev().collect();
    let again = choices(&router, &prompt, &named, 1)[0];
    assert_eq!(usize::from(named[again].worker), home[0]);
    let mut uneven = loads;
    uneven[home[0]] = busy(40, 0);
    assert_ne!(choices(&router, &prompt, &workers(&uneven), 1), home[..1]);
    // A worker that leaves moves nobody else's prompts.
    let left: Vec<Candidate> =
        workers(&loads).into_iter().filter(|worker| usize::from(worker.worker) != (home[0] + 1) % 5).collect();
    let moved = choices(&router, &prompt, &left, 1)[0];
    assert_eq!(usize::from(left[moved].worker), home[0]);
}

#[test]
fn a_session_keeps_its_worker_whatever_it_asks_and_however_busy_that_is() {
    let router = router(Policy::ConsistentHashing).0;
    let of = |session: u64, prompt: &[u32], workers: &[Candidate]| {
        let request = RouteRequest { session: Some(session), ..request(prompt) };
        workers[router.choose(&request, workers).unwrap().index].worker
    };
    let idle = workers(&[busy(0, 0); 5]);
    let homes: Vec<u16> = (0..1_000).map(|session| of(session, &[1; 9], &idle)).collect();
    for number in 0..5 {
        let share = homes.iter().filter(|home| **home == number).count();
        assert!((150..250).contains(&share), "worker {number} has {share} of 1000 sessions");
        let mut loads = [busy(0, 0); 5];
        loads[usize::from(number)] = busy(500, 500);
        let loaded: Vec<Candidate> = workers(&loads).into_iter().rev().collect();
        let again = (0..1_000).map(|session| of(session, &[2; 700], &loaded));
        assert!(again.eq(homes.iter().copied()), "sessions leave a busy worker");
    }
    // One leaves: its sessions move, to all of the others, and nobody else's. When it is back, so are they.
    let left: Vec<Candidate> = idle.iter().copied().filter(|worker| worker.worker != 2).collect();
    let moved: Vec<u16> = (0..1_000).map(|session| of(session, &[1; 9], &left)).collect();
    let changed = || homes.iter().zip(&moved).filter(|(before, after)| before != after);
    assert!(changed().all(|(before, _)| *before == 2));
    assert_eq!(changed().map(|(_, after)| after).collect::<std::collections::HashSet<_>>().len(), 4);
}

#[test]
fn a_request_of_no_session_goes_to_the_least_loaded_worker() {
    let workers = workers(&[busy(3, 0), busy(1, 0), busy(2, 0)]);
    assert_eq!(choices(&router(Policy::ConsistentHashing).0, &[1; 99], &workers, 3), [1; 3]);
}

#[test]
fn prompts_that_part_within_256_tokens_and_those_of_other_tenants_are_spread() {
    let router = router(Policy::PrefixHash).0;
    let workers = workers(&[busy(4, 0); 5]);
    let parting: Vec<u32> = (0..100).collect();
    let homes = |prompts: &mut dyn Iterator<Item = (Vec<u32>, String)>| {
        let home = |(prompt, cache_salt): (Vec<u32>, String)| {
            let request = RouteRequest { cache_salt: &cache_salt, ..request(&prompt) };
            router.choose(&request, &workers).unwrap().index
        };
        prompts.map(home).collect::<std::collections::HashSet<_>>().len()
    };
    let parted = |last: u32| parting.iter().copied().chain([last; 200]).collect::<Vec<_>>();
    assert_eq!(homes(&mut (0..60).map(|last| (parted(last), String::new()))), 5);
    assert_eq!(homes(&mut (0..60).map(|tenant: u32| (parted(0), tenant.to_string()))), 5);
}
