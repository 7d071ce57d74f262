//! The response object of `/v1/responses`, its output items, and the events that stream it.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::openai::logprobs::{ChatLogprobs, ChatTokens};
use crate::openai::response::{ResponseHead, Usage, item_id};
use crate::openai::sections::{Kind, Section};

/// How far a response or an item of it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    InProgress,
    Completed,
    /// Cut off.
    Incomplete,
    Failed,
}

/// Why an answer was cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct IncompleteDetails {
    /// "max_output_tokens", or "abort" where an operator ended it.
    pub reason: &'static str,
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ResponseError<'a> {
    pub code: &'static str,
    pub message: &'a str,
}

/// The response object.
#[derive(Debug, Serialize)]
pub struct Response<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    pub status: Status,
    background: bool,
    pub error: Option<ResponseError<'a>>,
    pub incomplete_details: Option<IncompleteDetails>,
    model: &'a str,
    pub output: Vec<Item<'a>>,
    previous_response_id: Option<&'a str>,
    service_tier: &'static str,
    store: bool,
    truncation: &'static str,
    pub usage: Option<ResponseUsage>,
    #[serde(flatten)]
    echo: &'a Map<String, Value>,
}

impl<'a> Response<'a> {
    /// A response without output. `echo` is what it repeats of the request.
    pub fn new(head: &'a ResponseHead, echo: &'a Map<String, Value>, status: Status) -> Self {
        Self {
            id: &head.id,
            object: "response",
            created_at: head.created,
            status,
            background: false,
            error: None,
            incomplete_details: None,
            model: &head.model,
            output: Vec::new(),
            previous_response_id: None,
            service_tier: "default",
            store: false,
            truncation: "disabled",
            usage: None,
            echo,
        }
    }
}

/// An output item.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Item<'a> {
    Reasoning { id: String, summary: [(); 0], content: Vec<Part<'a>>, status: Status },
    Message { id: String, role: &'static str, content: Vec<Part<'a>>, status: Status },
    FunctionCall { id: String, call_id: String, name: &'a str, arguments: &'a str, status: Status },
}

/// A part of an item's content.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: TextLogprobs<'a> },
}

/// Log-probabilities of a text's tokens; an empty list where none were asked for.
#[derive(Debug, Clone, Copy)]
pub struct TextLogprobs<'a>(pub Option<ChatLogprobs<'a>>);

impl Serialize for TextLogprobs<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(logprobs) => ChatTokens(logprobs).serialize(serializer),
            None => serializer.collect_seq([(); 0]),
        }
    }
}

impl<'a> Part<'a> {
    /// The one part of a section that is reasoning or text.
    pub fn of(section: &'a Section, logprobs: TextLogprobs<'a>) -> Option<Self> {
        Some(match section.kind {
            Kind::Reasoning => Self::ReasoningText { text: &section.text },
            Kind::Text => Self::OutputText { text: &section.text, annotations: [], logprobs },
            Kind::Call { .. } => return None,
        })
    }
}

impl<'a> Item<'a> {
    /// The item that a section is, `place` its place in the output of request `request_id`. An item that has only
    /// begun has no parts yet.
    pub fn of(
        request_id: u128,
        place: usize,
        section: &'a Section,
        status: Status,
        logprobs: TextLogprobs<'a>,
    ) -> Self {
        let id = section_id(request_id, place, section);
        let content = || match status {
            Status::InProgress => Vec::new(),
            _ => Part::of(section, logprobs).into_iter().collect(),
        };
        match &section.kind {
            Kind::Reasoning => Self::Reasoning { id, summary: [], content: content(), status },
            Kind::Text => Self::Message { id, role: "assistant", content: content(), status },
            Kind::Call { index, name } => {
                let call_id = item_id("call", request_id, 0, *index);
                Self::FunctionCall { id, call_id, name, arguments: &section.text, status }
            }
        }
    }
}

/// The id of the item that a section is.
pub fn section_id(request_id: u128, place: usize, section: &Section) -> String {
    let prefix = match section.kind {
        Kind::Reasoning => "rs",
        Kind::Text => "msg",
        Kind::Call { .. } => "fc",
    };
    item_id(prefix, request_id, 0, u32::try_from(place).unwrap_or(u32::MAX))
}

#[derive(Debug, Clone, Copy, Serialize)]
struct InputDetails {
    cached_tokens: u32,
    cache_write_tokens: u32,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct OutputDetails {
    reasoning_tokens: u32,
}

/// Token counts under the names of this dialect.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            // Nobody pays for writing to the cache, so it is not counted.
            input_tokens_details: InputDetails { cached_tokens: usage.cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        }
    }
}

/// Where in the output something happens.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spot<'a> {
    pub item_id: &'a str,
    pub output_index: usize,
    /// Absent for calls, which have no parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<u32>,
}

/// More of a section.
#[derive(Debug, Serialize)]
pub struct Growth<'a> {
    #[serde(flatten)]
    pub spot: Spot<'a>,
    pub delta: &'a str,
    /// Of text only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<TextLogprobs<'a>>,
}

/// All of a section.
#[derive(Debug, Serialize)]
pub struct Whole<'a> {
    #[serde(flatten)]
    pub spot: Spot<'a>,
    pub text: &'a str,
    /// Of text only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<TextLogprobs<'a>>,
}

/// What an event says; [`Event`] names and numbers it.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum News<'a> {
    Created {
        response: &'a Response<'a>,
    },
    InProgress {
        response: &'a Response<'a>,
    },
    Completed {
        response: &'a Response<'a>,
    },
    Incomplete {
        response: &'a Response<'a>,
    },
    Failed {
        response: &'a Response<'a>,
    },
    ItemAdded {
        output_index: usize,
        item: Item<'a>,
    },
    ItemDone {
        output_index: usize,
        item: Item<'a>,
    },
    PartAdded {
        #[serde(flatten)]
        spot: Spot<'a>,
        part: Part<'a>,
    },
    PartDone {
        #[serde(flatten)]
        spot: Spot<'a>,
        part: Part<'a>,
    },
    ReasoningDelta(Growth<'a>),
    ReasoningDone(Whole<'a>),
    TextDelta(Growth<'a>),
    TextDone(Whole<'a>),
    ArgumentsDelta(Growth<'a>),
    ArgumentsDone {
        #[serde(flatten)]
        spot: Spot<'a>,
        name: &'a str,
        arguments: &'a str,
    },
}

impl News<'_> {
    /// The event's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Created { .. } => "response.created",
            Self::InProgress { .. } => "response.in_progress",
            Self::Completed { .. } => "response.completed",
            Self::Incomplete { .. } => "response.incomplete",
            Self::Failed { .. } => "response.failed",
            Self::ItemAdded { .. } => "response.output_item.added",
            Self::ItemDone { .. } => "response.output_item.done",
            Self::PartAdded { .. } => "response.content_part.added",
            Self::PartDone { .. } => "response.content_part.done",
            Self::ReasoningDelta(_) => "response.reasoning_text.delta",
            Self::ReasoningDone(_) => "response.reasoning_text.done",
            Self::TextDelta(_) => "response.output_text.delta",
            Self::TextDone(_) => "response.output_text.done",
            Self::ArgumentsDelta(_) => "response.function_call_arguments.delta",
            Self::ArgumentsDone { .. } => "response.function_call_arguments.done",
        }
    }
}

/// One event of a stream.
#[derive(Debug, Serialize)]
pub struct Event<'a> {
    /// The event's name, which the stream has in front of the data as well.
    #[serde(rename = "type")]
    name: &'static str,
    /// Counts the events of the stream from 0.
    sequence_number: u64,
    #[serde(flatten)]
    news: &'a News<'a>,
}

impl<'a> Event<'a> {
    pub fn new(sequence_number: u64, news: &'a News<'a>) -> Self {
        Self { name: news.name(), sequence_number, news }
    }
}
