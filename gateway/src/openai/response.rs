//! Parts that the answers of all endpoints share.

use std::fmt::Write as _;

use serde::Serialize;
use sha2::{Digest, Sha256};

/// What every object of one answer repeats.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// "chatcmpl-…" or "cmpl-…".
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The served name.
    pub model: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    ToolCalls,
    /// An operator ended the request.
    Abort,
}

/// What ended a choice with [`FinishReason::Stop`], besides the model's own end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason<'a> {
    /// The stop string that was found.
    Text(&'a str),
    /// The id of `stop_token_ids` that was generated.
    TokenId(u32),
}

/// Tokens of one answer, over all of its choices; a prompt counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens that came from a cache.
    pub cached_tokens: u32,
    pub completion_tokens: u32,
    /// Completion tokens that were reasoning.
    pub reasoning_tokens: u32,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

/// OpenAI's fields, then DeepSeek's.
#[derive(Serialize)]
struct UsageObject {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
    prompt_cache_hit_tokens: u32,
    prompt_cache_miss_tokens: u32,
}

impl Serialize for Usage {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let object = UsageObject {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: u64::from(self.prompt_tokens) + u64::from(self.completion_tokens),
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached_tokens },
            completion_tokens_details: CompletionDetails { reasoning_tokens: self.reasoning_tokens },
            prompt_cache_hit_tokens: self.cached_tokens,
            prompt_cache_miss_tokens: self.prompt_tokens.saturating_sub(self.cached_tokens),
        };
        object.serialize(serializer)
    }
}

/// The usage field of a chunk: present, null, or left out when the client did not ask for usage.
#[derive(Debug, Clone, Copy)]
pub(super) enum ChunkUsage<'a> {
    Absent,
    Null,
    Value(&'a Usage),
}

impl ChunkUsage<'_> {
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl<'a> ChunkUsage<'a> {
    /// `asked`: whether this stream carries usage at all.
    pub(super) fn of(usage: Option<&'a Usage>, asked: bool) -> Self {
        match usage {
            Some(usage) => Self::Value(usage),
            None if asked => Self::Null,
            None => Self::Absent,
        }
    }
}

impl Serialize for ChunkUsage<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Value(usage) => usage.serialize(serializer),
            Self::Absent | Self::Null => serializer.serialize_none(),
        }
    }
}

/// The id of a part of an answer, `prefix_` and 24 hex digits: the same in every form of the answer, and no other
/// part's with this prefix.
pub fn item_id(prefix: &str, request_id: u128, choice: u32, index: u32) -> String {
    let mut digest = Sha256::new();
    digest.update(request_id.to_be_bytes());
    digest.update(choice.to_be_bytes());
    digest.update(index.to_be_bytes());
    let digest = digest.finalize();
    let mut id = format!("{prefix}_");
    for byte in &digest[..12] {
        let _ = write!(id, "{byte:02x}");
    }
    id
}
