//! What both endpoints share besides sampling: choices, stop strings, rules on the text, streaming, scheduling.

use serde::Deserialize;
use serde::de::MapAccess;

use super::constraint::{ConstraintFields, FieldRule};
use super::error::InvalidRequest;
use super::facts::ModelFacts;
use super::fields::{Asks, Integer, Object, Strings};
use super::limits::{Limits, RequestLimits};
use super::sampling::{SamplingFields, SamplingSpec};
use crate::text::stop::StopStrings;

/// Abilities that the wire of other servers knows and this one lacks; asking for one is refused, never ignored.
const NOT_BUILT: &[&str] = &["prompt_logprobs", "stop_regex", "use_beam_search"];

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamSpec {
    /// A last chunk without choices carries the usage.
    pub include_usage: bool,
    /// Every chunk carries the usage so far.
    pub continuous_usage: bool,
}

/// A validated request, the prompt aside.
#[derive(Debug, Clone, Default)]
pub struct GenerationSpec {
    pub sampling: SamplingSpec,
    /// Output tokens when the request does not bound them; absent: whatever the context holds.
    pub default_max_tokens: Option<u32>,
    /// Choices per prompt.
    pub n: u32,
    pub stop: StopStrings,
    /// Whether a matched stop string stays in the text.
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    /// What the text must look like.
    pub content_rule: Option<FieldRule>,
    /// Absent: one answer, not streamed.
    pub stream: Option<StreamSpec>,
    /// Whether token ids are part of the answer.
    pub return_token_ids: bool,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: String,
    /// What the client calls the conversation or the user that this belongs to.
    pub session: Option<String>,
}

impl GenerationSpec {
    /// How many tokens may be generated after a prompt of `prompt_len` tokens. `param` names the prompt's field.
    pub fn fit_context(&self, prompt_len: usize, param: &str, model: &ModelFacts) -> Result<u32, InvalidRequest> {
        let context_len = model.context_len;
        if prompt_len == 0 {
            return Err(InvalidRequest::field(param, "The prompt has no tokens."));
        }
        let room = u32::try_from(prompt_len).ok().and_then(|len| context_len.checked_sub(len));
        let wanted = self.sampling.max_tokens;
        match (room, wanted) {
            (Some(room), Some(wanted)) if wanted <= room => Ok(wanted),
            (Some(room), None) if room > 0 => Ok(self.default_max_tokens.unwrap_or(room).min(room)),
            (_, Some(wanted)) => {
                let message = format!(
                    "The model's context holds {context_len} tokens; the prompt has {prompt_len} and up to {wanted} \
                     more were asked for."
                );
                Err(InvalidRequest::context_length_exceeded(param, message))
            }
            (_, None) => {
                let message = format!(
                    "The model's context holds {context_len} tokens; the prompt has {prompt_len}, which leaves no \
                     room for an answer."
                );
                Err(InvalidRequest::context_length_exceeded(param, message))
            }
        }
    }
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// The fields as they stand in the request.
#[derive(Debug, Default)]
pub(super) struct GenerationFields {
    pub model: Option<String>,
    pub sampling: SamplingFields,
    n: Option<Integer>,
    stop: Option<Strings>,
    include_stop_str_in_output: Option<bool>,
    no_stop_trim: Option<bool>,
    skip_special_tokens: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    return_token_ids: Option<bool>,
    priority: Option<Integer>,
    deadline_ms: Option<Integer>,
    cache_salt: Option<String>,
    prompt_cache_key: Option<String>,
    user: Option<String>,
    constraint: ConstraintFields,
    not_built: Option<&'static str>,
}

impl GenerationFields {
    /// Reads the value if `key` is a shared field.
    pub(super) fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "model" => self.model = map.next_value()?,
            "n" => self.n = map.next_value()?,
            "stop" => self.stop = map.next_value()?,
            "include_stop_str_in_output" => self.include_stop_str_in_output = map.next_value()?,
            // SGLang's name for the same.
            "no_stop_trim" => self.no_stop_trim = map.next_value()?,
            "skip_special_tokens" => self.skip_special_tokens = map.next_value()?,
            "stream" => self.stream = map.next_value()?,
            "stream_options" => self.stream_options = map.next_value()?,
            "return_token_ids" => self.return_token_ids = map.next_value()?,
            "priority" => self.priority = map.next_value()?,
            "deadline_ms" => self.deadline_ms = map.next_value()?,
            "cache_salt" => self.cache_salt = map.next_value()?,
            "prompt_cache_key" => self.prompt_cache_key = map.next_value()?,
            "user" => self.user = map.next_value()?,
            _ => {
                let Some(name) = NOT_BUILT.iter().find(|name| **name == key) else {
                    return Ok(self.sampling.read(key, map)? || self.constraint.read(key, map)?);
                };
                if map.next_value::<Asks>()?.0 {
                    self.not_built = Some(name);
                }
            }
        }
        Ok(true)
    }

    pub(super) fn validate(self, limits: &Limits, model: &ModelFacts) -> Result<GenerationSpec, InvalidRequest> {
        if let Some(name) = self.not_built {
            let message = format!("'{name}' is not implemented by this server.");
            return Err(InvalidRequest::not_implemented(name, message));
        }
        let n = limits.request.n.check_u32("n", self.n.map_or(1, |Integer(n)| n))?;
        let cache_salt = self.cache_salt.unwrap_or_default();
        limits.cache_salt.check_bytes("cache_salt", cache_salt.len())?;
        let priority = self.priority.map(|Integer(value)| limits.priority.check_integer("priority", value));
        let deadline_ms = self.deadline_ms.map(|Integer(value)| limits.deadline_ms.check_integer("deadline_ms", value));
        Ok(GenerationSpec {
            default_max_tokens: None,
            n,
            stop: stop_strings(self.stop, &limits.request)?,
            include_stop: [self.include_stop_str_in_output, self.no_stop_trim].contains(&Some(true)),
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            content_rule: self.constraint.validate(&limits.request)?,
            stream: stream_spec(self.stream, self.stream_options)?,
            return_token_ids: self.return_token_ids.unwrap_or(false),
            priority: priority.transpose()?.unwrap_or(0),
            deadline_ms: deadline_ms.transpose()?,
            cache_salt,
            session: self.prompt_cache_key.or(self.user).filter(|session| !session.is_empty()),
            sampling: self.sampling.validate(limits, model)?,
        })
    }
}

fn stop_strings(stop: Option<Strings>, limits: &RequestLimits) -> Result<StopStrings, InvalidRequest> {
    let Strings(strings) = stop.unwrap_or(Strings(Vec::new()));
    limits.stop.check_items("stop", strings.len())?;
    for text in &strings {
        limits.stop.check_bytes("stop", text.len())?;
    }
    if strings.iter().any(String::is_empty) {
        return Err(InvalidRequest::field("stop", "'stop' must not contain an empty string."));
    }
    Ok(StopStrings::new(&strings))
}

fn stream_spec(
    stream: Option<bool>,
    options: Option<Object<StreamOptions>>,
) -> Result<Option<StreamSpec>, InvalidRequest> {
    match (stream.unwrap_or(false), options) {
        (false, None) => Ok(None),
        (false, Some(_)) => {
            let message = "'stream_options' is only allowed together with 'stream': true.";
            Err(InvalidRequest::field("stream_options", message))
        }
        (true, options) => {
            let options = options.map(|Object(options)| options).unwrap_or_default();
            Ok(Some(StreamSpec {
                include_usage: options.include_usage.unwrap_or(false),
                continuous_usage: options.continuous_usage_stats.unwrap_or(false),
            }))
        }
    }
}
