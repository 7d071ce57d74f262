//! A token bucket that may go into debt: what a key may spend a minute. Pure; the caller brings the time.

use std::time::{Duration, Instant};

const MINUTE_S: f64 = 60.0;

/// Tokens a key may still spend. It fills evenly and holds a minute's worth.
///
/// What a request costs is known only once it has ended, so one is let in while the balance is positive and pays
/// afterwards; a debt keeps later ones out until it is paid. Over time no more is spent than the rate.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    balance: f64,
    counted_at: Instant,
}

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn full(tokens_per_minute: u32, now: Instant) -> Self {
        Self { balance: tokens_per_minute.into(), counted_at: now }
    }

    /// Whether a request may enter now.
    ///
    /// # Errors
    /// How long until one may.
    pub fn check(&mut self, tokens_per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(tokens_per_minute, now);
        if self.balance > 0.0 {
            return Ok(());
        }
        let seconds = -self.balance / (f64::from(tokens_per_minute) / MINUTE_S);
        Err(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Pays for `num_tokens`.
    pub fn charge(&mut self, num_tokens: u32, tokens_per_minute: u32, now: Instant) {
        self.refill(tokens_per_minute, now);
        self.balance -= f64::from(num_tokens);
    }

    fn refill(&mut self, tokens_per_minute: u32, now: Instant) {
        let capacity = f64::from(tokens_per_minute);
        let seconds = now.saturating_duration_since(self.counted_at).as_secs_f64();
        self.balance = (self.balance + seconds * capacity / MINUTE_S).min(capacity);
        self.counted_at = self.counted_at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: u32 = 600;

    #[test]
    fn a_debt_keeps_requests_out_until_it_is_paid() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(RATE, start);
        assert_eq!(bucket.check(RATE, start), Ok(()));
        bucket.charge(900, RATE, start);
        assert_eq!(bucket.check(RATE, start), Err(Duration::from_secs(30)));
        assert!(bucket.check(RATE, start + Duration::from_secs(29)).is_err());
        assert!(bucket.check(RATE, start + Duration::from_secs(31)).is_ok());
    }

    #[test]
    fn idleness_is_not_saved_up_beyond_a_minute() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(RATE, start);
        let later = start + Duration::from_secs(3600);
        bucket.charge(RATE, RATE, later);
        assert!(bucket.check(RATE, later).is_err());
    }

    #[test]
    fn a_new_rate_holds_from_now_on() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(RATE, start);
        bucket.charge(2 * RATE, RATE, start);
        assert_eq!(bucket.check(10 * RATE, start), Err(Duration::from_secs(6)));
        assert!(bucket.check(1, start + Duration::from_secs(60)).is_err());
    }

    proptest! {
        /// However requests come, what is spent stays within the rate, the first minute's worth, and one request.
        #[test]
        fn spending_stays_within_the_rate(requests in prop::collection::vec((0_u64..5_000, 1_u32..400), 1..200)) {
            let start = Instant::now();
            let mut bucket = TokenBucket::full(RATE, start);
            let (mut now, mut spent) = (start, 0.0);
            for (pause_ms, cost) in requests {
                now += Duration::from_millis(pause_ms);
                if bucket.check(RATE, now).is_ok() {
                    bucket.charge(cost, RATE, now);
                    spent += f64::from(cost);
                }
                let earned = (now - start).as_secs_f64() * f64::from(RATE) / MINUTE_S;
                prop_assert!(spent <= f64::from(RATE) + earned + 400.0);
            }
        }
    }
}
