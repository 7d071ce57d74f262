//! How tokens are drawn: the request's fields, checked against the limits, in the worker's terms.

use serde::de::MapAccess;

use super::error::InvalidRequest;
use super::facts::ModelFacts;
use super::fields::{Biases, Float, Integer};
use super::limits::{Limits, digits};
use super::processors::ProcessorFields;

/// Sampling in the contract's terms; an absent field takes the worker's default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingSpec {
    pub max_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// 0 is off.
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    /// Token id and what is added to its logit.
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: Option<u64>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: Option<bool>,
    /// Log-probabilities of each output token and of this many alternatives.
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    /// Reasoning tokens after which thinking is ended.
    pub thinking_budget: Option<u32>,
    /// Names of the server's plugins.
    pub logit_processors: Vec<String>,
}

/// The fields as they stand in the request.
#[derive(Debug, Default)]
pub(super) struct SamplingFields {
    max_tokens: Option<Integer>,
    max_completion_tokens: Option<Integer>,
    min_tokens: Option<Integer>,
    temperature: Option<Float>,
    top_p: Option<Float>,
    top_k: Option<Integer>,
    min_p: Option<Float>,
    repetition_penalty: Option<Float>,
    frequency_penalty: Option<Float>,
    presence_penalty: Option<Float>,
    logit_bias: Option<Biases>,
    seed: Option<Integer>,
    stop_token_ids: Option<Vec<Integer>>,
    ignore_eos: Option<bool>,
    thinking_budget: Option<Integer>,
    processors: ProcessorFields,
}

impl SamplingFields {
    /// Reads the value if `key` is a sampling field.
    pub(super) fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "max_tokens" => self.max_tokens = map.next_value()?,
            "max_completion_tokens" => self.max_completion_tokens = map.next_value()?,
            "min_tokens" => self.min_tokens = map.next_value()?,
            "temperature" => self.temperature = map.next_value()?,
            "top_p" => self.top_p = map.next_value()?,
            "top_k" => self.top_k = map.next_value()?,
            "min_p" => self.min_p = map.next_value()?,
            "repetition_penalty" => self.repetition_penalty = map.next_value()?,
            "frequency_penalty" => self.frequency_penalty = map.next_value()?,
            "presence_penalty" => self.presence_penalty = map.next_value()?,
            "logit_bias" => self.logit_bias = map.next_value()?,
            "seed" => self.seed = map.next_value()?,
            "stop_token_ids" => self.stop_token_ids = map.next_value()?,
            "ignore_eos" => self.ignore_eos = map.next_value()?,
            "thinking_budget" => self.thinking_budget = map.next_value()?,
            _ => return self.processors.read(key, map),
        }
        Ok(true)
    }

    /// The name under which the request bounds its output; the newer one counts when both are there.
    pub(super) fn max_tokens_param(&self) -> &'static str {
        if self.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" }
    }

    /// Checks every field. `logprobs` and `prompt_logprobs` differ between the endpoints and are left to them.
    pub(super) fn validate(mut self, limits: &Limits, model: &ModelFacts) -> Result<SamplingSpec, InvalidRequest> {
        let single = |limit: &super::limits::Limit, param: &str, value: Option<Float>| {
            value.map(|Float(value)| limit.check_f32(param, value)).transpose()
        };
        let unsigned = |limit: &super::limits::Limit, param: &str, value: Option<Integer>| {
            value.map(|Integer(value)| limit.check_u32(param, value)).transpose()
        };
        let max_param = self.max_tokens_param();
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = unsigned(&limits.max_tokens, max_param, max_tokens)?;
        if let Some(max_tokens) = max_tokens.filter(|max| *max > model.context_len) {
            let message =
                format!("'{max_param}' is {max_tokens}, but the model's context holds {} tokens.", model.context_len);
            return Err(InvalidRequest::context_length_exceeded(max_param, message));
        }
        let min_tokens = unsigned(&limits.min_tokens, "min_tokens", self.min_tokens)?;
        if let Some(min) = min_tokens.filter(|min| *min > model.context_len) {
            let message = format!("'min_tokens' is {min}, but the model's context holds {} tokens.", model.context_len);
            return Err(InvalidRequest::field("min_tokens", message));
        }
        if let (Some(min), Some(max)) = (min_tokens, max_tokens)
            && min > max
        {
            let message = format!("'min_tokens' is {min}, more than '{max_param}', which is {max}.");
            return Err(InvalidRequest::field("min_tokens", message));
        }
        let (budget_param, budget) = match (self.thinking_budget, self.processors.take_thinking_budget()?) {
            (None, Some(budget)) => ("custom_params.thinking_budget", Some(budget)),
            (budget, _) => ("thinking_budget", budget),
        };
        let spec = SamplingSpec {
            max_tokens,
            min_tokens,
            temperature: single(&limits.temperature, "temperature", self.temperature)?,
            top_p: single(&limits.top_p, "top_p", self.top_p)?,
            top_k: self.top_k.map(|value| top_k(limits, value)).transpose()?,
            min_p: single(&limits.min_p, "min_p", self.min_p)?,
            repetition_penalty: single(&limits.repetition_penalty, "repetition_penalty", self.repetition_penalty)?,
            frequency_penalty: single(&limits.frequency_penalty, "frequency_penalty", self.frequency_penalty)?,
            presence_penalty: single(&limits.presence_penalty, "presence_penalty", self.presence_penalty)?,
            logit_bias: logit_bias(limits, model, self.logit_bias)?,
            seed: self.seed.map(seed).transpose()?,
            stop_token_ids: stop_token_ids(limits, model, self.stop_token_ids)?,
            ignore_eos: self.ignore_eos,
            logprobs: None,
            prompt_logprobs: None,
            thinking_budget: unsigned(&limits.thinking_budget, budget_param, budget)?,
            logit_processors: self.processors.validate(limits)?,
        };
        Ok(spec)
    }
}

/// -1 switches the filter off, as 0 does.
fn top_k(limits: &Limits, Integer(value): Integer) -> Result<u32, InvalidRequest> {
    let value = if value == -1 { 0 } else { value };
    limits.top_k.check_u32("top_k", value)
}

/// Every integer of 64 bits, signed or not, is a seed; a negative one is taken by its bits.
fn seed(Integer(seed): Integer) -> Result<u64, InvalidRequest> {
    let bits = u64::try_from(seed).or_else(|_| i64::try_from(seed).map(i64::cast_unsigned));
    bits.map_err(|_| {
        let message = format!("'seed' must be between {} and {}, but it is {}.", i64::MIN, u64::MAX, digits(seed));
        InvalidRequest::field("seed", message)
    })
}

fn logit_bias(limits: &Limits, model: &ModelFacts, biases: Option<Biases>) -> Result<Vec<(u32, f32)>, InvalidRequest> {
    let Biases(biases) = biases.unwrap_or(Biases(Vec::new()));
    limits.logit_bias.check_items("logit_bias", biases.len())?;
    let check = |(id, bias): (u32, f64)| {
        let param = format!("logit_bias.{id}");
        model.check_token_id(&param, id.into())?;
        Ok((id, limits.logit_bias.check_f32(&param, bias)?))
    };
    biases.into_iter().map(check).collect()
}

fn stop_token_ids(limits: &Limits, model: &ModelFacts, ids: Option<Vec<Integer>>) -> Result<Vec<u32>, InvalidRequest> {
    let ids = ids.unwrap_or_default();
    limits.stop_token_ids.check_items("stop_token_ids", ids.len())?;
    let check = |(index, Integer(id)): (usize, Integer)| model.check_token_id(&format!("stop_token_ids[{index}]"), id);
    ids.into_iter().enumerate().map(check).collect()
}
