//! The messages of a chat request: roles, content parts, history of reasoning.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

use super::tools::WireCall;
use crate::chat::encode::{Message, Role};
use crate::openai::error::InvalidRequest;
use crate::openai::fields::{Asks, Object};
use crate::openai::limits::RequestLimits;

/// Between two content parts: a blank line, as DeepSeek's own converter joins them.
const PART_SEPARATOR: &str = "\n\n";

#[derive(Debug, Deserialize)]
pub(super) struct WireMessage {
    role: Option<String>,
    #[serde(default, deserialize_with = "present")]
    content: Option<Content>,
    reasoning_content: Option<String>,
    /// Another name of `reasoning_content`.
    reasoning: Option<String>,
    prefix: Option<bool>,
    tool_calls: Option<Vec<Object<WireCall>>>,
    tool_call_id: Option<String>,
    #[serde(default)]
    function_call: Asks,
}

/// Tells `"content": null` from no content at all.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Content>, D::Error> {
    Content::deserialize(deserializer).map(Some)
}

/// A message's text: null is empty, parts are joined.
#[derive(Debug, Default)]
struct Content {
    text: String,
    /// 0 where it is no list.
    num_parts: usize,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a list of content parts or null")
            }
            fn visit_unit<E>(self) -> Result<Content, E> {
                Ok(Content::default())
            }
            fn visit_str<E>(self, value: &str) -> Result<Content, E> {
                Ok(Content { text: value.to_owned(), num_parts: 0 })
            }
            fn visit_string<E>(self, value: String) -> Result<Content, E> {
                Ok(Content { text: value, num_parts: 0 })
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut content = Content::default();
                while let Some(part) = parts.next_element::<Part>()? {
                    if content.num_parts > 0 {
                        content.text.push_str(PART_SEPARATOR);
                    }
                    content.num_parts += 1;
                    content.text.push_str(&part.text);
                }
                Ok(content)
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct Part {
    text: String,
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            r#type: String,
            text: Option<String>,
        }
        let Object(fields) = Object::<Fields>::deserialize(deserializer)?;
        match (fields.r#type.as_str(), fields.text) {
            ("text", Some(text)) => Ok(Self { text }),
            ("text", None) => Err(D::Error::missing_field("text")),
            (other, _) => {
                let message = format!("content parts of type {other:?} are not supported, only \"text\" is");
                Err(D::Error::custom(message))
            }
        }
    }
}

/// Checks the conversation. The second value is whether the last message asks to be continued by its `prefix` flag.
pub(super) fn validate(
    messages: Option<Vec<Object<WireMessage>>>,
    limits: &RequestLimits,
) -> Result<(Vec<Message>, bool), InvalidRequest> {
    let messages = messages.ok_or_else(|| InvalidRequest::field("messages", "'messages' is required."))?;
    if messages.is_empty() {
        return Err(InvalidRequest::field("messages", "'messages' must hold at least one message."));
    }
    limits.messages.check_items("messages", messages.len())?;
    let last = messages.len() - 1;
    let mut prefix = false;
    let mut checked = Vec::with_capacity(messages.len());
    for (index, Object(message)) in messages.into_iter().enumerate() {
        let asks_prefix = message.prefix.unwrap_or(false);
        let message = validate_one(message, index, limits)?;
        if asks_prefix {
            if index != last || message.role != Role::Assistant {
                let param = format!("messages[{index}].prefix");
                let text = format!("'{param}' is only allowed on a final assistant message.");
                return Err(InvalidRequest::field(param, text));
            }
            prefix = true;
        }
        checked.push(message);
    }
    Ok((checked, prefix))
}

fn validate_one(message: WireMessage, index: usize, limits: &RequestLimits) -> Result<Message, InvalidRequest> {
    // A path is spelled out only where something is wrong there: a long conversation has hundreds of them.
    let param = |field: &str| format!("messages[{index}].{field}");
    let role = parse_role(message.role, || param("role"))?;
    if message.function_call.0 {
        let param = param("function_call");
        let text = format!("'{param}' is not implemented by this server; use 'tool_calls'.");
        return Err(InvalidRequest::not_implemented(param, text));
    }
    let calls = message.tool_calls.unwrap_or_default();
    if role != Role::Assistant && !calls.is_empty() {
        let param = param("tool_calls");
        let text = format!("'{param}' is only allowed on assistant messages.");
        return Err(InvalidRequest::field(param, text));
    }
    if !calls.is_empty() {
        limits.tool_calls.check_items(&param("tool_calls"), calls.len())?;
    }
    if let Some(content) = message.content.as_ref().filter(|content| content.num_parts > 0) {
        limits.content_parts.check_items(&param("content"), content.num_parts)?;
    }
    let calls = calls.into_iter().enumerate();
    let tool_calls =
        calls.map(|(place, Object(call))| call.validate(&format!("messages[{index}].tool_calls[{place}]")));
    let tool_calls = tool_calls.collect::<Result<Vec<_>, _>>()?;
    let content = match (message.content, role) {
        (Some(content), _) => content.text,
        (None, Role::Assistant) => String::new(),
        (None, _) => {
            let param = param("content");
            let text = format!("'{param}' is required.");
            return Err(InvalidRequest::field(param, text));
        }
    };
    let reasoning = message.reasoning_content.or(message.reasoning).unwrap_or_default();
    Ok(Message { reasoning, tool_calls, tool_call_id: message.tool_call_id, ..Message::new(role, content) })
}

/// `param` spells the path of the field.
fn parse_role(role: Option<String>, param: impl Fn() -> String) -> Result<Role, InvalidRequest> {
    match role.as_deref() {
        Some("system") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("developer") => Ok(Role::Developer),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        Some("function") => {
            let text = "Messages of role \"function\" are not implemented by this server; use \"tool\".";
            Err(InvalidRequest::not_implemented(param(), text))
        }
        Some(other) => {
            let param = param();
            let text = format!(
                "'{param}' must be \"system\", \"developer\", \"user\", \"assistant\" or \"tool\", but it is {other:?}."
            );
            Err(InvalidRequest::field(param, text))
        }
        None => {
            let param = param();
            let text = format!("'{param}' is required.");
            Err(InvalidRequest::field(param, text))
        }
    }
}
