//! What retries and replays may cost all requests together: a share of the traffic, places, memory, and workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::place::Life;

/// Retries that are always allowed within a window.
const RETRY_FLOOR: u32 = 10;
/// One retry more for each so many requests of the window.
const REQUESTS_PER_RETRY: u32 = 5;
const WINDOW: Duration = Duration::from_secs(10);
/// Replays whose first new token is not out. Each is a long prompt, and a dead worker leaves many at one instant.
const MAX_REPLAYS: usize = 64;
/// Memory for prompts and answers that may be replayed. Beyond it requests run, and end with their worker.
const MAX_RETAINED_BYTES: u64 = 1 << 30;

/// Workers that may die under one prompt before it is refused, and for how long it is.
const POISON_DEATHS: usize = 2;
const SUSPICION: Duration = Duration::from_secs(600);
const MAX_SUSPECTS: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ReplayLimits {
    budget: Mutex<RetryBudget>,
    replays: AtomicUsize,
    retained_bytes: AtomicU64,
    deaths: Mutex<Deaths>,
    /// Workers on which a suspect is tried.
    trials: Mutex<Vec<Life>>,
    /// Prompts in `deaths`: looked at by every request, and nearly always 0.
    num_suspects: AtomicUsize,
}

impl ReplayLimits {
    /// A worker died under this prompt.
    pub(super) fn note_death(&self, prompt: u64, worker: Life, now: Instant) {
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.note(prompt, worker, now);
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

    /// Workers that no other suspect may be given: the next death must name the right one.
    pub(super) fn trials(&self) -> Vec<Life> {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A suspect is tried on these workers.
    pub(super) fn begin_trial(self: &Arc<Self>, workers: Vec<Life>) -> Trial {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner).extend(&workers);
        Trial { limits: self.clone(), workers }
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

/// Workers that died under prompts which have not been answered since. Pure.
#[derive(Debug, Default)]
struct Deaths {
    by_prompt: HashMap<u64, (Vec<Life>, Instant)>,
}

impl Deaths {
    fn note(&mut self, prompt: u64, worker: Life, now: Instant) {
        self.by_prompt.retain(|_, (_, since)| now.saturating_duration_since(*since) < SUSPICION);
        if self.by_prompt.len() >= MAX_SUSPECTS && !self.by_prompt.contains_key(&prompt) {
            return;
        }
        let (workers, since) = self.by_prompt.entry(prompt).or_insert_with(|| (Vec::new(), now));
        *since = now;
        // Many requests of one prompt may die with one worker.
        if workers.len() < POISON_DEATHS && !workers.contains(&worker) {
            workers.push(worker);
        }
    }

    fn is_poison(&self, prompt: u64, now: Instant) -> bool {
        let of_prompt = self.by_prompt.get(&prompt);
        of_prompt.is_some_and(|(workers, since)| {
            workers.len() >= POISON_DEATHS && now.saturating_duration_since(*since) < SUSPICION
        })
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

/// Held by a suspect from its next try to its next token.
#[derive(Debug)]
pub(super) struct Trial {
    limits: Arc<ReplayLimits>,
    workers: Vec<Life>,
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut trials = self.limits.trials.lock().unwrap_or_else(PoisonError::into_inner);
        for worker in &self.workers {
            if let Some(place) = trials.iter().position(|life| life == worker) {
                trials.swap_remove(place);
            }
        }
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

    #[test]
    fn a_prompt_under_which_two_workers_died_is_poison_until_it_is_answered() {
        let (limits, now) = (ReplayLimits::default(), Instant::now());
        limits.note_death(7, (0, 1), now);
        limits.note_death(7, (0, 1), now);
        assert!(!limits.is_poison(|| 7, now), "one worker died, under two requests");
        limits.note_death(7, (0, 2), now);
        assert!(limits.is_poison(|| 7, now) && !limits.is_poison(|| 8, now));
        assert!(!limits.is_poison(|| 7, now + SUSPICION));
        limits.absolve(|| 7);
        assert!(!limits.is_poison(|| 7, now));
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
