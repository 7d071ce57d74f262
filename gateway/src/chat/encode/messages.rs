//! One message's part of the prompt, by its role.

use super::{Answering, EncodeError, Message, Place, Prompt, Role, ToolCall};
use crate::chat::control::{DSML, END_OF_SENTENCE, THINK_CLOSE, THINK_OPEN, USER};
use crate::chat::pyjson;
use crate::text::tokenizer::TokenizerError;

const BLOCK_SEPARATOR: &str = "\n\n";
const DEVELOPER_TEXT: &str = "\n\n# The user's message is: ";

impl Prompt<'_> {
    /// Appends one message. `answering` says which calls still wait for results, before it and after it.
    pub(super) fn message(
        &mut self,
        message: &Message,
        place: Place,
        answering: Option<Answering>,
    ) -> Result<Option<Answering>, EncodeError> {
        if place.is_context {
            return Ok(match message.role {
                Role::Assistant => awaited(message),
                Role::Tool => count_result(place, answering)?,
                Role::System | Role::User | Role::Developer => None,
            });
        }
        match message.role {
            Role::System => {
                self.text(&message.content);
                self.blocks(message)?;
            }
            Role::User => {
                self.control(USER)?;
                self.text(&message.content);
                self.open_turn(Some(place.index) == place.last_user)?;
            }
            Role::Developer => {
                if message.content.is_empty() {
                    return Err(EncodeError::Invalid {
                        param: format!("messages[{}].content", place.index),
                        message: "a developer message must have content".to_owned(),
                    });
                }
                self.control(USER)?;
                self.blocks(message)?;
                self.text(DEVELOPER_TEXT);
                self.text(&message.content);
                self.open_turn(Some(place.index) == place.last_user)?;
            }
            Role::Assistant => {
                self.assistant(message, place)?;
                return Ok(awaited(message));
            }
            Role::Tool => return self.result(message, place, answering),
        }
        Ok(None)
    }

    fn blocks(&mut self, message: &Message) -> Result<(), TokenizerError> {
        if !message.tools.is_empty() {
            self.text(BLOCK_SEPARATOR);
            self.tools(&message.tools)?;
        }
        if let Some(schema) = &message.response_format {
            self.text(BLOCK_SEPARATOR);
            self.response_format(schema);
        }
        Ok(())
    }

    fn assistant(&mut self, message: &Message, place: Place) -> Result<(), EncodeError> {
        let after_last_user = place.last_user.is_none_or(|last| place.index > last);
        if self.thinking && after_last_user {
            if message.reasoning.is_empty() && message.tool_calls.is_empty() {
                return Err(EncodeError::Invalid {
                    param: format!("messages[{}].reasoning_content", place.index),
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
        self.calls(&message.tool_calls)?;
        self.control(END_OF_SENTENCE)?;
        Ok(())
    }

    /// The block of an assistant message's calls.
    pub(super) fn calls(&mut self, calls: &[ToolCall]) -> Result<(), TokenizerError> {
        if calls.is_empty() {
            return Ok(());
        }
        self.text("\n\n<");
        self.control(DSML)?;
        self.text("function_calls>\n");
        for call in calls {
            self.call(call)?;
        }
        self.text("</");
        self.control(DSML)?;
        self.text("function_calls>");
        Ok(())
    }

    /// One call and the line end after it. Without arguments its body is an empty line.
    fn call(&mut self, call: &ToolCall) -> Result<(), TokenizerError> {
        self.text("<");
        self.control(DSML)?;
        self.text("invoke name=\"");
        self.text(&call.name);
        self.text("\">\n");
        let mut json = String::new();
        for (index, (key, value)) in call.arguments.iter().enumerate() {
            if index > 0 {
                self.text("\n");
            }
            self.text("<");
            self.control(DSML)?;
            self.text("parameter name=\"");
            self.text(key);
            if let Some(value) = value.as_str() {
                self.text("\" string=\"true\">");
                self.text(value);
            } else {
                json.clear();
                pyjson::write(value, &mut json);
                self.text("\" string=\"false\">");
                self.text(&json);
            }
            self.text("</");
            self.control(DSML)?;
            self.text("parameter>");
        }
        self.text("\n</");
        self.control(DSML)?;
        self.text("invoke>\n");
        Ok(())
    }

    /// A result: the first of its calls' opens the block, the last closes it and opens the next step's turn.
    fn result(
        &mut self,
        message: &Message,
        place: Place,
        answering: Option<Answering>,
    ) -> Result<Option<Answering>, EncodeError> {
        let is_first = answering.is_some_and(|answering| answering.num_results == 0);
        let answering = count_result(place, answering)?;
        if is_first {
            self.text("\n\n<function_results>");
        }
        self.text("\n<result>");
        self.text(&message.content);
        self.text("</result>");
        if answering.is_none() {
            self.text("\n</function_results>\n\n");
            self.in_reasoning = self.thinking && place.last_user.is_none_or(|last| place.index >= last);
            self.control(if self.in_reasoning { THINK_OPEN } else { THINK_CLOSE })?;
        }
        Ok(answering)
    }
}

fn awaited(message: &Message) -> Option<Answering> {
    let num_calls = message.tool_calls.len();
    (num_calls > 0).then_some(Answering { num_calls, num_results: 0 })
}

fn count_result(place: Place, answering: Option<Answering>) -> Result<Option<Answering>, EncodeError> {
    let Some(Answering { num_calls, num_results }) = answering else {
        return Err(EncodeError::Invalid {
            param: format!("messages[{}].role", place.index),
            message: "a tool message must answer a tool call of the assistant message before it".to_owned(),
        });
    };
    let answering = Answering { num_calls, num_results: num_results + 1 };
    Ok((answering.num_results < num_calls).then_some(answering))
}
