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
    /// Pages that are free or can be had at once, as it last reported; none before its first report.
    pub free_pages: Option<u32>,
    /// Cost of prompts this gateway has sent and seen no token of, exact at this instant.
    pub pending_prefill_us: f64,
}

impl WorkerLoad {
    /// Requests there. A report is up to a second old, so this gateway's own count wins where it is the larger one.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.in_flight.max(self.reported_requests)
    }

    /// What a request of `total` tokens costs a decode worker that holds the first `cached` of them: the rest is copied
    /// there, it shares every step with those that run, and where its pages do not fit it waits for as long as it would
    /// take to compute what must make way.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn decode_us(&self, cost: &CostModel, cached: usize, total: usize, page_size_tokens: usize) -> f64 {
        let missing = total.saturating_sub(cached);
        let free = self.free_pages.map_or(usize::MAX, |pages| (pages as usize).saturating_mul(page_size_tokens));
        let overflow = missing.saturating_sub(free);
        self.requests() as f64 * cost.neighbour_us + missing as f64 * cost.transfer_us + overflow as f64 * cost.token_us
    }

    /// What a new request has before it or beside it, besides its own prompt.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn busy_us(&self, cost: &CostModel) -> f64 {
        let reported_us = self.waiting_prompt_tokens as f64 * cost.token_us;
        self.pending_prefill_us.max(reported_us) + self.requests() as f64 * cost.neighbour_us
    }
}
