//! What retries and replays may cost all requests together: a share of the traffic, places, memory, and workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::worker::pool::Life;

/// Retries that are always allowed within a window.
const RETRY_FLOOR: u32 = 10;
/// One retry more for each so many requests of the window.
const REQUESTS_PER_RETRY: u32 = 5;
const WINDOW: Duration = Duration::from_secs(10);
/// Replays whose first new token is not out. Each is a long prompt, and a dead worker leaves many at one instant.
const MAX_REPLAYS: usize = 64;
/// Memory for prompts and answers that may be replayed. Beyond it requests run, and end with their worker.
const MAX_RETAINED_BYTES: u64 = 1 << 30;

/// Workers that may die under one prompt alone before it is refused, and for how long it is.
const POISON_DEATHS: usize = 2;
const MAX_DEATHS_KEPT: usize = 8;
const SUSPICION: Duration = Duration::from_secs(600);
const MAX_SUSPECTS: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ReplayLimits {
    budget: Mutex<RetryBudget>,
    replays: AtomicUsize,
    retained_bytes: AtomicU64,
    deaths: Mutex<Deaths>,
    /// Prompts in `deaths`: looked at by every request, and nearly always 0.
    num_suspects: AtomicUsize,
}

impl ReplayLimits {
    /// A worker died under this prompt, of which it had given no token.
    pub(super) fn note_death(&self, prompt: u64, death: Death, now: Instant) {
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.note(prompt, death, now);
        self.num_suspects.store(deaths.by_prompt.len(), Ordering::Relaxed);
    }

    /// The worker lives, and only its stream broke.
    pub(super) fn retract_death(&self, prompt: u64, worker: Life) {
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.retract(prompt, worker);
        self.num_suspects.store(deaths.by_prompt.len(), Ordering::Relaxed);
    }

    /// Whether workers keep dying under this prompt.
    pub(super) fn is_poison(&self, prompt: impl FnOnce() -> u64, now: Instant) -> bool {
        self.num_suspects.load(Ordering::Relaxed) > 0
            && self.deaths.lock().unwrap_or_else(PoisonError::into_inner).is_poison(prompt(), now)
    }

    /// A request with this prompt came to its end, so it was not what killed workers.
    pub(super) fn absolve(&self, prompt: impl FnOnce() -> u64) {
        if self.num_suspects.load(Ordering::Relaxed) > 0 {
            let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
            deaths.by_prompt.remove(&prompt());
            self.num_suspects.store(deaths.by_prompt.len(), Ordering::Relaxed);
        }
    }

    pub(super) fn note_request(&self, now: Instant) {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner).note_request(now);
    }

    /// Whether a request of which nothing is out may be submitted once more.
    pub(super) fn take_retry(&self, now: Instant) -> bool {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner).take(now)
    }

    /// A place among the replays, where one is free.
    pub(super) fn begin_replay(self: &Arc<Self>) -> Option<ReplayPlace> {
        let take = |count: usize| (count < MAX_REPLAYS).then_some(count + 1);
        self.replays.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(ReplayPlace { limits: self.clone() })
    }

    /// Takes memory; false where there is not as much left.
    pub(super) fn retain(&self, bytes: u64) -> bool {
        let take = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= MAX_RETAINED_BYTES);
        self.retained_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    pub(super) fn release(&self, bytes: u64) {
        self.retained_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The end of a worker's life, as one of its requests saw it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Death {
    pub worker: Life,
    /// Whether the request was tried there, apart from other suspects.
    pub in_trial: bool,
}

/// Workers that died under prompts which have not been answered since. Pure.
///
/// A worker that dies under many prompts accuses none of them. One is poison that was tried when a worker died, or under
/// which two died that had no other.
#[derive(Debug, Default)]
struct Deaths {
    by_prompt: HashMap<u64, Suspicion>,
    /// The only prompt under which a worker died; none where there were several.
    alone_with: HashMap<Life, (Option<u64>, Instant)>,
}

#[derive(Debug)]
struct Suspicion {
    workers: Vec<Life>,
    died_in_trial: Option<Life>,
    since: Instant,
}

impl Deaths {
    fn note(&mut self, prompt: u64, death: Death, now: Instant) {
        let is_fresh = |since: Instant| now.saturating_duration_since(since) < SUSPICION;
        self.by_prompt.retain(|_, suspicion| is_fresh(suspicion.since));
        self.alone_with.retain(|_, (_, since)| is_fresh(*since));
        let (alone_with, _) = self.alone_with.entry(death.worker).or_insert((Some(prompt), now));
        *alone_with = alone_with.filter(|&other| other == prompt);
        if self.by_prompt.len() >= MAX_SUSPECTS && !self.by_prompt.contains_key(&prompt) {
            return;
        }
        let new = || Suspicion { workers: Vec::new(), died_in_trial: None, since: now };
        let suspicion = self.by_prompt.entry(prompt).or_insert_with(new);
        suspicion.since = now;
        suspicion.died_in_trial = death.in_trial.then_some(death.worker).or(suspicion.died_in_trial);
        // Many requests of one prompt may die with one worker.
        if suspicion.workers.len() < MAX_DEATHS_KEPT && !suspicion.workers.contains(&death.worker) {
            suspicion.workers.push(death.worker);
        }
    }

    fn retract(&mut self, prompt: u64, worker: Life) {
        let Some(suspicion) = self.by_prompt.get_mut(&prompt) else { return };
        suspicion.workers.retain(|&other| other != worker);
        suspicion.died_in_trial.take_if(|other| *other == worker);
        if suspicion.workers.is_empty() {
            self.by_prompt.remove(&prompt);
        }
    }

    fn is_poison(&self, prompt: u64, now: Instant) -> bool {
        let Some(suspicion) = self.by_prompt.get(&prompt) else { return false };
        let was_alone = |worker: &&Life| self.alone_with.get(worker).is_some_and(|(alone, _)| *alone == Some(prompt));
        now.saturating_duration_since(suspicion.since) < SUSPICION
            && (suspicion.died_in_trial.is_some()
                || suspicion.workers.iter().filter(was_alone).count() >= POISON_DEATHS)
    }
}

/// Held by a choice from its replay to its next token.
#[derive(Debug)]
pub(super) struct ReplayPlace {
    limits: Arc<ReplayLimits>,
}

impl Drop for ReplayPlace {
    fn drop(&mut self) {
        self.limits.replays.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Retries of the present window and the one before it, against the requests of both. Pure.
#[derive(Clone, Copy, Debug, Default)]
struct RetryBudget {
    started: Option<Instant>,
    /// The present window's, then the one before it.
    requests: [u32; 2],
    retries: [u32; 2],
}

impl RetryBudget {
    fn note_request(&mut self, now: Instant) {
        self.turn(now);
        self.requests[0] = self.requests[0].saturating_add(1);
    }

    fn take(&mut self, now: Instant) -> bool {
        self.turn(now);
        let requests = self.requests[0].saturating_add(self.requests[1]);
        let is_left = self.retries[0] + self.retries[1] < RETRY_FLOOR + requests / REQUESTS_PER_RETRY;
        self.retries[0] += u32::from(is_left);
        is_left
    }

    fn turn(&mut self, now: Instant) {
        let started = *self.started.get_or_insert(now);
        let windows = now.saturating_duration_since(started).as_nanos() / WINDOW.as_nanos();
        if windows == 0 {
            return;
        }
        let fresh = |counts: [u32; 2]| [0, if windows == 1 { counts[0] } else { 0 }];
        (self.requests, self.retries) = (fresh(self.requests), fresh(self.retries));
        self.started = Some(if windows == 1 { started + WINDOW } else { now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_fifth_of_the_requests_and_ten() {
        let (mut budget, now) = (RetryBudget::default(), Instant::now());
        let granted = |budget: &mut RetryBudget, now| (0..1_000).filter(|_| budget.take(now)).count();
        assert_eq!(granted(&mut budget, now), 10);
        (0..500).for_each(|_| budget.note_request(now));
        assert_eq!(granted(&mut budget, now), 100);
        assert_eq!(granted(&mut budget, now + WINDOW), 0);
        // The window in which all that happened is over.
        assert_eq!(granted(&mut budget, now + WINDOW * 2), 10);
        (0..5).for_each(|_| budget.note_request(now + WINDOW * 9));
        assert_eq!(granted(&mut budget, now + WINDOW * 9), 11);
    }

    fn death(worker: u64, in_trial: bool) -> Death {
        Death { worker: (0, worker), in_trial }
    }

    #[test]
    fn a_prompt_under_which_alone_two_workers_died_is_poison_until_it_is_answered() {
        let (limits, now) = (ReplayLimits::default(), Instant::now());
        limits.note_death(7, death(1, false), now);
        limits.note_death(7, death(1, false), now);
        assert!(!limits.is_poison(|| 7, now), "one worker died, under two requests");
        limits.note_death(7, death(2, false), now);
        assert!(limits.is_poison(|| 7, now) && !limits.is_poison(|| 8, now));
        assert!(!limits.is_poison(|| 7, now + SUSPICION));
        limits.absolve(|| 7);
        assert!(!limits.is_poison(|| 7, now));
    }

    #[test]
    fn workers_that_die_under_many_prompts_accuse_none() {
        let (limits, now) = (ReplayLimits::default(), Instant::now());
        for worker in 0..6 {
            (0..20).for_each(|prompt| limits.note_death(prompt, death(worker, false), now));
        }
        assert!((0..20).all(|prompt| !limits.is_poison(|| prompt, now)));
        limits.note_death(3, death(6, true), now);
        let poison: Vec<u64> = (0..20).filter(|&prompt| limits.is_poison(|| prompt, now)).collect();
        assert_eq!(poison, [3], "it was tried apart from the others");
        limits.retract_death(3, (0, 6));
        assert!(!limits.is_poison(|| 3, now), "the worker lives");
    }

    #[test]
    fn places_and_memory_come_back() {
        let limits = Arc::new(ReplayLimits::default());
        let places: Vec<_> = std::iter::from_fn(|| limits.begin_replay()).collect();
        assert_eq!(places.len(), MAX_REPLAYS);
        drop(places);
        assert!(limits.begin_replay().is_some());
        assert!(limits.retain(MAX_RETAINED_BYTES) && !limits.retain(1) && !limits.retain(u64::MAX));
        limits.release(MAX_RETAINED_BYTES);
        assert!(limits.retain(1));
    }
}
