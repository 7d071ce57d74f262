//! The gateway's side of the worker contract: one stream to each worker head, and the pool of workers that are ready.
//!
//! Generated wire types stay in this folder; what leaves it are the plain types declared here.

use std::fmt;
use std::time::Duration;

pub mod breaker;
pub mod calls;
pub mod client;
pub mod codec;
pub mod dispatch;
pub mod error;
pub mod key;
pub mod mailbox;
pub mod outbox;
pub mod pool;
pub mod submit;
pub mod wire;

/// Version of `baleen.worker.v1` that this gateway speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// A stream that echoes no heartbeat for this long is taken for broken, whatever else it brings.
pub const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// A worker that has requests and computes no step for this long is taken for hung, however lively its head is.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);

/// Interval of the gateway's heartbeats on each stream.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Feature of workers that take up an answer which another one began (`resumed_token_ids`).
pub const RESUME: &str = "resume";

/// Feature of workers between which the way of pages can be tried (`ProbeTransfer`).
pub const PROBE_TRANSFER: &str = "probe_transfer";

/// Which part of a request a worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// All of it.
    #[default]
    Unified,
    /// The prompt and the first token.
    Prefill,
    /// Every token, after another worker has computed the prompt.
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unified => "unified",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Where a prefill worker's pages are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferEndpoint {
    /// "tcp", for example.
    pub backend: String,
    /// `host:port`
    pub address: String,
}

impl TransferEndpoint {
    /// The port of its address, where it has one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok())
    }
}

/// What a worker said about itself when it was reached.
#[derive(Clone, Debug)]
pub struct WorkerInfo {
    pub boot_epoch: u64,
    pub role: Role,
    /// Byte layout of its pages: two workers exchange pages only where it is equal.
    pub layout_id: String,
    pub transfer_endpoints: Vec<TransferEndpoint>,
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

    #[must_use]
    pub fn has_feature(&self, name: &str) -> bool {
        self.features.iter().any(|feature| feature == name)
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
    /// The worker takes no request; another one may.
    Unavailable,
    /// The worker is gone, and with it what it had computed.
    Lost,
    /// The worker is well, and the one that computed the prompt for it did not hand it over.
    PeerFailed,
    /// Workers die under this request.
    Poison,
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
    /// The worker is gone: another one may take the request over.
    #[must_use]
    pub fn lost(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Lost, field: None, message: message.into() }
    }

    /// One worker after the other died under the request.
    #[must_use]
    pub fn poison() -> Self {
        let message =
            "Two workers died while they computed this request, so it is not tried again: it may be the cause.";
        Self { kind: FailureKind::Poison, field: None, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
