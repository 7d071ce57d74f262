//! What is counted for each API key, by its name.

use metrics::{Counter, Gauge, Key, Label, Recorder};

use super::{METADATA, Metrics, Outcome, count};

pub(super) const KEY_REQUESTS: &str = "baleen_key_requests_total";
pub(super) const KEY_PROMPT_TOKENS: &str = "baleen_key_prompt_tokens_total";
pub(super) const KEY_OUTPUT_TOKENS: &str = "baleen_key_output_tokens_total";
pub(super) const KEY_REFUSALS: &str = "baleen_key_refusals_total";
pub(super) const KEY_PRESENT: &str = "baleen_key_present_requests";

/// Which of a key's limits refused a request, as the label `limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Concurrency,
    Tokens,
}

impl Refusal {
    const ALL: [Self; 2] = [Self::Concurrency, Self::Tokens];

    fn name(self) -> &'static str {
        match self {
            Self::Concurrency => "concurrency",
            Self::Tokens => "tokens",
        }
    }
}

/// Handles of one key's metrics.
pub struct KeyMetrics {
    requests: [Counter; Outcome::ALL.len()],
    refusals: [Counter; Refusal::ALL.len()],
    pub prompt_tokens: Counter,
    pub output_tokens: Counter,
    present: Gauge,
}

impl KeyMetrics {
    /// The metrics of the key with this name; the same ones each time.
    #[must_use]
    pub fn new(name: &str, metrics: &Metrics) -> Self {
        let labelled = |metric, more: Option<Label>| {
            let labels = std::iter::once(Label::new("key", name.to_owned())).chain(more);
            Key::from_parts(metric, labels.collect::<Vec<_>>())
        };
        let counter = |metric, more| metrics.recorder.register_counter(&labelled(metric, more), &METADATA);
        Self {
            requests: Outcome::ALL.map(|outcome| counter(KEY_REQUESTS, Some(Label::new("outcome", outcome.name())))),
            refusals: Refusal::ALL.map(|refusal| counter(KEY_REFUSALS, Some(Label::new("limit", refusal.name())))),
            prompt_tokens: counter(KEY_PROMPT_TOKENS, None),
            output_tokens: counter(KEY_OUTPUT_TOKENS, None),
            present: metrics.recorder.register_gauge(&labelled(KEY_PRESENT, None), &METADATA),
        }
    }

    /// Counts a request of this key that has ended.
    pub fn count_request(&self, outcome: Outcome) {
        self.requests[outcome as usize].increment(1);
    }

    /// Counts a request that one of the key's limits refused.
    pub fn count_refusal(&self, refusal: Refusal) {
        self.refusals[refusal as usize].increment(1);
    }

    /// Requests of this key that are in progress or in line.
    pub fn set_present(&self, present: usize) {
        self.present.set(count(present));
    }
}
