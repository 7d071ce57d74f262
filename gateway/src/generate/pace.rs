//! When the tokens of a choice came, as far as the metrics have not heard of it.
//!
//! All streams share the metrics, and a report at each token would have the processors hand that memory to and fro.

use std::time::Instant;

use crate::telemetry::Metrics;

/// Steps after which a choice's tokens are reported.
const STEPS_PER_REPORT: usize = 8;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pace {
    last: Option<Instant>,
    num_tokens: u32,
    /// Seconds before each token of a step, and how many there were.
    gaps: [(f64, u32); STEPS_PER_REPORT],
    num_gaps: usize,
}

impl Pace {
    /// `num_tokens` of one step came at `now`.
    pub(super) fn note(&mut self, num_tokens: u32, now: Instant, metrics: &Metrics) {
        self.num_tokens += num_tokens;
        if let Some(last) = self.last.replace(now) {
            // Tokens that came together share the time since those before them.
            self.gaps[self.num_gaps] = ((now - last).as_secs_f64() / f64::from(num_tokens), num_tokens);
            self.num_gaps += 1;
        }
        if self.num_gaps == STEPS_PER_REPORT {
            self.report(metrics);
        }
    }

    /// Tells the metrics what they have not heard of.
    pub(super) fn report(&mut self, metrics: &Metrics) {
        if self.num_tokens > 0 {
            metrics.output_tokens.increment(self.num_tokens.into());
        }
        for (gap_s, num_tokens) in &self.gaps[..self.num_gaps] {
            metrics.itl.record_many(*gap_s, *num_tokens as usize);
        }
        (self.num_tokens, self.num_gaps) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Pace, STEPS_PER_REPORT};
    use crate::telemetry::Metrics;

    #[test]
    fn every_token_and_every_gap_is_reported_once() {
        let (metrics, mut pace, mut now) = (Metrics::new(), Pace::default(), Instant::now());
        let num_steps = 3 * STEPS_PER_REPORT + 2;
        for _ in 0..num_steps {
            pace.note(2, now, &metrics);
            now += Duration::from_millis(10);
        }
        pace.report(&metrics);
        pace.report(&metrics);
        let text = metrics.handle().render();
        let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start)?.trim().parse::<usize>().ok());
        assert_eq!(line("baleen_output_tokens_total"), Some(2 * num_steps));
        // No gap comes before the first step.
        assert_eq!(line("baleen_inter_token_latency_seconds_count"), Some(2 * (num_steps - 1)));
    }
}
