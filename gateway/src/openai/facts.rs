//! What requests are checked against besides the limits: the model that is to answer them.

use super::error::InvalidRequest;
use crate::chat::style::Style;

/// What validation must know about the model that serves the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// Embedding rows; every id below is valid.
    pub vocab_size: u32,
    /// Prompt and output tokens together.
    pub context_len: u32,
    pub style: Style,
}

impl ModelFacts {
    pub(super) fn check_token_id(&self, param: &str, id: i128) -> Result<u32, InvalidRequest> {
        match u32::try_from(id) {
            Ok(id) if id < self.vocab_size => Ok(id),
            _ => {
                let message = format!(
                    "'{param}' names token {id}; the model's token ids are 0 to {}.",
                    i64::from(self.vocab_size) - 1
                );
                Err(InvalidRequest::field(param, message))
            }
        }
    }
}
