//! Whether a chat request thinks. Clients say so in five ways; a switch wins over an effort, an effort over the
//! model's default.

use serde::Deserialize;
use serde::de::MapAccess;

use crate::chat::style::{Style, Thinking as ModelThinking};
use crate::openai::error::InvalidRequest;
use crate::openai::fields::{Integer, Object};

const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Switches of other servers that cannot be turned off here, and what they stand for.
const ALWAYS_ON: &[(&str, &str)] = &[
    ("separate_reasoning", "reasoning comes apart from the answer, in 'reasoning_content'"),
    ("stream_reasoning", "reasoning is streamed as it comes"),
    ("include_reasoning", "the answer includes reasoning; 'thinking' turns it off"),
];

/// DeepSeek's own switch.
#[derive(Debug, Deserialize)]
struct Thinking {
    r#type: Option<String>,
    budget_tokens: Option<Integer>,
}

/// The switch of engines that render chat templates.
#[derive(Debug, Deserialize)]
struct TemplateArguments {
    thinking: Option<bool>,
    enable_thinking: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Reasoning {
    enabled: Option<bool>,
    effort: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct ThinkingFields {
    thinking: Option<Object<Thinking>>,
    chat_template_kwargs: Option<Object<TemplateArguments>>,
    reasoning: Option<Object<Reasoning>>,
    reasoning_effort: Option<String>,
    /// Of [`ALWAYS_ON`], what the request turns off.
    turned_off: Option<&'static (&'static str, &'static str)>,
}

pub(super) struct ThinkingSpec {
    pub enabled: bool,
    /// Reasoning tokens, unchecked.
    pub budget: Option<i128>,
}

impl ThinkingFields {
    /// Reads the value if `key` is one of these fields.
    pub(super) fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "thinking" => self.thinking = map.next_value()?,
            "chat_template_kwargs" => self.chat_template_kwargs = map.next_value()?,
            "reasoning" => self.reasoning = map.next_value()?,
            "reasoning_effort" => self.reasoning_effort = map.next_value()?,
            _ => {
                let Some(switch) = ALWAYS_ON.iter().find(|(name, _)| *name == key) else { return Ok(false) };
                if map.next_value::<Option<bool>>()? == Some(false) {
                    self.turned_off = Some(switch);
                }
            }
        }
        Ok(true)
    }

    /// # Errors
    /// A switch has no such position, or the model or this server lacks the wanted one.
    pub(super) fn resolve(&self, style: Style) -> Result<ThinkingSpec, InvalidRequest> {
        let thinking = self.thinking.as_ref().map(|Object(thinking)| thinking);
        let switch = thinking.and_then(|thinking| thinking.r#type.as_deref()).map(switch).transpose()?;
        let template = self.chat_template_kwargs.as_ref().map(|Object(arguments)| arguments);
        let reasoning = self.reasoning.as_ref().map(|Object(reasoning)| reasoning);
        let nested_effort = reasoning.and_then(|reasoning| reasoning.effort.as_deref());
        let efforts = [("reasoning_effort", self.reasoning_effort.as_deref()), ("reasoning.effort", nested_effort)];
        let mut effort = None;
        for (param, value) in efforts {
            let thinks = value.map(|value| effort_thinks(param, value)).transpose()?;
            effort = effort.or(thinks.map(|thinks| (param, thinks)));
        }
        let named = |param: &'static str, value: Option<bool>| value.map(|value| (param, value));
        let said = named("thinking.type", switch)
            .or(named("chat_template_kwargs.thinking", template.and_then(|arguments| arguments.thinking)))
            .or(named("chat_template_kwargs.enable_thinking", template.and_then(|arguments| arguments.enable_thinking)))
            .or(named("reasoning.enabled", reasoning.and_then(|reasoning| reasoning.enabled)))
            .or(effort);
        let enabled = match (style.thinking, said) {
            (ModelThinking::Switched, said) => said.map_or(style.thinks_by_default, |(_, thinks)| thinks),
            (ModelThinking::Always, None | Some((_, true))) => true,
            (ModelThinking::Never, None | Some((_, false))) => false,
            (ModelThinking::Always, Some((param, false))) => {
                let message = format!("'{param}' turns reasoning off, but this model reasons in every answer.");
                return Err(InvalidRequest::field(param, message));
            }
            (ModelThinking::Never, Some((param, true))) => {
                let message = format!("'{param}' turns reasoning on, but this model does not reason.");
                return Err(InvalidRequest::field(param, message));
            }
        };
        // Without reasoning there is nothing to treat otherwise.
        if let Some((param, meaning)) = self.turned_off.filter(|_| enabled) {
            let message = format!("'{param}': false is not implemented by this server; {meaning}.");
            return Err(InvalidRequest::not_implemented(*param, message));
        }
        let budget = thinking.and_then(|thinking| thinking.budget_tokens);
        Ok(ThinkingSpec { enabled, budget: budget.map(|Integer(budget)| budget) })
    }
}

fn switch(value: &str) -> Result<bool, InvalidRequest> {
    match value {
        "enabled" => Ok(true),
        "disabled" => Ok(false),
        _ => {
            let message = format!("'thinking.type' must be \"enabled\" or \"disabled\", but it is {value:?}.");
            Err(InvalidRequest::field("thinking.type", message))
        }
    }
}

fn effort_thinks(param: &str, value: &str) -> Result<bool, InvalidRequest> {
    if EFFORTS.contains(&value) {
        return Ok(value != "none");
    }
    let message = format!("'{param}' must be one of {}, but it is {value:?}.", EFFORTS.join(", "));
    Err(InvalidRequest::field(param, message))
}
