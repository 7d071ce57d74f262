//! `POST /v1/chat/completions`: the request. The answer is in [`response`].

mod messages;
pub mod response;
mod thinking;

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use self::messages::WireMessage;
use self::thinking::ThinkingFields;
use super::error::InvalidRequest;
use super::fields::{Asks, Integer, parse_body};
use super::generation::{GenerationFields, GenerationSpec, ModelFacts};
use super::limits::Limits;
use crate::chat::encode::{EncodeOptions, Message};

/// A request as it was sent: its types are right, its values are not yet checked.
#[derive(Debug, Default)]
pub struct ChatRequest {
    fields: GenerationFields,
    messages: Option<Vec<WireMessage>>,
    thinking: ThinkingFields,
    continue_final_message: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<Integer>,
    tools: Option<Vec<IgnoredAny>>,
    tool_choice: Option<ToolChoice>,
    functions: Asks,
    function_call: Asks,
    response_format: Option<ResponseFormat>,
}

/// A request that can be encoded and generated.
#[derive(Debug)]
pub struct ChatSpec {
    pub messages: Vec<Message>,
    pub encode: EncodeOptions,
    pub generation: GenerationSpec,
}

impl ChatRequest {
    /// Parses a body. Unknown fields are ignored, wrong types refused with the field's path.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        parse_body(body)
    }

    /// The model that was asked for; the caller compares it with the names it serves.
    pub fn model(&self) -> Option<&str> {
        self.fields.model.as_deref()
    }

    pub fn validate(self, limits: &Limits, model: &ModelFacts) -> Result<ChatSpec, InvalidRequest> {
        self.refuse_unbuilt()?;
        let thinking = self.thinking.resolve(model.thinks_by_default)?;
        let (messages, prefix) = messages::validate(self.messages)?;
        let continue_final = prefix || self.continue_final_message.unwrap_or(false);
        let logprobs = chat_logprobs(limits, self.logprobs, self.top_logprobs)?;
        let max_tokens_param = self.fields.sampling.max_tokens_param();
        let mut generation = self.fields.validate(limits, model)?;
        if generation.sampling.max_tokens == Some(0) {
            let message = format!("'{max_tokens_param}' must be at least 1.");
            return Err(InvalidRequest::field(max_tokens_param, message));
        }
        generation.sampling.logprobs = logprobs;
        if let Some(budget) = thinking.budget {
            let budget = limits.thinking_budget.check_u32("thinking.budget_tokens", budget)?;
            generation.sampling.thinking_budget.get_or_insert(budget);
        }
        Ok(ChatSpec { messages, encode: EncodeOptions::request(thinking.enabled, continue_final), generation })
    }

    /// Tools and structured answers are refused by name; `tool_choice: "none"` asks for no tools.
    fn refuse_unbuilt(&self) -> Result<(), InvalidRequest> {
        let tools_wanted = self.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let structured = self.response_format.as_ref().is_some_and(|format| format.kind != "text");
        let field = match self.tool_choice {
            Some(ToolChoice::Some) => "tool_choice",
            None if tools_wanted => "tools",
            _ if structured => "response_format",
            _ if self.functions.0 => "functions",
            _ if self.function_call.0 => "function_call",
            _ => return Ok(()),
        };
        let message = format!("'{field}' is not implemented by this server.");
        Err(InvalidRequest::not_implemented(field, message))
    }
}

/// `top_logprobs` needs `logprobs: true`, which alone reports the chosen tokens.
fn chat_logprobs(limits: &Limits, wanted: Option<bool>, top: Option<Integer>) -> Result<Option<u32>, InvalidRequest> {
    let wanted = wanted.unwrap_or(false);
    let Some(Integer(top)) = top else {
        return Ok(wanted.then_some(0));
    };
    let top = limits.logprobs.check_u32("top_logprobs", top)?;
    if !wanted && top > 0 {
        let message = "'top_logprobs' is only allowed together with 'logprobs': true.";
        return Err(InvalidRequest::field("top_logprobs", message));
    }
    Ok(wanted.then_some(top))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolChoice {
    None,
    Some,
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ToolChoiceVisitor;
        impl<'de> Visitor<'de> for ToolChoiceVisitor {
            type Value = ToolChoice;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("\"none\", \"auto\", \"required\" or an object that names a function")
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<ToolChoice, E> {
                match value {
                    "none" => Ok(ToolChoice::None),
                    "auto" | "required" => Ok(ToolChoice::Some),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(value), &self)),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ToolChoice, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(ToolChoice::Some)
            }
        }
        deserializer.deserialize_any(ToolChoiceVisitor)
    }
}

#[derive(Debug)]
struct ResponseFormat {
    kind: String,
}

impl<'de> Deserialize<'de> for ResponseFormat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        struct Fields {
            r#type: String,
        }
        const KINDS: [&str; 4] = ["text", "json_object", "json_schema", "structural_tag"];
        let Fields { r#type: kind } = Fields::deserialize(deserializer)?;
        if KINDS.contains(&kind.as_str()) {
            return Ok(Self { kind });
        }
        Err(D::Error::unknown_variant(&kind, &KINDS))
    }
}

impl<'de> Deserialize<'de> for ChatRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChatVisitor;
        impl<'de> Visitor<'de> for ChatVisitor {
            type Value = ChatRequest;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ChatRequest, A::Error> {
                let mut request = ChatRequest::default();
                while let Some(key) = map.next_key::<String>()? {
                    request.read(&key, &mut map)?;
                }
                Ok(request)
            }
        }
        deserializer.deserialize_map(ChatVisitor)
    }
}

impl ChatRequest {
    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "messages" => self.messages = map.next_value()?,
            "continue_final_message" => self.continue_final_message = map.next_value()?,
            "logprobs" => self.logprobs = map.next_value()?,
            "top_logprobs" => self.top_logprobs = map.next_value()?,
            "tools" => self.tools = map.next_value()?,
            "tool_choice" => self.tool_choice = map.next_value()?,
            "functions" => self.functions = map.next_value()?,
            "function_call" => self.function_call = map.next_value()?,
            "response_format" => self.response_format = map.next_value()?,
            _ => {
                if !self.thinking.read(key, map)? && !self.fields.read(key, map)? {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
