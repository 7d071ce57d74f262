//! A fleet of simulated workers behind the product's router.
//!
//! A worker computes prompts one after another at the price that `CostModel` says, 8 GPUs sharing each; then a request
//! decodes in steps that take longer the more requests there are. Its cache holds whole pages and forgets the least
//! recently used. The router learns of stored and dropped pages when the prompt is done, and of loads once a second.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use baleen_gateway::route::cost::CostModel;
use baleen_gateway::route::load::WorkerLoad;
use baleen_gateway::route::pages::page_hashes;
use baleen_gateway::route::policy::Policy;
use baleen_gateway::route::prefix::{CacheChange, SharedPrefixIndex};
use baleen_gateway::route::{Candidate, RouteRequest, Router};
use serde_json::{Map, Value, json};

use crate::trace::{self, Arrival};

const PAGE: usize = 64;
const GPUS: f64 = 8.0;
const STEP_S: f64 = 0.020;
/// What each further request adds to a step.
const STEP_PER_REQUEST_S: f64 = 0.000_06;
const FLEETS: [u16; 4] = [8, 16, 32, 64];
/// Pages of one worker's cache.
const CACHES: [usize; 4] = [400, 750, 1_500, 3_000];
const POLICIES: [(&str, Policy); 5] = [
    ("cache_aware", Policy::CacheAware),
    ("prefix_hash", Policy::PrefixHash),
    ("least_load", Policy::LeastLoad),
    ("power_of_two", Policy::PowerOfTwo),
    ("round_robin", Policy::RoundRobin),
];

/// Every policy on the two traces, 8 workers that hold 1,500 pages each.
pub fn conversations() -> Value {
    let shared = trace::conversations(20.0);
    let strangers = trace::strangers(4_000, 20.0);
    let of = |arrivals: &[Arrival]| {
        let run = |(name, policy)| (String::from(name), Fleet::new(8, 1_500, policy).run(arrivals));
        POLICIES.map(run).into_iter().collect::<Map<_, _>>()
    };
    json!({"shared": of(&shared), "strangers": of(&strangers)})
}

/// What knowing the caches gains, by the size of the fleet and of its caches; and the most that any routing could: all
/// tokens that came before, in one cache that forgets nothing. The trace's distinct pages are told beside it, so that a
/// cache can be read as a share of them.
pub fn gain() -> Value {
    let arrivals = trace::conversations(20.0);
    let share = |size, pages, policy| Fleet::new(size, pages, policy).run(&arrivals)["cached_share"].clone();
    let of = |size: u16, pages: usize| {
        json!({
            "workers": size,
            "pages_each": pages,
            "cache_aware": share(size, pages, Policy::CacheAware),
            "round_robin": share(size, pages, Policy::RoundRobin),
        })
    };
    let grid: Vec<Value> = CACHES
        .iter()
        .flat_map(|&pages| FLEETS.iter().map(move |&size| (size, pages)))
        .map(|(size, pages)| of(size, pages))
        .collect();
    let everything = share(1, usize::MAX, Policy::RoundRobin);
    let distinct: HashSet<u64> = arrivals.iter().flat_map(|arrival| page_hashes(&arrival.prompt, "", PAGE)).collect();
    json!({"grid": grid, "most_possible": everything, "distinct_pages": distinct.len()})
}

/// A second of 100,000 requests for 1,000 workers, and smaller fleets at the same load a worker.
pub fn scale() -> Value {
    let sizes = [10_u16, 100, 1_000];
    let of = |&size: &u16| {
        let rate = f64::from(size) * 100.0;
        let arrivals = trace::crowd(usize::from(size) * 100, rate, 500);
        let run = |(name, policy)| (String::from(name), Fleet::new(size, 20_000, policy).run(&arrivals));
        (size.to_string(), json!(POLICIES.map(run).into_iter().collect::<Map<_, _>>()))
    };
    json!(sizes.iter().map(of).collect::<Map<_, _>>())
}

struct Fleet {
    router: Router,
    prefixes: Arc<SharedPrefixIndex>,
    workers: Vec<Worker>,
    candidates: Vec<Candidate>,
    events: BinaryHeap<Reverse<Event>>,
}

struct Worker {
    /// Until when prompts that came earlier keep it busy.
    busy_until_s: f64,
    running: usize,
    cache: Cache,
}

/// Whole pages, least recently used first to go.
struct Cache {
    max_pages: usize,
    used_at: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at_ns: u64,
    kind: Kind,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Prefilled { worker: u16, pages: Vec<u64>, cost_ns: u64, output_tokens: usize },
    Done { worker: u16 },
    Report,
}

impl Fleet {
    fn new(size: u16, max_pages: usize, policy: Policy) -> Self {
        let prefixes = Arc::new(SharedPrefixIndex::default());
        (0..size).for_each(|worker| prefixes.begin(worker, max_pages));
        let worker = |_| Worker {
            busy_until_s: 0.0,
            running: 0,
            cache: Cache { max_pages, used_at: HashMap::new(), by_use: BTreeMap::new(), clock: 0 },
        };
        let candidate = |worker: u16| Candidate {
            worker,
            name_hash: u64::from(worker).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            layout: 0,
            load: WorkerLoad::default(),
        };
        Self {
            router: Router::new(policy, prefixes.clone()),
            prefixes,
            workers: (0..size).map(worker).collect(),
            candidates: (0..size).map(candidate).collect(),
            events: BinaryHeap::new(),
        }
    }

    fn run(mut self, arrivals: &[Arrival]) -> Value {
        let mut measured = Measured::default();
        self.events.push(Reverse(Event { at_ns: 0, kind: Kind::Report }));
        for arrival in arrivals {
            self.advance(arrival.at_s);
            self.admit(arrival, &mut measured);
        }
        self.advance(f64::INFINITY);
        measured.report(&self.workers)
    }

    fn admit(&mut self, arrival: &Arrival, measured: &mut Measured) {
        let cost = CostModel::SPARSE;
        let request =
            RouteRequest { prompt: &arrival.prompt, cache_salt: "", session: None, page_size_tokens: PAGE, cost };
        let start = Instant::now();
        let index = self.router.choose(&request, &self.candidates).unwrap().index;
        measured.decisions_s += start.elapsed().as_secs_f64();
        let worker = &mut self.workers[index];
        let pages = page_hashes(&arrival.prompt, "", PAGE);
        let found = worker.cache.find(&pages);
        let cached = (found * PAGE).min(arrival.prompt.len() - 1);
        let cost_us = cost.prefill_us(cached, arrival.prompt.len()) / GPUS;
        worker.busy_until_s = worker.busy_until_s.max(arrival.at_s) + cost_us * 1e-6;
        measured.add(arrival, cached, worker.busy_until_s - arrival.at_s);
        let load = &mut self.candidates[index].load;
        load.in_flight += 1;
        let expected_us = cost_us * GPUS;
        load.pending_prefill_us += expected_us;
        self.events.push(Reverse(Event {
            at_ns: nanoseconds(worker.busy_until_s),
            kind: Kind::Prefilled {
                worker: self.candidates[index].worker,
                pages,
                cost_ns: nanoseconds(expected_us * 1e-6),
                output_tokens: arrival.output_tokens,
            },
        }));
    }

    fn advance(&mut self, until_s: f64) {
        let until_ns = if until_s.is_finite() { nanoseconds(until_s) } else { u64::MAX };
        while self.events.peek().is_some_and(|Reverse(event)| event.at_ns <= until_ns) {
            let Some(Reverse(Event { at_ns, kind })) = self.events.pop() else { return };
            match kind {
                Kind::Prefilled { worker, pages, cost_ns, output_tokens } => {
                    self.prefilled(worker, pages, cost_ns);
                    let running = &mut self.workers[usize::from(worker)].running;
                    *running += 1;
                    let step_s = STEP_S + *running as f64 * STEP_PER_REQUEST_S;
                    let at_ns = at_ns + nanoseconds(output_tokens as f64 * step_s);
                    self.events.push(Reverse(Event { at_ns, kind: Kind::Done { worker } }));
                }
                Kind::Done { worker } => {
                    self.workers[usize::from(worker)].running -= 1;
                    self.candidates[usize::from(worker)].load.in_flight -= 1;
                }
                Kind::Report => {
                    for (worker, candidate) in self.workers.iter().zip(&mut self.candidates) {
                        candidate.load.reported_requests = worker.running;
                    }
                    if !self.events.is_empty() {
                        self.events.push(Reverse(Event { at_ns: at_ns + 1_000_000_000, kind: Kind::Report }));
                    }
                }
            }
        }
    }

    fn prefilled(&mut self, worker: u16, pages: Vec<u64>, cost_ns: u64) {
        let load = &mut self.candidates[usize::from(worker)].load;
        load.pending_prefill_us = (load.pending_prefill_us - cost_ns as f64 * 1e-3).max(0.0);
        let dropped = self.workers[usize::from(worker)].cache.store(&pages);
        self.prefixes.apply(worker, &CacheChange::Removed(dropped));
        self.prefixes.apply(worker, &CacheChange::Stored(pages));
    }
}

impl Cache {
    fn find(&self, pages: &[u64]) -> usize {
        pages.iter().take_while(|page| self.used_at.contains_key(page)).count()
    }

    /// Keeps `pages`; returns what had to go for them. A page is younger than those that follow it, so ends go first.
    fn store(&mut self, pages: &[u64]) -> Vec<u64> {
        for &page in pages.iter().rev() {
            self.clock += 1;
            if let Some(earlier) = self.used_at.insert(page, self.clock) {
                self.by_use.remove(&earlier);
            }
            self.by_use.insert(self.clock, page);
        }
        let mut dropped = Vec::new();
        while self.used_at.len() > self.max_pages {
            let Some((_, page)) = self.by_use.pop_first() else { break };
            self.used_at.remove(&page);
            dropped.push(page);
        }
        dropped
    }
}

/// What users of the fleet would have seen.
#[derive(Default)]
struct Measured {
    prompt_tokens: usize,
    cached_tokens: usize,
    first_token_s: Vec<f64>,
    decisions_s: f64,
}

impl Measured {
    fn add(&mut self, arrival: &Arrival, cached: usize, first_token_s: f64) {
        self.prompt_tokens += arrival.prompt.len();
        self.cached_tokens += cached;
        self.first_token_s.push(first_token_s);
    }

    fn report(mut self, workers: &[Worker]) -> Value {
        let count = self.first_token_s.len();
        self.first_token_s.sort_by(f64::total_cmp);
        let mean = self.first_token_s.iter().sum::<f64>() / count as f64;
        let busy: Vec<f64> = workers.iter().map(|worker| worker.busy_until_s).collect();
        json!({
            "requests": count,
            "cached_share": self.cached_tokens as f64 / self.prompt_tokens as f64,
            "ttft_mean_s": mean,
            "ttft_p50_s": self.first_token_s[count / 2],
            "ttft_p99_s": self.first_token_s[count * 99 / 100],
            "last_prompt_done_s": busy.iter().copied().fold(0.0, f64::max),
            "decision_us": self.decisions_s / count as f64 * 1e6,
        })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times of a simulation are short and positive"
)]
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}
