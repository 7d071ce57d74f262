//! The policies, each a function over what is known of the workers. Equal workers take turns in all of them.

use clap::ValueEnum;

use super::Candidate;

/// Tokens at a prompt's beginning by which `prefix_hash` tells prompts apart.
pub(super) const HASHED_TOKENS: usize = 256;
/// How far above the mean load `prefix_hash` lets a worker grow before its prompts go to the next one.
const HASH_LOAD_FACTOR: f64 = 1.25;

/// How a worker is chosen, by the names that other routers use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// The worker that would have the first token soonest: work before it, and what of the prompt it has cached
    #[default]
    #[value(alias = "prefix_aware")]
    CacheAware,
    /// The worker with the fewest requests
    LeastLoad,
    /// Each in turn
    RoundRobin,
    /// The less loaded of two drawn at random
    PowerOfTwo,
    /// The worker that the first 256 tokens hash to, unless it is busier than the others
    PrefixHash,
    /// One worker a session, named by `x-smg-routing-key`, `x-session-id`, `prompt_cache_key` or `user`; without: the least
    /// loaded
    #[value(alias = "consistent_hash")]
    ConsistentHashing,
}

/// The policies for workers that do all of a request, and for the two halves of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    pub unified: Policy,
    pub prefill: Policy,
    pub decode: Policy,
}

impl From<Policy> for Policies {
    fn from(policy: Policy) -> Self {
        Self { unified: policy, prefill: policy, decode: policy }
    }
}

/// Each worker in turn.
pub(super) fn in_turn(turn: u64, count: usize) -> Option<usize> {
    usize::try_from(turn % u64::try_from(count).ok().filter(|&count| count > 0)?).ok()
}

/// The worker with the fewest requests; of those the one with the fewest tokens waiting.
pub(super) fn least_loaded(turn: u64, workers: &[Candidate]) -> Option<usize> {
    let weight = |worker: &Candidate| (worker.load.requests(), worker.load.waiting_prompt_tokens);
    let first = in_turn(turn, workers.len())?;
    rotated(first, workers.len()).min_by_key(|&index| weight(&workers[index]))
}

/// The less loaded of two different workers that `turn` draws.
pub(super) fn lighter_of_two(turn: u64, workers: &[Candidate]) -> Option<usize> {
    let one = in_turn(mixed(turn), workers.len())?;
    let Some(step) = in_turn(mixed(!turn), workers.len() - 1) else { return Some(one) };
    let other = (one + 1 + step) % workers.len();
    Some(if workers[other].load.requests() < workers[one].load.requests() { other } else { one })
}

/// The worker of least `cost`, by index.
pub(super) fn cheapest(turn: u64, count: usize, cost: impl Fn(usize) -> f64) -> Option<usize> {
    let first = in_turn(turn, count)?;
    rotated(first, count).map(|index| (index, cost(index))).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index)
}

/// Rendezvous hashing: each worker bids for `key`, and the highest bid of a worker with room wins. A worker that leaves
/// or joins moves only its own prompts.
pub(super) fn by_hash(key: u64, workers: &[Candidate]) -> Option<usize> {
    let total: usize = workers.iter().map(|worker| worker.load.requests()).sum();
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    let has_room = |worker: &Candidate| {
        let mean = (total + 1) as f64 / workers.len() as f64;
        (worker.load.requests() as f64) < (HASH_LOAD_FACTOR * mean).max(1.0)
    };
    let bidders = workers.iter().enumerate().filter(|(_, worker)| has_room(worker));
    // The least loaded worker is never above the mean, so somebody bids.
    bidders.max_by_key(|(_, worker)| mixed(key ^ worker.name_hash)).map(|(index, _)| index)
}

/// Rendezvous hashing of a session: the highest bid wins, however busy its worker is. One that leaves or joins moves only
/// the sessions that it had, or has from then on.
pub(super) fn by_session(session: u64, workers: &[Candidate]) -> Option<usize> {
    let bids = workers.iter().enumerate();
    bids.max_by_key(|(_, worker)| mixed(session ^ worker.name_hash)).map(|(index, _)| index)
}

/// All indices, `first` first.
fn rotated(first: usize, count: usize) -> impl Iterator<Item = usize> {
    (first..count).chain(0..first)
}

/// SplitMix64's output function: neighbouring numbers become unrelated ones.
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
