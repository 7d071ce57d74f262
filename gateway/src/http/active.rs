//! A request while it is served.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use crate::admission::Admitted;
use crate::admission::keyring::Caller;
use crate::error::ApiError;
use crate::generate::{Finish, Generation};
use crate::telemetry::{EndpointName, Metrics, Outcome};

/// A request from its arrival to its end: what it holds, and how it is counted and charged when it ends, by whatever
/// means.
pub struct ActiveRequest {
    /// What the answer is written from, while it is generated.
    pub generation: Option<Generation>,
    metrics: Arc<Metrics>,
    endpoint: EndpointName,
    pub caller: Caller,
    outcome: Outcome,
    /// Held for as long as the request is served.
    pub admitted: Option<Admitted>,
}

impl ActiveRequest {
    /// One that has just come.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, endpoint: EndpointName, caller: Caller) -> Self {
        // Whoever drops it without a word is a client that left.
        Self { generation: None, metrics, endpoint, caller, outcome: Outcome::Aborted, admitted: None }
    }

    /// Says how the request ended, and gives back what it held.
    pub fn finish(&mut self, outcome: Outcome) {
        self.outcome = outcome;
        self.release();
    }

    /// Ends it with an error that is its whole answer.
    pub fn fail(&mut self, error: ApiError) -> Response {
        self.finish(error.outcome());
        error.into_response()
    }

    fn release(&mut self) {
        if let Some(generation) = self.generation.take() {
            self.caller.charge_output(generation.usage().completion_tokens);
        }
        self.admitted = None;
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.release();
        self.metrics.count_request(self.endpoint, self.outcome);
        if let Some(metrics) = self.caller.metrics() {
            metrics.count_request(self.outcome);
        }
    }
}

/// How a generation that has ended is counted.
#[must_use]
pub fn outcome(generation: &Generation) -> Outcome {
    let aborted = generation.choices.iter().any(|choice| choice.finish == Some(Finish::Abort));
    if aborted { Outcome::Aborted } else { Outcome::Completed }
}
