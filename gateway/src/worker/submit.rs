//! What is submitted to a worker, and the frame it becomes.

use std::sync::Arc;

use super::{Role, TransferEndpoint, wire};
use crate::chat::constraint::Constraint;
use crate::openai::SamplingSpec;

/// One continuation to be computed. All submissions of a client request go to one worker, or to one pair, together.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Place of its choice in the client's request, by which its news are told apart.
    pub choice: u32,
    /// 128 random bits, minted by the gateway; the same in all attempts.
    pub request_id: u128,
    /// 0 first, one more at each replay.
    pub attempt: u32,
    /// Shared by the samples of a prompt.
    pub prompt_token_ids: Arc<Vec<u32>>,
    /// Tokens that earlier attempts gave: the worker goes on after them.
    pub resumed_token_ids: Vec<u32>,
    /// Always with a seed, so that every attempt and both legs draw alike.
    pub sampling: SamplingSpec,
    pub sample: Sample,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: Arc<str>,
    /// Hash of the session's name, for the choice of a worker alone.
    pub session: Option<u64>,
    /// Shared by the choices of a request.
    pub constraint: Option<Arc<Constraint>>,
    /// Whether the prompt ends inside reasoning, which the constraint leaves alone.
    pub starts_in_reasoning: bool,
}

/// Place of a continuation among the `n` of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// `request_id` of sample 0.
    pub group_id: u128,
    pub index: u32,
    pub size: u32,
}

/// What of a continuation a worker computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    /// The prompt and the first token, to be handed over.
    Prefill,
    /// What follows, from pages that are read at `peer`.
    Decode {
        peer: TransferEndpoint,
        peer_boot_epoch: u64,
    },
}

impl Part {
    fn leg(&self) -> Option<wire::DisaggregationLeg> {
        match self {
            Self::Whole => None,
            Self::Prefill => {
                Some(wire::DisaggregationLeg { role: wire::Role::Prefill.into(), ..wire::DisaggregationLeg::default() })
            }
            Self::Decode { peer: TransferEndpoint { backend, address }, peer_boot_epoch } => {
                let peer = wire::TransferEndpoint { backend: backend.clone(), address: address.clone(), dp_rank: 0 };
                let peer_boot_epoch = *peer_boot_epoch;
                Some(wire::DisaggregationLeg { role: wire::Role::Decode.into(), peer: Some(peer), peer_boot_epoch })
            }
        }
    }
}

impl Submission {
    /// This part of it, under a stream's key.
    pub(super) fn frame(&self, key: u64, part: &Part) -> wire::Submit {
        let sample = &self.sample;
        let group = (sample.size > 1).then(|| wire::SampleGroup {
            group_id: sample.group_id.to_be_bytes().to_vec(),
            index: sample.index,
            size: sample.size,
        });
        wire::Submit {
            key,
            request_id: self.request_id.to_be_bytes().to_vec(),
            attempt: self.attempt,
            prompt_token_ids: self.prompt_token_ids.to_vec(),
            resumed_token_ids: self.resumed_token_ids.clone(),
            sampling: Some(sampling_frame(self.sampling.clone())),
            priority: self.priority,
            deadline_ms: self.deadline_ms,
            cache_salt: self.cache_salt.as_ref().to_owned(),
            sample_group: group,
            constraint: self.constraint.as_deref().map(constraint_frame),
            starts_in_reasoning: self.starts_in_reasoning,
            disaggregation: part.leg(),
            ..wire::Submit::default()
        }
    }
}

impl From<wire::Role> for Role {
    fn from(role: wire::Role) -> Self {
        match role {
            wire::Role::Unified | wire::Role::Unspecified => Self::Unified,
            wire::Role::Prefill => Self::Prefill,
            wire::Role::Decode => Self::Decode,
        }
    }
}

fn constraint_frame(constraint: &Constraint) -> wire::submit::Constraint {
    let text = constraint.text().to_owned();
    match constraint {
        Constraint::JsonSchema(_) => wire::submit::Constraint::JsonSchema(text),
        Constraint::Regex(_) => wire::submit::Constraint::Regex(text),
        Constraint::Ebnf(_) => wire::submit::Constraint::Ebnf(text),
        Constraint::StructuralTag(_) => wire::submit::Constraint::StructuralTag(text),
    }
}

fn sampling_frame(sampling: SamplingSpec) -> wire::Sampling {
    let logit_bias = sampling.logit_bias.into_iter().map(|(token_id, bias)| wire::LogitBias { token_id, bias });
    wire::Sampling {
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        logit_bias: logit_bias.collect(),
        seed: sampling.seed,
        stop_token_ids: sampling.stop_token_ids,
        ignore_eos: sampling.ignore_eos,
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        thinking_budget: sampling.thinking_budget,
        logit_processors: sampling.logit_processors,
    }
}
