//! `POST /v1/chat/completions`: the request. The answer is in [`response`].

mod messages;
pub mod response;
mod thinking;
mod tools;

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use self::messages::WireMessage;
use self::thinking::ThinkingFields;
use self::tools::{ToolChoice, Tools, WireTool};
use super::constraint::FieldRule;
use super::error::InvalidRequest;
use super::facts::ModelFacts;
use super::fields::{Asks, Integer, Object, parse_body};
use super::generation::{GenerationFields, GenerationSpec};
use super::limits::{Limits, RequestLimits};
use crate::chat::constraint::{AnswerRule, CallRule};
use crate::chat::encode::{EncodeOptions, Message, match_results};
use crate::chat::style::Style;

/// A request as it was sent: its types are right, its values are not yet checked.
#[derive(Debug, Default)]
pub struct ChatRequest {
    fields: GenerationFields,
    messages: Option<Vec<Object<WireMessage>>>,
    thinking: ThinkingFields,
    continue_final_message: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<Integer>,
    tools: Option<Vec<Object<WireTool>>>,
    tool_choice: Option<ToolChoice>,
    parallel_tool_calls: Option<bool>,
    functions: Asks,
    function_call: Asks,
}

/// A request that can be encoded and generated.
#[derive(Debug)]
pub struct ChatSpec {
    pub messages: Vec<Message>,
    pub encode: EncodeOptions,
    pub generation: GenerationSpec,
    /// What the worker is to enforce, of text and calls.
    pub rule: AnswerRule,
    /// How many calls the answer may hold; 0 where no tools are declared, and markup is text like any other.
    pub max_tool_calls: u32,
}

/// What a request says, apart from how it is to be generated.
#[derive(Debug)]
pub struct Conversation {
    pub messages: Vec<Message>,
    pub encode: EncodeOptions,
    max_tool_calls: u32,
    /// Calls that the worker has to enforce, and the field that asks for them.
    calls: Option<(CallRule, String)>,
    thinking_budget: Option<i128>,
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

    /// Checks every field.
    ///
    /// # Errors
    /// The first field that is wrong, or that asks for an ability this server lacks.
    pub fn validate(mut self, limits: &Limits, model: &ModelFacts) -> Result<ChatSpec, InvalidRequest> {
        self.refuse_unbuilt()?;
        let Conversation { mut messages, encode, max_tool_calls, calls, thinking_budget } =
            self.take_conversation(&limits.request, model.style)?;
        match_results(&mut messages)?;
        let logprobs = chat_logprobs(limits, self.logprobs, self.top_logprobs)?;
        let max_tokens_param = self.fields.sampling.max_tokens_param();
        let mut generation = self.fields.validate(limits, model)?;
        if generation.sampling.max_tokens == Some(0) {
            let message = format!("'{max_tokens_param}' must be at least 1.");
            return Err(InvalidRequest::field(max_tokens_param, message));
        }
        generation.sampling.logprobs = logprobs;
        if let Some(budget) = thinking_budget {
            let budget = limits.thinking_budget.check_u32("thinking.budget_tokens", budget)?;
            generation.sampling.thinking_budget.get_or_insert(budget);
        }
        let rule = answer_rule(generation.content_rule.take(), calls)?;
        Ok(ChatSpec { messages, encode, generation, rule, max_tool_calls })
    }

    /// The conversation alone, as it is rendered: constraints on the answer are no part of the prompt. With
    /// `reorders_results`, tool results follow the order of their calls; where their ids do not fit the calls they
    /// stay where they are, for recorded conversations often lack ids.
    ///
    /// # Errors
    /// A message, a tool or the thinking switch is wrong.
    pub fn into_conversation(
        mut self,
        limits: &Limits,
        style: Style,
        reorders_results: bool,
    ) -> Result<Conversation, InvalidRequest> {
        let mut conversation = self.take_conversation(&limits.request, style)?;
        let mut matched = conversation.messages.clone();
        if reorders_results && match_results(&mut matched).is_ok() {
            conversation.messages = matched;
        }
        Ok(conversation)
    }

    fn take_conversation(&mut self, limits: &RequestLimits, style: Style) -> Result<Conversation, InvalidRequest> {
        let thinking = self.thinking.resolve(style)?;
        let (mut messages, prefix) = messages::validate(self.messages.take(), limits)?;
        let tools = Tools::validate(self.tools.take().unwrap_or_default(), limits)?;
        let choice = self.tool_choice.take().unwrap_or(ToolChoice::Auto);
        choice.check(&tools)?;
        let continue_final = prefix || self.continue_final_message.unwrap_or(false);
        let mut encode = EncodeOptions::request(thinking.enabled, continue_final);
        encode.style = style;
        let declared = choice != ToolChoice::None && !tools.functions.is_empty();
        let mut calls = None;
        if declared {
            if let Some(reason) = style.refuses_tools {
                return Err(InvalidRequest::field("tools", format!("'tools' is refused: {reason}.")));
            }
            let asked_by = tools.strict.clone().filter(|_| choice == ToolChoice::Auto);
            let asked_by = asked_by.unwrap_or_else(|| "tool_choice".to_owned());
            calls = tools.call_rule(&choice, self.parallel_tool_calls).map(|rule| (rule, asked_by));
            encode.declare_tools(&mut messages, tools.into_shown(&choice));
        }
        let max_tool_calls = match (declared, choice.is_single(self.parallel_tool_calls)) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => u32::MAX,
        };
        Ok(Conversation { messages, encode, max_tool_calls, calls, thinking_budget: thinking.budget })
    }

    /// OpenAI's first form of tools is refused by name.
    fn refuse_unbuilt(&self) -> Result<(), InvalidRequest> {
        let field = match (self.functions.0, self.function_call.0) {
            (true, _) => "functions",
            (false, true) => "function_call",
            (false, false) => return Ok(()),
        };
        let message = format!("'{field}' is not implemented by this server; use 'tools' and 'tool_choice'.");
        Err(InvalidRequest::not_implemented(field, message))
    }
}

/// Puts the rules on text and on calls together.
fn answer_rule(content: Option<FieldRule>, calls: Option<(CallRule, String)>) -> Result<AnswerRule, InvalidRequest> {
    let mut rule = AnswerRule::default();
    if let Some(FieldRule { field, rule: content }) = content {
        if calls.as_ref().is_some_and(|(calls, _)| calls.required) {
            let message =
                format!("'{field}' says what text must look like, but 'tool_choice' demands calls: send one.");
            return Err(InvalidRequest::field(field, message));
        }
        rule = AnswerRule { field: field.to_owned(), content: Some(content), calls: None };
    }
    if let Some((calls, field)) = calls {
        rule = AnswerRule { field, calls: Some(calls), ..rule };
    }
    Ok(rule)
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
            "parallel_tool_calls" => self.parallel_tool_calls = map.next_value()?,
            "functions" => self.functions = map.next_value()?,
            "function_call" => self.function_call = map.next_value()?,
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
