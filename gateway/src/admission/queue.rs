//! Permits for requests in progress, and the bounded line of those that wait for one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Ends of requests are counted over this many seconds.
const WINDOW_S: usize = 10;
const MAX_RETRY_AFTER_S: u32 = 60;

/// Why a request got no permit, and in how many seconds to come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The line is full.
    Full { retry_after_s: u32 },
    /// It stood in line for too long.
    TooLong { retry_after_s: u32 },
}

/// See the module. Those in line are served in order.
#[derive(Debug)]
pub struct Queue {
    permits: Arc<Semaphore>,
    max_active: usize,
    max_waiting: usize,
    patience: Duration,
    num_waiting: AtomicUsize,
    ends: Arc<Mutex<DrainRate>>,
}

/// The right to be in progress; dropping it lets the next one in.
#[derive(Debug)]
pub struct Permit {
    has_waited: bool,
    ends: Arc<Mutex<DrainRate>>,
    _permit: OwnedSemaphorePermit,
}

impl Permit {
    /// Whether it had to be waited for.
    #[must_use]
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).record(Instant::now());
    }
}

/// One in line, for as long as it stands there.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Queue {
    /// A line of at most `max_waiting` before `max_active` permits; each waits for `patience` at most.
    #[must_use]
    pub fn new(max_active: usize, max_waiting: usize, patience: Duration) -> Self {
        let max_active = max_active.min(Semaphore::MAX_PERMITS);
        Self {
            permits: Arc::new(Semaphore::new(max_active)),
            max_active,
            max_waiting,
            patience,
            num_waiting: AtomicUsize::new(0),
            ends: Arc::new(Mutex::new(DrainRate::new(Instant::now()))),
        }
    }

    /// Waits for a permit, in order of arrival. Dropping the future leaves the line.
    ///
    /// # Errors
    /// The line is full, or did not move within the patience.
    pub async fn enter(&self) -> Result<Permit, Refused> {
        // Freed permits go to the line first, so this overtakes nobody.
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Ok(self.permit(permit, false));
        }
        let before = self.num_waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.num_waiting);
        if before >= self.max_waiting {
            drop(waiting);
            return Err(Refused::Full { retry_after_s: self.retry_after_s() });
        }
        match tokio::time::timeout(self.patience, self.permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(self.permit(permit, true)),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(Refused::TooLong { retry_after_s: self.retry_after_s() }),
        }
    }

    /// Requests in progress.
    #[must_use]
    pub fn active(&self) -> usize {
        self.max_active - self.permits.available_permits()
    }

    /// Requests in line.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.num_waiting.load(Ordering::Relaxed)
    }

    /// Requests that may be in progress at one time.
    #[must_use]
    pub fn max_active(&self) -> usize {
        self.max_active
    }

    /// When one that comes now and finds the line full should have a place in it: the line's length over the rate at
    /// which requests ended lately.
    fn retry_after_s(&self) -> u32 {
        let ahead = self.waiting() + 1;
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).seconds_for(ahead, Instant::now())
    }

    fn permit(&self, permit: OwnedSemaphorePermit, has_waited: bool) -> Permit {
        Permit { has_waited, ends: self.ends.clone(), _permit: permit }
    }
}

/// How many requests ended in each of the last seconds. Pure; the caller brings the time.
#[derive(Debug)]
struct DrainRate {
    start: Instant,
    /// Count of second `s` at index `s % WINDOW_S`.
    counts: [u32; WINDOW_S],
    newest_s: usize,
}

impl DrainRate {
    fn new(start: Instant) -> Self {
        Self { start, counts: [0; WINDOW_S], newest_s: 0 }
    }

    fn record(&mut self, now: Instant) {
        let second = self.advance(now);
        self.counts[second % WINDOW_S] += 1;
    }

    /// Whole seconds until `count` more have ended at the present rate, within bounds a client can work with.
    fn seconds_for(&mut self, count: usize, now: Instant) -> u32 {
        let second = self.advance(now);
        let ended: u32 = self.counts.iter().sum();
        if ended == 0 {
            // Nothing ended in the whole window, so nothing is known but that it takes longer.
            return u32::try_from(WINDOW_S).unwrap_or(MAX_RETRY_AFTER_S);
        }
        let span = (second + 1).min(WINDOW_S);
        let seconds = (count * span).div_ceil(ended as usize);
        u32::try_from(seconds).unwrap_or(MAX_RETRY_AFTER_S).clamp(1, MAX_RETRY_AFTER_S)
    }

    /// Forgets seconds that have left the window, and returns the present one.
    fn advance(&mut self, now: Instant) -> usize {
        let seconds = now.saturating_duration_since(self.start).as_secs();
        let second = usize::try_from(seconds).unwrap_or(usize::MAX);
        let stale = second.saturating_sub(self.newest_s).min(WINDOW_S);
        for passed in 1..=stale {
            self.counts[(self.newest_s + passed) % WINDOW_S] = 0;
        }
        self.newest_s = self.newest_s.max(second);
        self.newest_s
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut rate = DrainRate::new(start);
        assert_eq!(rate.seconds_for(1, at(0)), 10);
        for second in 0..20 {
            for _ in 0..4 {
                rate.record(at(second));
            }
        }
        assert_eq!(rate.seconds_for(1, at(19)), 1);
        assert_eq!(rate.seconds_for(40, at(19)), 10);
        assert_eq!(rate.seconds_for(100_000, at(19)), MAX_RETRY_AFTER_S);
        // Half of the window has passed without an end, then all of it.
        assert_eq!(rate.seconds_for(40, at(24)), 20);
        assert_eq!(rate.seconds_for(40, at(29)), 10);
        assert_eq!(rate.seconds_for(40, at(500)), 10);
    }

    #[test]
    fn a_young_rate_is_not_diluted_by_seconds_before_it() {
        let start = Instant::now();
        let mut rate = DrainRate::new(start);
        for _ in 0..8 {
            rate.record(start);
        }
        assert_eq!(rate.seconds_for(16, start), 2);
    }

    #[tokio::test]
    async fn those_in_line_go_in_order_and_the_rest_is_sent_away() {
        let queue = Arc::new(Queue::new(1, 2, LONG));
        let first = queue.enter().await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..2 {
            let (queue, order) = (queue.clone(), order.clone());
            waiting.push(tokio::spawn(async move {
                let permit = queue.enter().await.unwrap();
                order.lock().unwrap().push(number);
                drop(permit);
            }));
            tokio::task::yield_now().await;
        }
        assert_eq!((queue.active(), queue.waiting()), (1, 2));
        assert!(matches!(queue.enter().await, Err(Refused::Full { .. })));
        drop(first);
        for task in waiting {
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [0, 1]);
        assert_eq!((queue.active(), queue.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn patience_ends_and_leaving_frees_the_place() {
        let queue = Queue::new(1, 1, Duration::from_millis(50));
        let _held = queue.enter().await.unwrap();
        assert!(matches!(queue.enter().await, Err(Refused::TooLong { .. })));
        assert_eq!(queue.waiting(), 0);
        {
            let mut leaving = Box::pin(queue.enter());
            assert!(futures::poll!(leaving.as_mut()).is_pending());
            assert_eq!(queue.waiting(), 1);
        }
        assert_eq!((queue.active(), queue.waiting()), (1, 0));
    }
}
