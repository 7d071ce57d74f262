//! `POST /v1/completions`: the request. The answer is in [`response`].

pub mod response;

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::constraint::FieldRule;
use super::error::InvalidRequest;
use super::facts::ModelFacts;
use super::fields::{Integer, parse_body};
use super::generation::{GenerationFields, GenerationSpec};
use super::limits::Limits;
use crate::chat::constraint::AnswerRule;

/// Output tokens when the request does not bound them: OpenAI's default of this endpoint.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Choices of one request over all of its prompts.
pub const MAX_TOTAL_CHOICES: usize = 4096;

/// One prompt, taken as given: nothing is put before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptSource {
    Text(String),
    Ids(Vec<u32>),
}

/// A request as it was sent: its types are right, its values are not yet checked.
#[derive(Debug, Default)]
pub struct CompletionRequest {
    fields: GenerationFields,
    prompt: Option<Prompts>,
    echo: Option<bool>,
    logprobs: Option<Integer>,
    best_of: Option<Integer>,
    suffix: Option<String>,
}

/// A request that can be generated. Choice `index` of the answer is sample `index % n` of prompt `index / n`.
#[derive(Debug)]
pub struct CompletionSpec {
    /// At least one.
    pub prompts: Vec<PromptSource>,
    /// Whether each text begins with its prompt. With log-probabilities the prompt's are asked for, too.
    pub echo: bool,
    pub rule: AnswerRule,
    pub generation: GenerationSpec,
}

impl CompletionRequest {
    /// Parses a body. Unknown fields are ignored, wrong types refused with the field's path.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        parse_body(body)
    }

    /// The model that was asked for; the caller compares it with the names it serves.
    pub fn model(&self) -> Option<&str> {
        self.fields.model.as_deref()
    }

    pub fn validate(self, limits: &Limits, model: &ModelFacts) -> Result<CompletionSpec, InvalidRequest> {
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            let message = "'suffix' is not implemented by this server.";
            return Err(InvalidRequest::not_implemented("suffix", message));
        }
        let Some(Prompts { prompts, is_list }) = self.prompt else {
            return Err(InvalidRequest::field("prompt", "'prompt' is required."));
        };
        check_prompts(&prompts, is_list, model)?;
        let mut generation = self.fields.validate(limits, model)?;
        let n = generation.n;
        if let Some(Integer(best_of)) = self.best_of.filter(|Integer(best_of)| *best_of != i128::from(n)) {
            let message = format!("'best_of' is not supported: it must equal 'n', which is {n}, but it is {best_of}.");
            return Err(InvalidRequest::field("best_of", message));
        }
        if prompts.len().saturating_mul(n as usize) > MAX_TOTAL_CHOICES {
            let message =
                format!("{} prompts with 'n' = {n} make more than {MAX_TOTAL_CHOICES} choices.", prompts.len());
            return Err(InvalidRequest::field("prompt", message));
        }
        let echo = self.echo.unwrap_or(false);
        let logprobs = self.logprobs.map(|Integer(value)| limits.logprobs.check_u32("logprobs", value));
        generation.sampling.logprobs = logprobs.transpose()?;
        generation.sampling.prompt_logprobs = generation.sampling.logprobs.filter(|_| echo);
        generation.default_max_tokens = Some(DEFAULT_MAX_TOKENS);
        let mut rule = AnswerRule::default();
        if let Some(FieldRule { field, rule: content }) = generation.content_rule.take() {
            rule = AnswerRule { field: field.to_owned(), content: Some(content), calls: None };
        }
        Ok(CompletionSpec { prompts, echo, rule, generation })
    }
}

fn check_prompts(prompts: &[PromptSource], is_list: bool, model: &ModelFacts) -> Result<(), InvalidRequest> {
    if prompts.is_empty() {
        return Err(InvalidRequest::field("prompt", "'prompt' must not be empty."));
    }
    for (index, prompt) in prompts.iter().enumerate() {
        let param = if is_list { format!("prompt[{index}]") } else { "prompt".to_owned() };
        match prompt {
            PromptSource::Text(text) if text.is_empty() => {
                return Err(InvalidRequest::field(&param, format!("'{param}' must not be empty.")));
            }
            PromptSource::Ids(ids) if ids.is_empty() => {
                return Err(InvalidRequest::field(&param, format!("'{param}' must not be empty.")));
            }
            PromptSource::Text(_) => {}
            PromptSource::Ids(ids) => {
                if let Some(at) = ids.iter().position(|id| *id >= model.vocab_size) {
                    model.check_token_id(&format!("{param}[{at}]"), ids[at].into())?;
                }
            }
        }
    }
    Ok(())
}

/// One prompt or a list of them.
#[derive(Debug)]
struct Prompts {
    prompts: Vec<PromptSource>,
    is_list: bool,
}

const PROMPT_FORMS: &str = "a string, a list of strings, a list of token ids or a list of lists of token ids";

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(PROMPT_FORMS)
            }
            fn visit_str<E>(self, value: &str) -> Result<Prompts, E> {
                Ok(Prompts { prompts: vec![PromptSource::Text(value.to_owned())], is_list: false })
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                // The first element decides what the list is a list of; the rest are read as that type directly.
                let mut prompts = Vec::new();
                match list.next_element::<FirstElement>()? {
                    None => {}
                    Some(FirstElement::Id(first)) => {
                        let mut ids = vec![first];
                        ids.reserve(list.size_hint().unwrap_or(0));
                        while let Some(id) = list.next_element::<TokenId>()? {
                            ids.push(id.0);
                        }
                        return Ok(Prompts { prompts: vec![PromptSource::Ids(ids)], is_list: false });
                    }
                    Some(FirstElement::Text(first)) => {
                        prompts.push(PromptSource::Text(first));
                        while let Some(text) = list.next_element()? {
                            prompts.push(PromptSource::Text(text));
                        }
                    }
                    Some(FirstElement::Ids(first)) => {
                        prompts.push(PromptSource::Ids(first));
                        while let Some(ids) = list.next_element::<Vec<TokenId>>()? {
                            prompts.push(PromptSource::Ids(ids.into_iter().map(|id| id.0).collect()));
                        }
                    }
                }
                Ok(Prompts { prompts, is_list: true })
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

/// A token id within the wire's range; whether the model has it is checked later.
struct TokenId(u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Integer(value) = Integer::deserialize(deserializer)?;
        u32::try_from(value).map(Self).map_err(|_| D::Error::custom(format!("{value} is not a token id")))
    }
}

enum FirstElement {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for FirstElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstElementVisitor;
        impl<'de> Visitor<'de> for FirstElementVisitor {
            type Value = FirstElement;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a token id or a list of token ids")
            }
            fn visit_str<E>(self, value: &str) -> Result<FirstElement, E> {
                Ok(FirstElement::Text(value.to_owned()))
            }
            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<FirstElement, E> {
                u32::try_from(value).map(FirstElement::Id).map_err(|_| E::custom(format!("{value} is not a token id")))
            }
            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<FirstElement, E> {
                Err(E::custom(format!("{value} is not a token id")))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FirstElement, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element::<TokenId>()? {
                    ids.push(id.0);
                }
                Ok(FirstElement::Ids(ids))
            }
        }
        deserializer.deserialize_any(FirstElementVisitor)
    }
}

impl<'de> Deserialize<'de> for CompletionRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CompletionVisitor;
        impl<'de> Visitor<'de> for CompletionVisitor {
            type Value = CompletionRequest;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<CompletionRequest, A::Error> {
                let mut request = CompletionRequest::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "prompt" => request.prompt = map.next_value()?,
                        "echo" => request.echo = map.next_value()?,
                        "logprobs" => request.logprobs = map.next_value()?,
                        "best_of" => request.best_of = map.next_value()?,
                        "suffix" => request.suffix = map.next_value()?,
                        other => {
                            if !request.fields.read(other, &mut map)? {
                                map.next_value::<IgnoredAny>()?;
                            }
                        }
                    }
                }
                Ok(request)
            }
        }
        deserializer.deserialize_map(CompletionVisitor)
    }
}

#[cfg(test)]
mod tests;
