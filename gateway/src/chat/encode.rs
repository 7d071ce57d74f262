//! DeepSeek-V3.2's prompt encoding for system, user and assistant messages, in chat and thinking mode.
//!
//! A prompt is the begin-of-sentence token followed by the renderings of the messages, nothing between them. Every
//! user message brings its own assistant marker and think token; reasoning is printed only after the last user
//! message. Source: the encoding that DeepSeek publishes with the V3.2 weights.
//!
//! Text and control tokens stay apart: what a client writes is a text segment and cannot become a control token.

use crate::text::tokenizer::{Segment, Tokenizer, TokenizerError};

pub const BEGIN_OF_SENTENCE: &str = "<｜begin▁of▁sentence｜>";
pub const END_OF_SENTENCE: &str = "<｜end▁of▁sentence｜>";
pub const USER: &str = "<｜User｜>";
pub const ASSISTANT: &str = "<｜Assistant｜>";
pub const THINK_OPEN: &str = "<think>";
pub const THINK_CLOSE: &str = "</think>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
}

/// One message, its content parts joined and null content made empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// Of an assistant message; empty means none.
    pub reasoning: String,
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning: String::new() }
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

#[derive(Debug, Clone, Copy)]
pub struct EncodeOptions {
    pub thinking: bool,
    pub ending: Ending,
    pub add_begin_of_sentence: bool,
}

impl EncodeOptions {
    /// What a chat request wants: begin of sentence, and a turn for the model to fill.
    pub fn request(thinking: bool, continue_final: bool) -> Self {
        let ending = if continue_final { Ending::ContinueFinal } else { Ending::OpenTurn };
        Self { thinking, ending, add_begin_of_sentence: true }
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
pub fn encode(messages: &[Message], options: &EncodeOptions, tokenizer: &Tokenizer) -> Result<Encoded, EncodeError> {
    let mut prompt = Prompt::new(tokenizer, options.thinking);
    if options.add_begin_of_sentence {
        prompt.control(BEGIN_OF_SENTENCE)?;
    }
    let last_user = messages.iter().rposition(|message| message.role == Role::User);
    let continued = match (options.ending, messages.split_last()) {
        (Ending::ContinueFinal, Some((last, _))) if last.role == Role::Assistant => Some(last),
        (Ending::ContinueFinal, _) => {
            return Err(EncodeError::Invalid {
                param: "messages".to_owned(),
                message: "only a final assistant message can be continued".to_owned(),
            });
        }
        _ => None,
    };
    let complete = messages.len() - usize::from(continued.is_some());
    for (index, message) in messages.iter().take(complete).enumerate() {
        match message.role {
            Role::System => prompt.text(&message.content),
            Role::User => {
                prompt.control(USER)?;
                prompt.text(&message.content);
                prompt.open_turn(Some(index) == last_user)?;
            }
            Role::Assistant => {
                let after_last_user = last_user.is_none_or(|last| index > last);
                prompt.assistant(message, index, after_last_user)?;
            }
        }
    }
    if options.ending != Ending::Closed {
        let previous = complete.checked_sub(1).map(|last| messages[last].role);
        if previous != Some(Role::User) {
            prompt.open_turn(true)?;
        }
    }
    if let Some(message) = continued {
        prompt.continue_message(message)?;
    }
    Ok(Encoded { segments: prompt.segments, starts_in_reasoning: prompt.in_reasoning })
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

    fn assistant(&mut self, message: &Message, index: usize, after_last_user: bool) -> Result<(), EncodeError> {
        if self.thinking && after_last_user {
            if message.reasoning.is_empty() {
                return Err(EncodeError::Invalid {
                    param: format!("messages[{index}].reasoning_content"),
                    message: "in thinking mode an assistant message after the last user message must carry its \
                              reasoning_content"
                        .to_owned(),
                });
            }
            self.text(&message.reasoning);
            self.control(THINK_CLOSE)?;
            self.in_reasoning = false;
        }
        self.text(&message.content);
        self.control(END_OF_SENTENCE)?;
        Ok(())
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
