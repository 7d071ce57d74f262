//! The message object of `/v1/messages`, its content blocks, the events that stream it, and the error object.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::openai::response::{ResponseHead, Usage, item_id};
use crate::openai::sections::{Kind, Section};

/// Why a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    EndTurn,
    StopSequence,
    MaxTokens,
    ToolUse,
    /// An operator ended the request.
    Abort,
}

/// How a message ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Stop<'a> {
    pub stop_reason: Option<StopReason>,
    /// The stop sequence that was found.
    pub stop_sequence: Option<&'a str>,
}

/// Token counts. What came from the cache is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MessageUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

impl From<Usage> for MessageUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// The message object.
#[derive(Debug, Serialize)]
pub struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    pub content: Vec<Block<'a>>,
    #[serde(flatten)]
    pub stop: Stop<'a>,
    pub usage: MessageUsage,
}

impl<'a> Message<'a> {
    /// A message without content that has not ended.
    pub fn new(head: &'a ResponseHead, usage: Usage) -> Self {
        Self {
            id: &head.id,
            r#type: "message",
            role: "assistant",
            model: &head.model,
            content: Vec::new(),
            stop: Stop::default(),
            usage: usage.into(),
        }
    }
}

/// A content block.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block<'a> {
    Thinking {
        thinking: &'a str,
        /// Clients return a block only with one. Nothing is sealed here, so it is the message's id.
        signature: &'a str,
    },
    Text {
        text: &'a str,
    },
    ToolUse {
        id: String,
        name: &'a str,
        input: Map<String, Value>,
    },
}

impl<'a> Block<'a> {
    /// A section that has ended. A call that was cut off before its arguments were whole has an empty input.
    pub fn whole(request_id: u128, head: &'a ResponseHead, section: &'a Section) -> Self {
        match &section.kind {
            Kind::Reasoning => Self::Thinking { thinking: &section.text, signature: &head.id },
            Kind::Text => Self::Text { text: &section.text },
            Kind::Call { index, name } => {
                let input = serde_json::from_str(&section.text).unwrap_or_default();
                Self::ToolUse { id: call_id(request_id, *index), name, input }
            }
        }
    }

    /// A section that begins.
    pub fn empty(request_id: u128, section: &'a Section) -> Self {
        match &section.kind {
            Kind::Reasoning => Self::Thinking { thinking: "", signature: "" },
            Kind::Text => Self::Text { text: "" },
            Kind::Call { index, name } => Self::ToolUse { id: call_id(request_id, *index), name, input: Map::new() },
        }
    }
}

fn call_id(request_id: u128, index: u32) -> String {
    item_id("toolu", request_id, 0, index)
}

/// What a block gains.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockDelta<'a> {
    ThinkingDelta { thinking: &'a str },
    SignatureDelta { signature: &'a str },
    TextDelta { text: &'a str },
    InputJsonDelta { partial_json: &'a str },
}

impl<'a> BlockDelta<'a> {
    /// More of a section of this kind.
    pub fn of(kind: &Kind, text: &'a str) -> Self {
        match kind {
            Kind::Reasoning => Self::ThinkingDelta { thinking: text },
            Kind::Text => Self::TextDelta { text },
            Kind::Call { .. } => Self::InputJsonDelta { partial_json: text },
        }
    }
}

/// One event of a stream.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block<'a> },
    ContentBlockDelta { index: usize, delta: BlockDelta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop<'a>, usage: MessageUsage },
    MessageStop,
}

impl Event<'_> {
    /// The event's name, which its data repeats as `type`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

/// Anthropic's error object, `{"type": "error", "error": {"type", "message"}}`, with the field at fault as OpenAI
/// names it.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ErrorObject<'a> {
    r#type: &'static str,
    error: ErrorBody<'a>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct ErrorBody<'a> {
    r#type: &'static str,
    message: &'a str,
    param: Option<&'a str>,
}

impl<'a> ErrorObject<'a> {
    /// `status` is HTTP's.
    pub fn new(status: u16, message: &'a str, param: Option<&'a str>) -> Self {
        let kind = match status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            400..=499 | 501 => "invalid_request_error",
            _ => "api_error",
        };
        Self { r#type: "error", error: ErrorBody { r#type: kind, message, param } }
    }
}
