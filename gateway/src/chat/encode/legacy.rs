//! The prompts of the family's earlier models: V3.1 and V3.2-Exp, V3 and R1.
//!
//! All system messages come first, tools behind them. V3.1 opens an answer with a think token, closed where it does not
//! think; V3 has none, and R1 opens its reasoning itself. Reasoning of earlier answers is never repeated. Calls and
//! results stand between control tokens. Source: the chat templates published with the weights. V3 and R1 have no
//! wording for tools of their own, so theirs is ours.

use serde_json::Value;

use super::{EncodeError, EncodeOptions, Encoded, Ending, Message, Prompt, Role, ToolCall};
use crate::chat::control::{ASSISTANT, BEGIN_OF_SENTENCE, END_OF_SENTENCE, THINK_CLOSE, THINK_OPEN, USER};
use crate::chat::dialect::Dialect;
use crate::chat::markers::Marker;
use crate::chat::pyjson;
use crate::chat::style::Thinking;
use crate::text::tokenizer::{Tokenizer, TokenizerError};

const OUTPUTS_BEGIN: &str = "<｜tool▁outputs▁begin｜>";
const OUTPUTS_END: &str = "<｜tool▁outputs▁end｜>";
const OUTPUT_BEGIN: &str = "<｜tool▁output▁begin｜>";
const OUTPUT_END: &str = "<｜tool▁output▁end｜>";

const TOOLS_V31: &str = "## Tools\nYou have access to the following tools:\n";
const TOOLS_V31_END: &str = include_str!("tools_v31.txt");
const TOOLS_V3: &str = include_str!("tools_v3.txt");

const PARAGRAPH: &str = "\n\n";

/// Renders a conversation in the dialect of `options.style`.
///
/// # Errors
/// As [`super::encode`].
pub(super) fn encode(
    messages: &[Message],
    options: &EncodeOptions,
    tokenizer: &Tokenizer,
) -> Result<Encoded, EncodeError> {
    let continued = super::continued(messages, options)?;
    let rendered = &messages[..messages.len() - usize::from(continued.is_some())];
    let fenced = options.style.dialect == Dialect::V3;
    let mut legacy = Legacy { prompt: Prompt::new(tokenizer, options.thinking), fenced, previous: Previous::Start };
    if options.add_begin_of_sentence {
        legacy.prompt.control(BEGIN_OF_SENTENCE)?;
    }
    legacy.system(messages, options)?;
    for message in rendered {
        legacy.message(message)?;
    }
    if options.ending != Ending::Closed {
        legacy.open_answer()?;
    }
    // R1's template leaves it to the model to begin its reasoning.
    legacy.prompt.in_reasoning |= options.style.thinking == Thinking::Always && options.ending != Ending::Closed;
    if let Some(message) = continued {
        legacy.continue_answer(message)?;
    }
    Ok(Encoded { segments: legacy.prompt.segments, starts_in_reasoning: legacy.prompt.in_reasoning })
}

/// What the last message was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Previous {
    Start,
    User,
    Assistant,
    Tool,
}

struct Legacy<'a> {
    prompt: Prompt<'a>,
    /// V3's way of writing calls and results.
    fenced: bool,
    previous: Previous,
}

impl Legacy<'_> {
    /// System texts and tools, wherever they stand in the conversation.
    fn system(&mut self, messages: &[Message], options: &EncodeOptions) -> Result<(), EncodeError> {
        let systems = messages.iter().filter(|message| matches!(message.role, Role::System | Role::Developer));
        for (index, message) in systems.clone().enumerate() {
            self.prompt.text(if index > 0 { PARAGRAPH } else { "" });
            self.prompt.text(&message.content);
        }
        let tools: Vec<&Value> =
            options.leading_tools.iter().chain(systems.flat_map(|message| &message.tools)).collect();
        if tools.is_empty() {
            return Ok(());
        }
        self.prompt.text(PARAGRAPH);
        if self.fenced {
            self.markup(TOOLS_V3)?;
            for tool in tools {
                self.prompt.text("\n```json\n");
                let mut json = String::new();
                pyjson::write(tool, &mut json);
                self.prompt.text(&json);
                self.prompt.text("\n```\n");
            }
            return Ok(());
        }
        self.prompt.text(TOOLS_V31);
        for tool in tools {
            let text = |field: &str| tool[field].as_str().unwrap_or_default();
            let mut block = format!("\n### {}\nDescription: {}\n\nParameters: ", text("name"), text("description"));
            pyjson::write(tool.get("parameters").unwrap_or(&Value::Object(serde_json::Map::new())), &mut block);
            block.push('\n');
            self.prompt.text(&block);
        }
        self.markup(TOOLS_V31_END)?;
        Ok(())
    }

    fn message(&mut self, message: &Message) -> Result<(), EncodeError> {
        match message.role {
            Role::System | Role::Developer => {}
            Role::User => {
                self.end_results()?;
                self.prompt.control(USER)?;
                self.prompt.text(&message.content);
                if self.fenced {
                    self.prompt.control(ASSISTANT)?;
                }
                self.previous = Previous::User;
            }
            Role::Assistant => {
                self.end_results()?;
                if self.previous == Previous::User && !self.fenced {
                    self.prompt.open_turn(false)?;
                }
                self.prompt.text(&message.content);
                self.calls(&message.tool_calls)?;
                self.prompt.control(END_OF_SENTENCE)?;
                self.previous = Previous::Assistant;
            }
            Role::Tool => {
                if self.fenced {
                    if self.previous == Previous::Tool {
                        self.prompt.text("\n");
                    } else {
                        self.prompt.control(OUTPUTS_BEGIN)?;
                    }
                }
                self.prompt.control(OUTPUT_BEGIN)?;
                self.prompt.text(&message.content);
                self.prompt.control(OUTPUT_END)?;
                self.previous = Previous::Tool;
            }
        }
        Ok(())
    }

    fn end_results(&mut self) -> Result<(), TokenizerError> {
        if self.fenced && self.previous == Previous::Tool {
            self.prompt.control(OUTPUTS_END)?;
        }
        Ok(())
    }

    fn calls(&mut self, calls: &[ToolCall]) -> Result<(), TokenizerError> {
        if calls.is_empty() {
            return Ok(());
        }
        self.prompt.control(Marker::CallsBegin.text())?;
        for (index, call) in calls.iter().enumerate() {
            let mut arguments = String::new();
            pyjson::write_object(&call.arguments, &mut arguments);
            if self.fenced {
                self.prompt.text(if index > 0 { "\n" } else { "" });
                self.prompt.control(Marker::CallBegin.text())?;
                self.prompt.text("function");
                self.prompt.control(Marker::Separator.text())?;
                self.prompt.text(&format!("{}\n```json\n{arguments}\n```", call.name));
            } else {
                self.prompt.control(Marker::CallBegin.text())?;
                self.prompt.text(&call.name);
                self.prompt.control(Marker::Separator.text())?;
                self.prompt.text(&arguments);
            }
            self.prompt.control(Marker::CallEnd.text())?;
        }
        self.prompt.control(Marker::CallsEnd.text())
    }

    /// The place where the model goes on. After results it does so without a mark of its own.
    fn open_answer(&mut self) -> Result<(), TokenizerError> {
        self.end_results()?;
        match (self.previous, self.fenced) {
            (Previous::Tool, _) | (Previous::User, true) => Ok(()),
            (_, true) => self.prompt.control(ASSISTANT),
            (_, false) => self.prompt.open_turn(true),
        }
    }

    fn continue_answer(&mut self, message: &Message) -> Result<(), TokenizerError> {
        if self.fenced && self.prompt.in_reasoning && !(message.reasoning.is_empty() && message.content.is_empty()) {
            self.prompt.control(THINK_OPEN)?;
        }
        self.prompt.continue_message(message)
    }

    /// Text of our own, in which markers are control tokens.
    fn markup(&mut self, text: &str) -> Result<(), TokenizerError> {
        let mut rest = text;
        loop {
            let markers = Marker::LEGACY_SET.iter().map(|marker| marker.text());
            let markers = markers.filter(|marker| *marker != THINK_OPEN && *marker != THINK_CLOSE);
            let next = markers.filter_map(|marker| Some((rest.find(marker)?, marker))).min();
            let Some((at, marker)) = next else {
                self.prompt.text(rest);
                return Ok(());
            };
            self.prompt.text(&rest[..at]);
            self.prompt.control(marker)?;
            rest = &rest[at + marker.len()..];
        }
    }
}

#[cfg(test)]
mod tests;
