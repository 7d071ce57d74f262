//! Sets a worker aside that fails one request after another, and lets it prove itself again.
//!
//! Pure: time comes in as an argument. Only failures of the worker itself are told here; what a client did wrong and
//! what a full queue refused says nothing about it. One event may fail many requests at once, and counts once.

use std::time::{Duration, Instant};

/// Failures in a row after which a worker is set aside.
const MAX_FAILURES_IN_A_ROW: u32 = 5;
/// Peers that get no pages within so long after one that was counted may all miss them because of the same connection.
const BURST: Duration = Duration::from_secs(1);
/// How long it is set aside the first time; the n-th time takes n times as long.
const PAUSE: Duration = Duration::from_secs(30);
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// A probe without an outcome is forgotten after this long: its client may have left.
const PROBE_PATIENCE: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breaker {
    failures_in_a_row: u32,
    /// When the last of them was counted that a peer told.
    told_at: Option<Instant>,
    /// The stream whose end was counted last.
    lost_stream: Option<u64>,
    num_pauses: u32,
    /// Set while the worker is set aside, and until a probe has come back well.
    paused_until: Option<Instant>,
    probe_since: Option<Instant>,
}

impl Breaker {
    /// Whether the worker may be given a request.
    #[must_use]
    pub fn allows(&self, now: Instant) -> bool {
        let Some(until) = self.paused_until else { return true };
        let is_probing = self.probe_since.is_some_and(|since| now < since + PROBE_PATIENCE);
        now >= until && !is_probing
    }

    /// A request went to the worker. After a pause it is the probe that decides.
    pub fn submitted(&mut self, now: Instant) {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.probe_since = Some(now);
        }
    }

    /// A request came to its end there.
    pub fn succeeded(&mut self) {
        *self = Self { lost_stream: self.lost_stream, ..Self::default() };
    }

    /// The worker failed a request that another worker might have served.
    pub fn failed(&mut self, now: Instant) {
        self.failures_in_a_row += 1;
        let was_probed = self.probe_since.take().is_some();
        if was_probed || (self.paused_until.is_none() && self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW) {
            self.trip(now);
        }
    }

    /// A peer did not get a prompt's pages from the worker.
    pub fn failed_peer(&mut self, now: Instant) {
        if self.probe_since.is_some() || self.told_at.is_none_or(|at| now >= at + BURST) {
            self.told_at = Some(now);
            self.failed(now);
        }
    }

    /// A request was lost with this stream to the worker, as others that hear of it sooner or later.
    pub fn lost(&mut self, stream: u64, now: Instant) {
        if self.lost_stream.replace(stream) != Some(stream) {
            self.failed(now);
        }
    }

    /// Sets the worker aside at once: it hangs.
    pub fn trip(&mut self, now: Instant) {
        self.num_pauses += 1;
        self.paused_until = Some(now + (PAUSE * self.num_pauses).min(MAX_PAUSE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(times: u32, now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        (0..times).for_each(|_| breaker.failed(now));
        breaker
    }

    #[test]
    fn five_failures_in_a_row_set_a_worker_aside_and_four_do_not() {
        let now = Instant::now();
        assert!(failing(4, now).allows(now));
        let breaker = failing(5, now);
        assert!(!breaker.allows(now) && !breaker.allows(now + PAUSE - Duration::from_millis(1)));
        assert!(breaker.allows(now + PAUSE));
    }

    #[test]
    fn a_success_between_them_starts_the_count_anew() {
        let now = Instant::now();
        let mut breaker = failing(4, now);
        breaker.succeeded();
        (0..4).for_each(|_| breaker.failed(now));
        assert!(breaker.allows(now));
    }

    #[test]
    fn the_end_of_a_stream_counts_once_however_many_requests_it_had() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for stream in 0..4 {
            (0..100).for_each(|_| breaker.lost(stream, now));
            assert!(breaker.allows(now), "stream {stream}");
        }
        breaker.lost(4, now);
        assert!(!breaker.allows(now), "five streams in a row have");
        let mut breaker = Breaker::default();
        breaker.lost(7, now);
        breaker.succeeded();
        (0..100).for_each(|_| breaker.lost(7, now + PAUSE));
        assert_eq!(breaker.failures_in_a_row, 0, "slow clients hear of it when the worker is back at work");
    }

    #[test]
    fn peers_that_miss_pages_at_once_count_once() {
        let now = Instant::now();
        let mut breaker = failing(3, now);
        (0..100).for_each(|count| breaker.failed_peer(now + BURST * count / 101));
        assert!(breaker.allows(now + BURST));
        breaker.failed_peer(now + BURST);
        assert!(!breaker.allows(now + BURST));
    }

    #[test]
    fn one_probe_decides_after_a_pause_and_each_pause_is_longer() {
        let mut now = Instant::now();
        let mut breaker = failing(5, now);
        for count in 2..=20 {
            now += MAX_PAUSE;
            assert!(breaker.allows(now));
            breaker.submitted(now);
            assert!(!breaker.allows(now), "one probe at a time");
            breaker.failed(now);
            let pause = (PAUSE * count).min(MAX_PAUSE);
            assert!(!breaker.allows(now + pause - Duration::from_millis(1)) && breaker.allows(now + pause));
        }
        now += MAX_PAUSE;
        breaker.submitted(now);
        breaker.succeeded();
        assert!(breaker.allows(now));
    }

    #[test]
    fn a_probe_whose_client_left_is_forgotten() {
        let now = Instant::now();
        let mut breaker = failing(5, now);
        breaker.submitted(now + PAUSE);
        assert!(!breaker.allows(now + PAUSE));
        assert!(breaker.allows(now + PAUSE + PROBE_PATIENCE));
    }

    #[test]
    fn failures_of_requests_that_were_under_way_prolong_no_pause() {
        let now = Instant::now();
        let breaker = failing(50, now);
        assert!(breaker.allows(now + PAUSE));
    }
}
