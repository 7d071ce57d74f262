//! DeepSeek-V3.2's prompt encoding: messages of every role, tools, tool calls and results, in chat and thinking mode.
//!
//! A prompt is the begin-of-sentence token followed by the renderings of the messages, nothing between them. Every
//! user message brings its own assistant marker and think token; reasoning is printed only after the last user
//! message. Source: the encoding that DeepSeek publishes with the V3.2 weights.
//!
//! The family's earlier models speak otherwise; `legacy` renders for them.
//!
//! Text and control tokens stay apart: what a client writes is a text segment and cannot become a control token.

mod legacy;
mod messages;
mod results;
mod tools;

use serde_json::{Map, Value};

pub use self::results::match_results;
use super::control::{ASSISTANT, BEGIN_OF_SENTENCE, THINK_CLOSE, THINK_OPEN};
use super::dialect::Dialect;
use super::style::Style;
use crate::text::tokenizer::{Segment, Tokenizer, TokenizerError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    /// A user message that may carry tools and a response format; DeepSeek's search agent speaks in it.
    Developer,
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// Whether a message of this role opens an assistant turn.
    fn opens_turn(self) -> bool {
        matches!(self, Self::User | Self::Developer)
    }
}

/// One message, its content parts joined and null content made empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// Of an assistant message; empty means none.
    pub reasoning: String,
    /// Of an assistant message.
    pub tool_calls: Vec<ToolCall>,
    /// Of a tool message: the call it answers.
    pub tool_call_id: Option<String>,
    /// Of a system or developer message: function objects as the client sent them.
    pub tools: Vec<Value>,
    /// Of a system or developer message: what the answer must look like.
    pub response_format: Option<Value>,
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            tool_call_id: None,
            tools: Vec::new(),
            response_format: None,
        }
    }
}

/// A call of an earlier assistant message.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub id: Option<String>,
    pub name: String,
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// Reads arguments as clients send them: the text of a JSON object, of which no text at all is the empty one.
    /// Of a repeated key the last value counts, in the place of the first.
    ///
    /// # Errors
    /// One sentence without a subject: the text is no JSON, or JSON of another kind.
    pub fn parse_arguments(text: &str) -> Result<Map<String, Value>, String> {
        if text.trim().is_empty() {
            return Ok(Map::new());
        }
        match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => Ok(arguments),
            Ok(_) => Err("must be a JSON object".to_owned()),
            Err(error) => Err(format!("must be the text of a JSON object, but it is not JSON: {error}")),
        }
    }
}

/// How the prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// As the messages end; a trailing assistant message is closed. The form of training samples.
    Closed,
    /// With an open assistant turn: a user message opens one itself, after any other message one is added.
    OpenTurn,
    /// Inside the last message, which is the assistant's: the model goes on where its content ends. If it has only
    /// reasoning, the model goes on thinking.
    ContinueFinal,
}

#[derive(Debug, Clone)]
pub struct EncodeOptions {
    pub style: Style,
    pub thinking: bool,
    pub ending: Ending,
    pub add_begin_of_sentence: bool,
    /// Messages at the start that set the state and are not rendered: the prompt continues an earlier one.
    pub num_context_messages: usize,
    /// Tools of a conversation without a system message: they stand before it, as on an empty one.
    pub leading_tools: Vec<Value>,
}

impl EncodeOptions {
    /// What a chat request wants: begin of sentence, and a turn for the model to fill.
    pub fn request(thinking: bool, continue_final: bool) -> Self {
        let ending = if continue_final { Ending::ContinueFinal } else { Ending::OpenTurn };
        Self {
            style: Style::V32,
            thinking,
            ending,
            add_begin_of_sentence: true,
            num_context_messages: 0,
            leading_tools: Vec::new(),
        }
    }

    /// Puts the tools of a request where the model expects them: on the first system message, after its text, or
    /// before everything else where there is none.
    pub fn declare_tools(&mut self, messages: &mut [Message], functions: Vec<Value>) {
        match messages.iter_mut().find(|message| message.role == Role::System) {
            Some(system) => system.tools = functions,
            None => self.leading_tools = functions,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Encoded {
    pub segments: Vec<Segment>,
    /// Whether the model's first token is reasoning: the last think token of the prompt is an opening one.
    pub starts_in_reasoning: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The conversation breaks a rule of the encoding; `param` names the message's field.
    #[error("{message}")]
    Invalid { param: String, message: String },
    /// The model's tokenizer lacks a control token that this conversation needs.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Renders a conversation. Control tokens are looked up by their text, and only those that are used.
///
/// # Errors
/// A message breaks a rule of the encoding, or the model lacks a control token.
pub fn encode(messages: &[Message], options: &EncodeOptions, tokenizer: &Tokenizer) -> Result<Encoded, EncodeError> {
    if options.style.dialect != Dialect::V32 {
        return legacy::encode(messages, options, tokenizer);
    }
    let mut prompt = Prompt::new(tokenizer, options.thinking);
    if options.add_begin_of_sentence {
        prompt.control(BEGIN_OF_SENTENCE)?;
    }
    if !options.leading_tools.is_empty() {
        let system = Message { tools: options.leading_tools.clone(), ..Message::new(Role::System, "") };
        prompt.message(&system, Place { index: 0, last_user: None, is_context: false }, None)?;
    }
    let continued = continued(messages, options)?;
    let rendered = &messages[..messages.len() - usize::from(continued.is_some())];
    let last_user = messages.iter().rposition(|message| message.role.opens_turn());
    let mut answering = None;
    for (index, message) in rendered.iter().enumerate() {
        let conversation = Place { index, last_user, is_context: index < options.num_context_messages };
        answering = prompt.message(message, conversation, answering)?;
    }
    if options.ending != Ending::Closed {
        if answering.is_some() {
            return Err(EncodeError::Invalid {
                param: format!("messages[{}]", rendered.len() - 1),
                message: "every tool call must be answered before the model goes on".to_owned(),
            });
        }
        let is_open = rendered.last().is_some_and(|last| last.role.opens_turn() || last.role == Role::Tool);
        if !is_open {
            prompt.open_turn(true)?;
        }
    }
    if let Some(message) = continued {
        prompt.continue_message(message)?;
    }
    Ok(Encoded { segments: prompt.segments, starts_in_reasoning: prompt.in_reasoning })
}

/// The message that the model is to go on with, where it is to.
fn continued<'a>(messages: &'a [Message], options: &EncodeOptions) -> Result<Option<&'a Message>, EncodeError> {
    match (options.ending, messages.last()) {
        (Ending::ContinueFinal, Some(last)) if last.role == Role::Assistant => Ok(Some(last)),
        (Ending::ContinueFinal, _) => Err(EncodeError::Invalid {
            param: "messages".to_owned(),
            message: "'messages' must end with an assistant message if that is to be continued".to_owned(),
        }),
        (Ending::OpenTurn | Ending::Closed, _) => Ok(None),
    }
}

/// Where a message stands in its conversation.
#[derive(Debug, Clone, Copy)]
struct Place {
    index: usize,
    /// The last message that opens a turn.
    last_user: Option<usize>,
    /// Sets the state without being rendered.
    is_context: bool,
}

/// Calls of the last assistant message that wait for their results.
#[derive(Debug, Clone, Copy)]
struct Answering {
    num_calls: usize,
    num_results: usize,
}

/// The prompt as far as it is rendered.
struct Prompt<'a> {
    tokenizer: &'a Tokenizer,
    thinking: bool,
    segments: Vec<Segment>,
    in_reasoning: bool,
}

impl<'a> Prompt<'a> {
    fn new(tokenizer: &'a Tokenizer, thinking: bool) -> Self {
        Self { tokenizer, thinking, segments: Vec::new(), in_reasoning: false }
    }

    /// Neighbouring texts form one segment: the encoding tokenizes them as one string.
    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if let Some(Segment::Text(last)) = self.segments.last_mut() {
            last.push_str(text);
        } else {
            self.segments.push(Segment::Text(text.to_owned()));
        }
    }

    fn control(&mut self, text: &str) -> Result<(), TokenizerError> {
        let id = self.tokenizer.control_id(text)?;
        self.segments.push(Segment::Control(id));
        Ok(())
    }

    /// The assistant marker and its think token. `current` turns may think; earlier ones have their reasoning
    /// dropped, and their think token is the closing one.
    fn open_turn(&mut self, current: bool) -> Result<(), TokenizerError> {
        self.control(ASSISTANT)?;
        self.in_reasoning = self.thinking && current;
        self.control(if self.in_reasoning { THINK_OPEN } else { THINK_CLOSE })
    }

    /// The start of an answer that the model is to go on with, inside a turn that is open.
    fn continue_message(&mut self, message: &Message) -> Result<(), TokenizerError> {
        if self.in_reasoning {
            self.text(&message.reasoning);
            if !message.content.is_empty() {
                self.control(THINK_CLOSE)?;
                self.in_reasoning = false;
            }
        }
        self.text(&message.content);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
