//! Chooses the worker of a request. Everything here is pure: a policy sees what is known of each worker and names one.
//!
//! `Router::choose` is the one way in; what it knows of caches comes in through `SharedPrefixIndex`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub mod cost;
mod holders;
pub mod load;
pub mod pages;
pub mod pd;
pub mod policy;
pub mod prefix;
mod table;

use cost::CostModel;
use load::WorkerLoad;
use policy::{Policies, Policy};
use prefix::SharedPrefixIndex;

/// One worker that could take a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Its number: its place in the pool, for as long as the gateway runs.
    pub worker: u16,
    /// Hash of its name, by which prompts are spread the same way by every gateway.
    pub name_hash: u64,
    /// Hash of its pages' layout: only workers of one layout make a pair.
    pub layout: u64,
    pub load: WorkerLoad,
}

/// What a choice may depend on.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    pub prompt: &'a [u32],
    pub cache_salt: &'a str,
    /// Hash of the session's name, where the client has given one.
    pub session: Option<u64>,
    pub page_size_tokens: usize,
    pub cost: CostModel,
}

/// A choice, and what it rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Place among the candidates.
    pub index: usize,
    /// Tokens of the prompt that the worker is known to hold.
    pub cached_tokens: usize,
    /// What the rest of the prompt costs it.
    pub prefill_us: f64,
}

/// Chooses by one policy. Decisions may be made on many threads at once.
#[derive(Debug)]
pub struct Router {
    policies: Policies,
    prefixes: Arc<SharedPrefixIndex>,
    /// Counts decisions: equal workers take turns by it, and chance is drawn from it.
    turn: AtomicU64,
}

impl Router {
    #[must_use]
    pub fn new(policies: impl Into<Policies>, prefixes: Arc<SharedPrefixIndex>) -> Self {
        Self { policies: policies.into(), prefixes, turn: AtomicU64::new(0) }
    }

    /// The worker for this request; `None` where there is no candidate.
    #[must_use]
    pub fn choose(&self, request: &RouteRequest<'_>, workers: &[Candidate]) -> Option<Choice> {
        let turn = self.next_turn();
        let policy = self.policies.unified;
        let found = self.found(policy, request, workers);
        let prefill_us = |index: usize| request.cost.prefill_us(found[index], request.prompt.len());
        let index = choose_by(policy, turn, request, workers, |index| {
            workers[index].load.busy_us(&request.cost) + prefill_us(index)
        })?;
        Some(Choice { index, cached_tokens: found[index], prefill_us: prefill_us(index) })
    }

    fn next_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Per candidate, how much of the prompt it is known to hold, where the policy asks.
    fn found(&self, policy: Policy, request: &RouteRequest<'_>, workers: &[Candidate]) -> Vec<usize> {
        match policy {
            // A single worker takes everything: nothing is looked up for it.
            Policy::CacheAware if workers.len() > 1 => self.cached_tokens(request, workers),
            _ => vec![0; workers.len()],
        }
    }

    /// Per candidate, how much of the prompt it is known to hold.
    fn cached_tokens(&self, request: &RouteRequest<'_>, workers: &[Candidate]) -> Vec<usize> {
        let prompt = pages::page_names(request.prompt, request.cache_salt, request.page_size_tokens);
        let depths = self.prefixes.read(|index| index.depths(prompt));
        // A worker computes at least the last token of a prompt anew.
        let most = request.prompt.len().saturating_sub(1);
        let tokens = |depth: u32| (depth as usize * request.page_size_tokens).min(most);
        workers.iter().map(|worker| depths.get(usize::from(worker.worker)).map_or(0, |&depth| tokens(depth))).collect()
    }
}

/// The worker that `policy` names, where `cost_us` is what the request costs each.
fn choose_by(
    policy: Policy,
    turn: u64,
    request: &RouteRequest<'_>,
    workers: &[Candidate],
    cost_us: impl Fn(usize) -> f64,
) -> Option<usize> {
    match policy {
        Policy::RoundRobin => policy::in_turn(turn, workers.len()),
        Policy::PowerOfTwo => policy::lighter_of_two(turn, workers),
        Policy::LeastLoad => policy::least_loaded(turn, workers),
        Policy::PrefixHash => policy::by_hash(beginning_hash(request), workers),
        Policy::ConsistentHashing => match request.session {
            Some(session) => policy::by_session(session, workers),
            None => policy::least_loaded(turn, workers),
        },
        Policy::CacheAware => policy::cheapest(turn, workers.len(), cost_us),
    }
}

/// The name of a prompt's beginning, all of it where it is short.
fn beginning_hash(request: &RouteRequest<'_>) -> u64 {
    let beginning = &request.prompt[..request.prompt.len().min(policy::HASHED_TOKENS)];
    let hashes = pages::page_hashes(beginning, request.cache_salt, beginning.len().max(1));
    hashes.first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests;
