//! `chat.completion` and `chat.completion.chunk`.

use serde::Serialize;
use serde_json::Value;

use crate::openai::logprobs::ChatLogprobs;
use crate::openai::response::{ChunkUsage, FinishReason, ResponseHead, StopReason, Usage};

/// `choices[].message`.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ChatMessage<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [ChatToolCall<'a>],
}

impl<'a> ChatMessage<'a> {
    /// `reasoning` is absent when the request did not think. An answer of calls alone has null content.
    pub fn new(content: &'a str, reasoning: Option<&'a str>, tool_calls: &'a [ChatToolCall<'a>]) -> Self {
        let content = (!content.is_empty() || tool_calls.is_empty()).then_some(content);
        Self { role: "assistant", content, reasoning_content: reasoning, tool_calls }
    }
}

/// A call, or what is new of it: the first delta of a call says everything but the arguments, the others only them.
#[derive(Debug, Clone, Serialize)]
pub struct ChatToolCall<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: ChatFunction<'a>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct ChatFunction<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> ChatToolCall<'a> {
    pub fn new(index: u32, id: &'a str, name: &'a str, arguments: &'a str) -> Self {
        let function = ChatFunction { name: Some(name), arguments };
        Self { index, id: Some(id), r#type: Some("function"), function }
    }

    /// More of a call's arguments.
    pub fn arguments(index: u32, arguments: &'a str) -> Self {
        Self { index, id: None, r#type: None, function: ChatFunction { name: None, arguments } }
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct ChatChoice<'a> {
    pub index: u32,
    pub message: ChatMessage<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: FinishReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChatCompletion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChatChoice<'a>],
    usage: &'a Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// Appends a whole answer as JSON to `out`.
pub fn write_completion(
    head: &ResponseHead,
    choices: &[ChatChoice<'_>],
    usage: &Usage,
    prompt_token_ids: Option<&[u32]>,
    out: &mut Vec<u8>,
) -> serde_json::Result<()> {
    let answer = ChatCompletion {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &head.model,
        choices,
        usage,
        prompt_token_ids,
    };
    serde_json::to_writer(out, &answer)
}

/// `choices[].delta`.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Nullable<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<&'a [ChatToolCall<'a>]>,
}

/// A string or an explicit null.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(transparent)]
struct Nullable<'a>(Option<&'a str>);

impl<'a> ChatDelta<'a> {
    /// The first delta of a choice. A thinking answer begins with reasoning, so its content is still null.
    pub fn role(thinking: bool) -> Self {
        let content = if thinking { None } else { Some("") };
        let reasoning_content = thinking.then_some("");
        Self { role: Some("assistant"), content: Some(Nullable(content)), reasoning_content, tool_calls: None }
    }

    pub fn reasoning(text: &'a str) -> Self {
        Self { reasoning_content: Some(text), ..Self::default() }
    }

    pub fn content(text: &'a str) -> Self {
        Self { content: Some(Nullable(Some(text))), ..Self::default() }
    }

    pub fn tool_call(call: &'a ChatToolCall<'a>) -> Self {
        Self { tool_calls: Some(std::slice::from_ref(call)), ..Self::default() }
    }

    /// The delta of the chunk that carries the finish reason.
    pub fn empty() -> Self {
        Self::default()
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct ChatChunkChoice<'a> {
    pub index: u32,
    pub delta: ChatDelta<'a>,
    pub logprobs: Option<ChatLogprobs<'a>>,
    pub finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

impl<'a> ChatChunkChoice<'a> {
    /// A chunk of text only.
    pub fn new(index: u32, delta: ChatDelta<'a>) -> Self {
        Self { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None }
    }

    /// The chunk that ends a choice.
    pub fn finish(index: u32, reason: FinishReason, stop_reason: Option<StopReason<'a>>) -> Self {
        Self { finish_reason: Some(reason), stop_reason, ..Self::new(index, ChatDelta::empty()) }
    }
}

/// The text of a chunk that holds nothing else.
#[derive(Debug, Clone, Copy)]
pub enum ChunkText<'a> {
    Reasoning(&'a str),
    Content(&'a str),
}

impl ChunkText<'_> {
    pub fn is_empty(&self) -> bool {
        let (Self::Reasoning(text) | Self::Content(text)) = self;
        text.is_empty()
    }
}

/// A chunk without what all chunks of an answer repeat.
#[derive(Serialize)]
struct ChunkBody<'a> {
    choices: &'a [ChatChunkChoice<'a>],
    #[serde(skip_serializing_if = "ChunkUsage::is_absent")]
    usage: ChunkUsage<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// Writes the chunks of one streamed answer.
#[derive(Debug, Clone)]
pub struct ChatChunkWriter {
    /// What every chunk begins with, as far as the last value before `choices`; made once, for it is most of a chunk.
    head: Box<str>,
    with_usage: bool,
}

impl ChatChunkWriter {
    /// `with_usage`: whether chunks have a usage field, null where there is nothing to say.
    pub fn new(head: ResponseHead, with_usage: bool) -> Self {
        let ResponseHead { id, created, model } = head;
        let (id, model) = (Value::from(id), Value::from(model));
        let head =
            format!("{{\"id\":{id},\"object\":\"chat.completion.chunk\",\"created\":{created},\"model\":{model}");
        Self { head: head.into(), with_usage }
    }

    /// Appends one chunk as JSON to `out`. `usage` is the usage so far, for a client that wants it in every chunk.
    pub fn write(
        &self,
        choice: &ChatChunkChoice<'_>,
        usage: Option<&Usage>,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        self.write_chunk(std::slice::from_ref(choice), usage, None, out)
    }

    /// The same as `write` for nothing but text, which nearly every chunk is: what stands around it is copied, and only
    /// the text itself is serialised.
    pub fn write_text(&self, index: u32, text: ChunkText<'_>, out: &mut Vec<u8>) -> serde_json::Result<()> {
        out.extend_from_slice(self.head.as_bytes());
        out.extend_from_slice(b",\"choices\":[{\"index\":");
        serde_json::to_writer(&mut *out, &index)?;
        let (name, text): (&[u8], _) = match text {
            ChunkText::Reasoning(text) => (b",\"delta\":{\"reasoning_content\":", text),
            ChunkText::Content(text) => (b",\"delta\":{\"content\":", text),
        };
        out.extend_from_slice(name);
        serde_json::to_writer(&mut *out, text)?;
        out.extend_from_slice(b"},\"logprobs\":null,\"finish_reason\":null}]");
        out.extend_from_slice(if self.with_usage { b",\"usage\":null}" } else { b"}" });
        Ok(())
    }

    /// The first chunk of a choice for a client that asked for token ids: it carries the prompt's.
    pub fn write_first(
        &self,
        choice: &ChatChunkChoice<'_>,
        usage: Option<&Usage>,
        prompt_token_ids: &[u32],
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        self.write_chunk(std::slice::from_ref(choice), usage, Some(prompt_token_ids), out)
    }

    /// The last chunk: no choices, the usage of the whole answer.
    pub fn write_usage(&self, usage: &Usage, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.write_chunk(&[], Some(usage), None, out)
    }

    fn write_chunk(
        &self,
        choices: &[ChatChunkChoice<'_>],
        usage: Option<&Usage>,
        prompt_token_ids: Option<&[u32]>,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        out.extend_from_slice(self.head.as_bytes());
        let brace = out.len();
        let body = ChunkBody { choices, usage: ChunkUsage::of(usage, self.with_usage), prompt_token_ids };
        serde_json::to_writer(&mut *out, &body)?;
        // The body is an object of its own; here it goes on with one that is open.
        out[brace] = b',';
        Ok(())
    }
}

#[cfg(test)]
mod tests;
