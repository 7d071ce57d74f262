//! `text_completion`, whole and in chunks.

use serde::Serialize;

use crate::openai::logprobs::CompletionLogprobs;
use crate::openai::response::{ChunkUsage, FinishReason, ResponseHead, StopReason, Usage};

#[derive(Debug, Clone, Copy, Serialize)]
pub struct CompletionChoice<'a> {
    pub index: u32,
    pub text: &'a str,
    pub logprobs: Option<&'a CompletionLogprobs>,
    /// Absent in every chunk of a choice but its last.
    pub finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}

impl<'a> CompletionChoice<'a> {
    /// A choice or chunk of text only.
    pub fn new(index: u32, text: &'a str) -> Self {
        Self {
            index,
            text,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
        }
    }
}

#[derive(Serialize)]
struct TextCompletion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [CompletionChoice<'a>],
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    usage: ChunkUsage<'a>,
}

impl<'a> TextCompletion<'a> {
    fn new(head: &'a ResponseHead, choices: &'a [CompletionChoice<'a>], usage: ChunkUsage<'a>) -> Self {
        Self { id: &head.id, object: "text_completion", created: head.created, model: &head.model, choices, usage }
    }
}

/// Appends a whole answer as JSON to `out`.
pub fn write_completion(
    head: &ResponseHead,
    choices: &[CompletionChoice<'_>],
    usage: &Usage,
    out: &mut Vec<u8>,
) -> serde_json::Result<()> {
    serde_json::to_writer(out, &TextCompletion::new(head, choices, ChunkUsage::Value(usage)))
}

/// Writes the chunks of one streamed answer.
#[derive(Debug, Clone)]
pub struct CompletionChunkWriter {
    head: ResponseHead,
    with_usage: bool,
}

impl CompletionChunkWriter {
    /// `with_usage`: whether chunks have a usage field, null where there is nothing to say.
    pub fn new(head: ResponseHead, with_usage: bool) -> Self {
        Self { head, with_usage }
    }

    /// Appends one chunk as JSON to `out`. `usage` is the usage so far, for a client that wants it in every chunk.
    pub fn write(
        &self,
        choice: &CompletionChoice<'_>,
        usage: Option<&Usage>,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let usage = ChunkUsage::of(usage, self.with_usage);
        let choices = std::slice::from_ref(choice);
        serde_json::to_writer(out, &TextCompletion::new(&self.head, choices, usage))
    }

    /// The last chunk: no choices, the usage of the whole answer.
    pub fn write_usage(&self, usage: &Usage, out: &mut Vec<u8>) -> serde_json::Result<()> {
        serde_json::to_writer(out, &TextCompletion::new(&self.head, &[], ChunkUsage::Value(usage)))
    }
}

#[cfg(test)]
mod tests;
