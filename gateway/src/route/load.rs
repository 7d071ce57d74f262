//! How busy a worker is, as far as this gateway knows.

use super::cost::CostModel;

/// What is known of one worker's work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerLoad {
    /// Requests this gateway has in flight there, exact at this instant.
    pub in_flight: usize,
    /// Requests the worker last reported as running or waiting, those of other gateways included.
    pub reported_requests: usize,
    /// Prompt tokens the worker has not computed yet, as it last reported.
    pub waiting_prompt_tokens: u64,
    /// Cost of prompts this gateway has sent and seen no token of, exact at this instant.
    pub pending_prefill_us: f64,
}

impl WorkerLoad {
    /// Requests there. A report is up to a second old, so this gateway's own count wins where it is the larger one.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.in_flight.max(self.reported_requests)
    }

    /// What a new request has before it or beside it, besides its own prompt.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn busy_us(&self, cost: &CostModel) -> f64 {
        let reported_us = self.waiting_prompt_tokens as f64 * cost.token_us;
        self.pending_prefill_us.max(reported_us) + self.requests() as f64 * cost.neighbour_us
    }
}
