//! Abilities that a request takes and that not every worker has: the request goes only to a worker that has them all.

use super::{Enforced, GenerateSpec};
use crate::worker::WorkerInfo;
use crate::worker::pool::ReadyWorker;

/// An ability, and the request's field that takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Need {
    /// As workers list it among their features.
    pub ability: &'static str,
    pub field: String,
}

impl Need {
    pub(super) fn is_met_by(&self, worker: &WorkerInfo) -> bool {
        worker.features.iter().any(|feature| feature == self.ability)
    }
}

/// What `spec` takes. A field that changes nothing takes nothing.
pub(super) fn needs(spec: &GenerateSpec) -> Vec<Need> {
    let sampling = &spec.sampling;
    let changes = |value: Option<f32>, neutral: f32| value.is_some_and(|value| value != neutral);
    let asked = [
        ("penalties", "repetition_penalty", changes(sampling.repetition_penalty, 1.0)),
        ("penalties", "frequency_penalty", changes(sampling.frequency_penalty, 0.0)),
        ("penalties", "presence_penalty", changes(sampling.presence_penalty, 0.0)),
        ("logit_bias", "logit_bias", !sampling.logit_bias.is_empty()),
        ("min_tokens", "min_tokens", sampling.min_tokens.is_some_and(|count| count > 0)),
        ("thinking_budget", "thinking_budget", sampling.thinking_budget.is_some()),
        ("logit_processors", "logit_processors", !sampling.logit_processors.is_empty()),
        ("prompt_logprobs", "echo", sampling.prompt_logprobs.is_some()),
    ];
    let of_sampling = asked.into_iter().filter(|(_, _, is_asked)| *is_asked);
    let of_sampling = of_sampling.map(|(ability, field, _)| Need { ability, field: field.to_owned() });
    let enforced = spec.constraint.iter();
    let of_constraint =
        enforced.map(|Enforced { constraint, field }| Need { ability: constraint.ability(), field: field.clone() });
    of_constraint.chain(of_sampling).collect()
}

/// The need that keeps a request from all of `ready`: one that nobody meets, or else the first one that somebody does
/// not. None where there is no worker to lack anything.
pub(super) fn unmet<'a>(needs: &'a [Need], ready: &[ReadyWorker]) -> Option<&'a Need> {
    if ready.is_empty() {
        return None;
    }
    let nobody = needs.iter().find(|need| !ready.iter().any(|worker| need.is_met_by(&worker.info)));
    nobody.or_else(|| needs.iter().find(|need| !ready.iter().all(|worker| need.is_met_by(&worker.info))))
}
