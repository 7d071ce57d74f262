//! Log-probability objects of both endpoints.
//!
//! A token is shown by its own bytes. One that is half a character has no text of its own: chat shows U+FFFD beside
//! the exact bytes, completions show OpenAI's `bytes:\x…` form, which keeps different halves apart.

use std::fmt::Write as _;

use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, SerializeStruct, Serializer};

use crate::text::detokenizer::Detokenizer;
use crate::text::tokenizer::Tokenizer;

/// JSON has no infinity; OpenAI writes this for a probability of zero.
const LOWEST_LOGPROB: f32 = -9999.0;

/// One token of the output, or of an echoed prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    pub token_id: u32,
    /// Absent for a prompt's first token, which nothing predicts.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOWEST_LOGPROB) } else { LOWEST_LOGPROB }
}

/// `choices[].logprobs` of chat: `{"content": [{token, logprob, bytes, top_logprobs}]}`.
#[derive(Clone, Copy)]
pub struct ChatLogprobs<'a> {
    pub tokenizer: &'a Tokenizer,
    pub tokens: &'a [TokenLogprob],
}

impl std::fmt::Debug for ChatLogprobs<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ChatLogprobs").field(&self.tokens).finish()
    }
}

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("ChatLogprobs", 1)?;
        let content = ChatTokens(*self);
        object.serialize_field("content", &content)?;
        object.end()
    }
}

/// The tokens of [`ChatLogprobs`] alone: `[{token, logprob, bytes, top_logprobs}]`.
pub struct ChatTokens<'a>(pub ChatLogprobs<'a>);

impl Serialize for ChatTokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ChatLogprobs { tokenizer, tokens } = self.0;
        serializer.collect_seq(tokens.iter().map(|token| ChatToken {
            tokenizer,
            token_id: token.token_id,
            logprob: token.logprob.unwrap_or(0.0),
            top: Some(&token.top),
        }))
    }
}

struct ChatToken<'a> {
    tokenizer: &'a Tokenizer,
    token_id: u32,
    logprob: f32,
    /// Absent in an alternative, which has none of its own.
    top: Option<&'a [(u32, f32)]>,
}

impl Serialize for ChatToken<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = self.tokenizer.token_bytes(self.token_id);
        let mut object = serializer.serialize_struct("ChatToken", 4)?;
        object.serialize_field("token", &String::from_utf8_lossy(bytes))?;
        object.serialize_field("logprob", &finite(self.logprob))?;
        object.serialize_field("bytes", bytes)?;
        if let Some(top) = self.top {
            object.serialize_field("top_logprobs", &ChatAlternatives(self.tokenizer, top))?;
        }
        object.end()
    }
}

struct ChatAlternatives<'a>(&'a Tokenizer, &'a [(u32, f32)]);

impl Serialize for ChatAlternatives<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.1.len()))?;
        for &(token_id, logprob) in self.1 {
            list.serialize_element(&ChatToken { tokenizer: self.0, token_id, logprob, top: None })?;
        }
        list.end()
    }
}

/// `choices[].logprobs` of completions: parallel lists over the tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Where each token begins in the choice's text, in characters.
    pub text_offset: Vec<u32>,
}

/// An object from token text to log-probability, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            object.serialize_entry(token, logprob)?;
        }
        object.end()
    }
}

/// Collects the log-probabilities of one completion choice, and where its tokens lie in the text.
#[derive(Debug, Default)]
pub struct CompletionLogprobRecorder {
    collected: CompletionLogprobs,
    detokenizer: Detokenizer,
    scratch: String,
    /// Characters of the text so far.
    offset: u32,
}

impl CompletionLogprobRecorder {
    /// Records the next token of the text: first an echoed prompt's, then the output's. `visible` is whether the
    /// token shows in the text; a stop token does not.
    pub fn record(&mut self, tokenizer: &Tokenizer, token: &TokenLogprob, visible: bool) {
        let name = token_name(tokenizer.token_bytes(token.token_id));
        let top = token.logprob.map(|logprob| {
            let mut top: Vec<(String, f32)> = Vec::with_capacity(token.top.len() + 1);
            let chosen = (token.token_id, logprob);
            let listed = token.top.iter().any(|(token_id, _)| *token_id == token.token_id);
            let unlisted = (!listed).then_some(chosen);
            for (token_id, logprob) in token.top.iter().copied().chain(unlisted) {
                let name = token_name(tokenizer.token_bytes(token_id));
                // An object has each key once; of tokens that look alike the likeliest stays.
                if top.iter().all(|(other, _)| *other != name) {
                    top.push((name, finite(logprob)));
                }
            }
            TopLogprobs(top)
        });
        self.collected.tokens.push(name);
        self.collected.token_logprobs.push(token.logprob.map(finite));
        self.collected.top_logprobs.push(top);
        self.collected.text_offset.push(self.offset);
        if visible {
            self.scratch.clear();
            self.detokenizer.push(tokenizer.token_bytes(token.token_id), &mut self.scratch);
            let chars = self.scratch.chars().count();
            self.offset = self.offset.saturating_add(u32::try_from(chars).unwrap_or(u32::MAX));
        }
    }

    /// What was recorded since the last call; offsets go on.
    pub fn take(&mut self) -> CompletionLogprobs {
        std::mem::take(&mut self.collected)
    }
}

fn token_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let mut name = String::from("bytes:");
            for byte in bytes {
                // Writing to a string cannot fail.
                let _ = write!(name, "\\x{byte:02x}");
            }
            name
        }
    }
}

#[cfg(test)]
mod tests;
