//! The gateway's side of the worker contract: one stream to each worker head, and the pool of workers that are ready.
//!
//! Generated wire types stay in this folder; what leaves it are the plain types declared here.

use std::fmt;
use std::time::Duration;

pub mod calls;
pub mod client;
pub mod codec;
pub mod dispatch;
pub mod mailbox;
pub mod outbox;
pub mod pool;
pub mod wire;

/// Version of `baleen.worker.v1` that this gateway speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// A stream that brings nothing for this long, not even an echoed heartbeat, is taken for broken.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Interval of the gateway's heartbeats on each stream.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// What a worker said about itself when it was reached.
#[derive(Clone, Debug)]
pub struct WorkerInfo {
    pub boot_epoch: u64,
    pub model_id: String,
    pub model_type: String,
    pub config_digest: String,
    pub tokenizer_sha256: String,
    pub page_size_tokens: u32,
    pub capacity_pages: u32,
    pub context_length_tokens: u32,
    pub vocab_size: u32,
    pub max_running_requests: u32,
    pub version: String,
    pub dtype: String,
    pub device: String,
    pub eos_token_ids: Vec<u32>,
    pub features: Vec<String>,
}

impl WorkerInfo {
    /// Tokens that all requests of this worker can hold together.
    #[must_use]
    pub fn capacity_tokens(&self) -> u64 {
        u64::from(self.capacity_pages) * u64::from(self.page_size_tokens)
    }
}

/// Files of a model that let a gateway speak its language.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    pub tokenizer: Vec<u8>,
    pub tokenizer_config: Option<Vec<u8>>,
    pub model_config: Option<Vec<u8>>,
}

/// Why a request failed, as far as the layers above need to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    InvalidArgument,
    Unimplemented,
    Internal,
    Unavailable,
    Overloaded,
    DeadlineExceeded,
}

/// A request that the worker, or the loss of the worker, ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    /// The field at fault, where there is one.
    pub field: Option<String>,
    /// One sentence: cause and mend.
    pub message: String,
}

impl Failure {
    /// The worker is gone, draining or not there: another attempt may succeed.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Unavailable, field: None, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
