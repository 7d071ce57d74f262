//! Tools of a chat request: functions, the choice among them, and the calls of earlier answers.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::chat::constraint::{CallRule, FunctionRule};
use crate::chat::encode::ToolCall;
use crate::openai::constraint::json_len;
use crate::openai::error::InvalidRequest;
use crate::openai::fields::Object;
use crate::openai::limits::RequestLimits;

/// Longest name of a function, as OpenAI has it.
const MAX_NAME_CHARS: usize = 64;

/// One entry of `tools`.
#[derive(Debug, Deserialize)]
pub(super) struct WireTool {
    r#type: Option<String>,
    function: Option<Map<String, Value>>,
}

/// The tools that a request declares.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Function objects as they were sent.
    pub functions: Vec<Value>,
    names: HashSet<String>,
    /// The path of the first function that wants its arguments enforced.
    pub strict: Option<String>,
}

impl Tools {
    pub(super) fn validate(tools: Vec<Object<WireTool>>, limits: &RequestLimits) -> Result<Self, InvalidRequest> {
        limits.tools.check_items("tools", tools.len())?;
        let mut checked = Self::default();
        for (index, Object(tool)) in tools.into_iter().enumerate() {
            checked.add(index, tool, limits)?;
        }
        Ok(checked)
    }

    /// The function objects that the model is shown: of a named one, only that.
    pub(super) fn into_shown(mut self, choice: &ToolChoice) -> Vec<Value> {
        if let ToolChoice::Named(name) = choice {
            self.functions.retain(|function| function["name"] == **name);
        }
        self.functions
    }

    /// What calls must look like; `None` where they may be anything.
    pub(super) fn call_rule(&self, choice: &ToolChoice, parallel: Option<bool>) -> Option<CallRule> {
        let required = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
        if self.functions.is_empty() || *choice == ToolChoice::None || !(required || self.strict.is_some()) {
            return None;
        }
        let functions = self.functions.iter().enumerate().map(|(index, function)| FunctionRule {
            path: format!("tools[{index}].function"),
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            parameters: function.get("parameters").filter(|schema| schema.is_object()).cloned(),
            strict: function.get("strict") == Some(&Value::Bool(true)),
        });
        let mut functions: Vec<FunctionRule> = functions.collect();
        if let ToolChoice::Named(name) = choice {
            functions.retain(|function| function.name == *name);
        }
        Some(CallRule { functions, required, single: choice.is_single(parallel) })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    fn add(&mut self, index: usize, tool: WireTool, limits: &RequestLimits) -> Result<(), InvalidRequest> {
        let invalid = |field: &str, rule: &str| {
            let param = format!("tools[{index}].{field}");
            let message = format!("'{param}' {rule}.");
            Err(InvalidRequest::field(param, message))
        };
        if let Some(other) = tool.r#type.filter(|kind| kind != "function") {
            return invalid("type", &format!("must be \"function\", but it is {other:?}"));
        }
        let Some(function) = tool.function else {
            return invalid("function", "is required");
        };
        let name = match function.get("name") {
            Some(Value::String(name)) if is_name(name) => name,
            Some(Value::String(_)) => {
                return invalid("function.name", "must be 1 to 64 letters, digits, underscores or hyphens");
            }
            Some(_) => return invalid("function.name", "must be a string"),
            None => return invalid("function.name", "is required"),
        };
        if !self.names.insert(name.clone()) {
            return invalid("function.name", &format!("repeats the name {name:?}"));
        }
        if !matches!(function.get("description"), None | Some(Value::Null | Value::String(_))) {
            return invalid("function.description", "must be a string");
        }
        if !matches!(function.get("parameters"), None | Some(Value::Null | Value::Object(_))) {
            return invalid("function.parameters", "must be a JSON Schema, which is an object");
        }
        if let Some(parameters) = function.get("parameters") {
            let param = format!("tools[{index}].function.parameters");
            limits.schema.check_bytes(&param, json_len(parameters))?;
        }
        match function.get("strict") {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(Value::Bool(true)) => {
                self.strict.get_or_insert_with(|| format!("tools[{index}].function.strict"));
            }
            Some(_) => return invalid("function.strict", "must be true or false"),
        }
        self.functions.push(Value::Object(function));
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=MAX_NAME_CHARS).contains(&name.len()) && name.bytes().all(is_allowed)
}

/// `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

impl ToolChoice {
    /// Whether the answer may hold one call only. A named function is called once unless the request says otherwise.
    pub(super) fn is_single(&self, parallel: Option<bool>) -> bool {
        match self {
            Self::Named(_) => parallel != Some(true),
            Self::None | Self::Auto | Self::Required => parallel == Some(false),
        }
    }

    /// Whether the choice fits the tools that are there.
    pub(super) fn check(&self, tools: &Tools) -> Result<(), InvalidRequest> {
        match self {
            Self::None | Self::Auto => Ok(()),
            Self::Required | Self::Named(_) if tools.functions.is_empty() => {
                let message = "'tool_choice' demands a call, but 'tools' declares no function.";
                Err(InvalidRequest::field("tool_choice", message))
            }
            Self::Named(name) if !tools.has(name) => {
                let message = format!("'tool_choice.function.name' is {name:?}, which 'tools' does not declare.");
                Err(InvalidRequest::field("tool_choice.function.name", message))
            }
            Self::Required | Self::Named(_) => Ok(()),
        }
    }
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Function {
            name: String,
        }
        #[derive(Deserialize)]
        struct Named {
            r#type: Option<String>,
            function: Option<Object<Function>>,
        }
        struct ToolChoiceVisitor;
        impl<'de> Visitor<'de> for ToolChoiceVisitor {
            type Value = ToolChoice;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("\"none\", \"auto\", \"required\" or an object that names a function")
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<ToolChoice, E> {
                match value {
                    "none" => Ok(ToolChoice::None),
                    "auto" => Ok(ToolChoice::Auto),
                    "required" => Ok(ToolChoice::Required),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(value), &self)),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ToolChoice, A::Error> {
                let named = Named::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                match (named.r#type.as_deref(), named.function) {
                    (None | Some("function"), Some(Object(function))) => Ok(ToolChoice::Named(function.name)),
                    (None | Some("function"), None) => Err(serde::de::Error::missing_field("function")),
                    (Some(other), _) => Err(serde::de::Error::unknown_variant(other, &["function"])),
                }
            }
        }
        deserializer.deserialize_any(ToolChoiceVisitor)
    }
}

/// One entry of an assistant message's `tool_calls`.
#[derive(Debug, Deserialize)]
pub(super) struct WireCall {
    id: Option<String>,
    r#type: Option<String>,
    function: Option<Object<WireCalled>>,
}

#[derive(Debug, Deserialize)]
struct WireCalled {
    name: Option<String>,
    #[serde(default, deserialize_with = "present")]
    arguments: Option<Value>,
}

/// Tells a null from nothing at all.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

impl WireCall {
    pub(super) fn validate(self, path: &str) -> Result<ToolCall, InvalidRequest> {
        let invalid = |field: &str, rule: &str| {
            let param = format!("{path}.{field}");
            let message = format!("'{param}' {rule}.");
            Err(InvalidRequest::field(param, message))
        };
        if let Some(other) = self.r#type.filter(|kind| kind != "function") {
            return invalid("type", &format!("must be \"function\", but it is {other:?}"));
        }
        let Some(Object(function)) = self.function else {
            return invalid("function", "is required");
        };
        let Some(name) = function.name.filter(|name| !name.is_empty()) else {
            return invalid("function.name", "is required");
        };
        let arguments = match function.arguments {
            Some(Value::Object(arguments)) => arguments,
            Some(Value::String(text)) => match ToolCall::parse_arguments(&text) {
                Ok(arguments) => arguments,
                Err(rule) => return invalid("function.arguments", &rule),
            },
            Some(_) => return invalid("function.arguments", "must be the text of a JSON object"),
            None => return invalid("function.arguments", "is required"),
        };
        Ok(ToolCall { id: self.id, name, arguments })
    }
}
