//! Where reasoning ends: decided by token ids, so text that merely spells a think token changes nothing.

use crate::chat::control::{THINK_CLOSE, THINK_OPEN};
use crate::text::tokenizer::Tokenizer;

/// What one output token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenPlace {
    Reasoning,
    Content,
    /// The opening think token repeated at the start of reasoning: it belongs to neither.
    RepeatedOpening,
    /// The first closing think token: reasoning ends here.
    EndOfReasoning,
}

/// The state of one choice. Whether the output starts in reasoning comes from the rendered prompt, never from
/// the output.
#[derive(Debug, Clone)]
pub struct ReasoningSplit {
    open_id: Option<u32>,
    close_id: Option<u32>,
    in_reasoning: bool,
    num_reasoning_tokens: u32,
}

impl ReasoningSplit {
    pub fn new(tokenizer: &Tokenizer, starts_in_reasoning: bool) -> Self {
        Self {
            open_id: tokenizer.control(THINK_OPEN),
            close_id: tokenizer.control(THINK_CLOSE),
            in_reasoning: starts_in_reasoning,
            num_reasoning_tokens: 0,
        }
    }

    /// Places the next output token. After reasoning has ended, think tokens are ordinary content.
    pub fn place(&mut self, token_id: u32) -> TokenPlace {
        if !self.in_reasoning {
            return TokenPlace::Content;
        }
        if Some(token_id) == self.close_id {
            self.in_reasoning = false;
            return TokenPlace::EndOfReasoning;
        }
        if self.num_reasoning_tokens == 0 && Some(token_id) == self.open_id {
            return TokenPlace::RepeatedOpening;
        }
        self.num_reasoning_tokens += 1;
        TokenPlace::Reasoning
    }

    pub fn in_reasoning(&self) -> bool {
        self.in_reasoning
    }

    /// Tokens placed in reasoning; the think tokens around it are not counted.
    pub fn num_reasoning_tokens(&self) -> u32 {
        self.num_reasoning_tokens
    }
}
