//! Time of one decision and memory of the index: 64 workers with 100,000 pages each.

use std::sync::Arc;
use std::time::Instant;

use baleen_gateway::route::cost::CostModel;
use baleen_gateway::route::load::WorkerLoad;
use baleen_gateway::route::pages::page_hashes;
use baleen_gateway::route::policy::Policy;
use baleen_gateway::route::prefix::{CacheChange, SharedPrefixIndex};
use baleen_gateway::route::{Candidate, RouteRequest, Router};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

const NUM_WORKERS: u16 = 64;
const PAGES_EACH: usize = 100_000;
const PAGE: usize = 64;
const ROUNDS: usize = 2_000;

pub fn measure() -> Value {
    let mut random = StdRng::seed_from_u64(7);
    let prefixes = Arc::new(SharedPrefixIndex::default());
    // A quarter of each worker's pages are those of prompts that other workers know as well.
    let shared: Vec<Vec<u32>> = (0..200).map(|_| prompt(&mut random, 8_192)).collect();
    for worker in 0..NUM_WORKERS {
        prefixes.begin(worker, PAGES_EACH);
        let mut known = 0;
        while known < PAGES_EACH / 4 {
            let whole = page_hashes(&shared[random.random_range(0..shared.len())], "", PAGE);
            let pages = whole[..random.random_range(1..=whole.len())].to_vec();
            known += pages.len();
            prefixes.apply(worker, &CacheChange::Stored(pages));
        }
        let own = PAGES_EACH - prefixes.read(|index| index.num_pages(worker));
        prefixes.apply(worker, &CacheChange::Stored((0..own).map(|_| random.random()).collect()));
    }
    let tracked: usize = (0..NUM_WORKERS).map(|worker| prefixes.read(|index| index.num_pages(worker))).sum();
    let bytes = prefixes.read(baleen_gateway::route::prefix::PrefixIndex::bytes);
    let router = Router::new(Policy::CacheAware, prefixes);
    let workers: Vec<Candidate> = (0..NUM_WORKERS)
        .map(|worker| Candidate {
            worker,
            name_hash: random.random(),
            layout: 0,
            load: WorkerLoad { in_flight: random.random_range(0..64), ..WorkerLoad::default() },
        })
        .collect();
    let mut lengths = serde_json::Map::new();
    for length in [512, 2_048, 8_192, 32_768, 131_072] {
        let prompts: Vec<Vec<u32>> = shared
            .iter()
            .map(|known| known.iter().copied().chain(prompt(&mut random, length)).take(length).collect())
            .collect();
        lengths.insert(length.to_string(), timed(&router, &workers, &prompts));
    }
    json!({
        "workers": NUM_WORKERS,
        "pages_each": PAGES_EACH,
        "tracked_pages": tracked,
        "bytes_per_tracked_page": bytes as f64 / tracked as f64,
        "us_by_prompt_tokens": lengths,
    })
}

/// Microseconds of a decision, hashing of the prompt included.
fn timed(router: &Router, workers: &[Candidate], prompts: &[Vec<u32>]) -> Value {
    let mut us: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            let request = RouteRequest {
                prompt: &prompts[round % prompts.len()],
                cache_salt: "",
                session: None,
                page_size_tokens: PAGE,
                cost: CostModel::SPARSE,
            };
            let start = Instant::now();
            router.choose(&request, workers).unwrap();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    us.sort_by(f64::total_cmp);
    json!({"p50": us[ROUNDS / 2], "p99": us[ROUNDS * 99 / 100]})
}

fn prompt(random: &mut StdRng, length: usize) -> Vec<u32> {
    (0..length).map(|_| random.random_range(0..129_280)).collect()
}
