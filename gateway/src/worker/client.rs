//! Speaks `baleen.worker.v1` to one worker head: asks what it is, fetches its tokenizer, and holds the one stream that
//! carries every request. Conversion between the wire and the gateway's own types happens here and in `dispatch`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::dispatch::{BrokenStream, Table};
use super::mailbox::Mailbox;
use super::outbox::{Outbound, Outbox};
use super::wire::worker_client::WorkerClient;
use super::{Failure, PROTOCOL_VERSION, SILENCE_LIMIT, TokenizerFiles, WorkerInfo, wire};
use crate::openai::SamplingSpec;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;
/// No tokenizer comes near this; a worker that sends more is not one of ours.
const MAX_TOKENIZER_BYTES: usize = 256 * 1024 * 1024;

/// Why a worker cannot be used right now.
#[derive(Debug, Error)]
pub enum WorkerError {
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    #[error("it is still loading its model")]
    Loading,
    #[error("{0}")]
    Refused(String),
    #[error("its stream broke: {0}")]
    Broken(String),
    #[error(transparent)]
    Stream(#[from] BrokenStream),
    #[error("it sent nothing for {} s", SILENCE_LIMIT.as_secs())]
    Silent,
}

impl From<Status> for WorkerError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unavailable | Code::Cancelled | Code::Unknown => Self::Unreachable(describe(&status)),
            _ => Self::Refused(describe(&status)),
        }
    }
}

/// Who the gateway is to a worker: for its logs, and to tell one start of the gateway from the next.
#[derive(Clone, Debug)]
pub struct GatewayIdentity {
    pub id: String,
    pub epoch: u64,
}

/// Unary calls to one worker head.
#[derive(Clone, Debug)]
pub struct WorkerCalls {
    client: WorkerClient<Channel>,
}

impl WorkerCalls {
    /// Connects to `address`, a `host:port`.
    ///
    /// # Errors
    /// The address is malformed, or nothing answers there within two seconds.
    pub async fn connect(address: &str) -> Result<Self, WorkerError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| WorkerError::Refused(format!("{address} is not an address: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .initial_stream_window_size(8 * 1024 * 1024)
            .initial_connection_window_size(16 * 1024 * 1024);
        let channel = endpoint.connect().await.map_err(|error| WorkerError::Unreachable(with_causes(&error)))?;
        Ok(Self { client: WorkerClient::new(channel).max_decoding_message_size(MAX_FRAME_BYTES) })
    }

    /// Asks what the worker is.
    ///
    /// # Errors
    /// `Loading` before its model is loaded; `Refused` where it is not a worker this gateway can use.
    pub async fn info(&self) -> Result<WorkerInfo, WorkerError> {
        let mut client = self.client.clone();
        let call = tokio::time::timeout(CALL_TIMEOUT, client.get_info(wire::GetInfoRequest {}));
        match call.await.map_err(|_| WorkerError::Silent)? {
            Ok(response) => usable(response.into_inner()),
            Err(status) if status.code() == Code::Unavailable && std::error::Error::source(&status).is_none() => {
                Err(WorkerError::Loading)
            }
            Err(status) => Err(status.into()),
        }
    }

    /// Fetches the model's tokenizer files and checks them against `sha256`, the digest of tokenizer.json.
    ///
    /// # Errors
    /// The worker has none, sends more than 256 MiB, or sends other bytes than it announced.
    pub async fn tokenizer(&self, sha256: &str) -> Result<TokenizerFiles, WorkerError> {
        let mut client = self.client.clone();
        let mut chunks = client.get_tokenizer(wire::GetTokenizerRequest {}).await?.into_inner();
        let mut files = TokenizerFiles::default();
        let mut num_bytes = 0;
        while let Some(chunk) =
            tokio::time::timeout(CALL_TIMEOUT, chunks.message()).await.map_err(|_| WorkerError::Silent)??
        {
            num_bytes += chunk.data.len();
            if num_bytes > MAX_TOKENIZER_BYTES {
                return Err(WorkerError::Refused("its tokenizer files exceed 256 MiB".into()));
            }
            match chunk.file() {
                wire::TokenizerFile::Tokenizer => files.tokenizer.extend_from_slice(&chunk.data),
                wire::TokenizerFile::TokenizerConfig => {
                    files.tokenizer_config.get_or_insert_default().extend_from_slice(&chunk.data);
                }
                wire::TokenizerFile::ModelConfig => {
                    files.model_config.get_or_insert_default().extend_from_slice(&chunk.data);
                }
                wire::TokenizerFile::Unspecified => {}
            }
        }
        let digest = sha256_hex(&files.tokenizer);
        if digest != sha256 {
            return Err(WorkerError::Refused(format!(
                "its tokenizer.json has digest {digest}, not the announced {sha256}"
            )));
        }
        Ok(files)
    }

    /// Drops cached pages that no request uses; returns how many.
    ///
    /// # Errors
    /// Requests are running or waiting, or the worker is gone.
    pub async fn flush_cache(&self) -> Result<u32, Status> {
        let mut client = self.client.clone();
        let call = tokio::time::timeout(CALL_TIMEOUT, client.flush_cache(wire::FlushCacheRequest {}));
        let response = call.await.map_err(|_| Status::deadline_exceeded("the worker did not answer"))??;
        Ok(response.into_inner().freed_pages)
    }

    /// Opens the stream and waits for the worker's welcome.
    ///
    /// # Errors
    /// The worker does not welcome this gateway, or is no longer the one that `info` describes.
    pub async fn open(
        &self,
        identity: &GatewayIdentity,
        info: &WorkerInfo,
    ) -> Result<(Arc<Link>, Inbound), WorkerError> {
        let outbox = Arc::new(Outbox::default());
        let outbound = Outbound::new(outbox.clone(), identity.id.clone(), identity.epoch);
        let mut client = self.client.clone();
        let call = tokio::time::timeout(SILENCE_LIMIT, client.connect(outbound));
        let frames = call.await.map_err(|_| WorkerError::Silent)??.into_inner();
        let link = Arc::new(Link { outbox, table: Table::default(), load: Load::default(), calls: self.clone() });
        let mut inbound = Inbound { frames, sequence: 0, link: link.clone() };
        let frame = inbound.next_frame().await?;
        let Some(welcome) = frame.welcome else {
            return Err(WorkerError::Refused("its first frame carries no welcome".into()));
        };
        check_version(welcome.protocol_version)?;
        if welcome.boot_epoch != info.boot_epoch {
            return Err(WorkerError::Broken("it restarted while it was being connected".into()));
        }
        Ok((link, inbound))
    }
}

/// What a worker reported last about its queue and pages.
#[derive(Debug, Default)]
pub struct Load {
    pub running_requests: AtomicU32,
    pub waiting_requests: AtomicU32,
    pub used_pages: AtomicU32,
    pub total_pages: AtomicU32,
    pub waiting_prompt_tokens: AtomicU64,
    pub steps: AtomicU64,
}

impl Load {
    fn record(&self, report: &wire::LoadReport) {
        self.running_requests.store(report.running_requests, Ordering::Relaxed);
        self.waiting_requests.store(report.waiting_requests, Ordering::Relaxed);
        self.used_pages.store(report.used_pages, Ordering::Relaxed);
        self.total_pages.store(report.total_pages, Ordering::Relaxed);
        self.waiting_prompt_tokens.store(report.waiting_prompt_tokens, Ordering::Relaxed);
        self.steps.store(report.steps, Ordering::Relaxed);
    }
}

/// One continuation to be computed. All submissions of a client request go to one worker together.
#[derive(Clone, Debug)]
pub struct Submission {
    /// 128 random bits, minted by the gateway.
    pub request_id: u128,
    pub prompt_token_ids: Vec<u32>,
    pub sampling: SamplingSpec,
    pub sample: Sample,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: String,
}

/// Place of a continuation among the `n` of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// `request_id` of sample 0.
    pub group_id: u128,
    pub index: u32,
    pub size: u32,
}

/// A live stream. Every method is immediate; the stream's tasks do the waiting.
#[derive(Debug)]
pub struct Link {
    outbox: Arc<Outbox>,
    table: Table,
    pub load: Load,
    calls: WorkerCalls,
}

impl Link {
    /// Submits continuations; news of submission i arrives in `mailbox` as choice i.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn submit(
        self: &Arc<Self>,
        submissions: Vec<Submission>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Ticket>, Failure> {
        let num_choices = u32::try_from(submissions.len()).unwrap_or(u32::MAX);
        let keys = self.table.insert(mailbox, num_choices)?;
        let tickets = keys.iter().map(|&key| Ticket { link: self.clone(), key }).collect();
        self.outbox.submit(keys.into_iter().zip(submissions).map(|(key, submission)| submit_frame(key, submission)));
        Ok(tickets)
    }

    /// Requests in flight on this stream.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.table.len()
    }

    /// Unary calls to the same worker.
    #[must_use]
    pub fn calls(&self) -> &WorkerCalls {
        &self.calls
    }

    /// Ends the stream and every request on it.
    pub fn close(&self, failure: &Failure) {
        self.outbox.close();
        self.table.close(failure);
    }
}

/// Holds one continuation in the worker: dropping it aborts what has not ended.
#[derive(Debug)]
pub struct Ticket {
    link: Arc<Link>,
    key: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.link.table.remove(self.key) {
            self.link.outbox.abort(self.key);
        }
    }
}

/// The worker's half of the stream. Dropping it ends the gateway's half and every request on it as well.
#[derive(Debug)]
pub struct Inbound {
    frames: Streaming<wire::WorkerFrame>,
    sequence: u64,
    link: Arc<Link>,
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.link.close(&Failure::unavailable("The stream to the worker was given up. Send the request again."));
    }
}

impl Inbound {
    /// Delivers one frame. Returns true once the worker accepts no further submits.
    ///
    /// # Errors
    /// The stream is over, silent or corrupt, and must be closed.
    pub async fn deliver_next(&mut self) -> Result<bool, WorkerError> {
        let frame = self.next_frame().await?;
        if let Some(step) = &frame.step {
            for key in self.link.table.step(step)? {
                self.link.outbox.abort(key);
            }
        }
        for error in frame.errors {
            self.link.table.fail(error);
        }
        if let Some(report) = &frame.load {
            self.link.load.record(report);
        }
        Ok(frame.draining)
    }

    async fn next_frame(&mut self) -> Result<wire::WorkerFrame, WorkerError> {
        let message = tokio::time::timeout(SILENCE_LIMIT, self.frames.message());
        let frame = match message.await.map_err(|_| WorkerError::Silent)? {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(WorkerError::Broken("the worker closed it".into())),
            Err(status) => return Err(WorkerError::Broken(describe(&status))),
        };
        self.sequence += 1;
        if frame.sequence != self.sequence {
            return Err(BrokenStream::Gap { expected: self.sequence, received: frame.sequence }.into());
        }
        Ok(frame)
    }
}

/// Lower-case hex of the SHA-256 of `bytes`.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn usable(info: wire::GetInfoResponse) -> Result<WorkerInfo, WorkerError> {
    check_version(info.protocol_version)?;
    if !matches!(info.role(), wire::Role::Unified | wire::Role::Unspecified) {
        return Err(WorkerError::Refused(
            "it is one half of a disaggregated pair, which this gateway cannot front".into(),
        ));
    }
    let topology = info.topology.unwrap_or_default();
    if topology.dp_size > 1 || topology.num_nodes > 1 {
        return Err(WorkerError::Refused(format!(
            "it has {} data-parallel ranks on {} nodes; this gateway fronts one rank on one node",
            topology.dp_size, topology.num_nodes
        )));
    }
    Ok(WorkerInfo {
        boot_epoch: info.boot_epoch,
        model_id: info.model_id,
        model_type: info.model_type,
        config_digest: info.config_digest,
        tokenizer_sha256: info.tokenizer_sha256,
        page_size_tokens: info.page_size_tokens,
        capacity_pages: info.capacity_pages,
        context_length_tokens: info.context_length_tokens,
        vocab_size: info.vocab_size,
        max_running_requests: info.max_running_requests,
        version: info.worker_version,
        dtype: info.dtype,
        device: info.device,
        eos_token_ids: info.eos_token_ids,
        features: info.features,
    })
}

fn check_version(version: u32) -> Result<(), WorkerError> {
    if version == PROTOCOL_VERSION {
        return Ok(());
    }
    Err(WorkerError::Refused(format!(
        "it speaks version {version} of the worker contract and this gateway version {PROTOCOL_VERSION}: \
         install the same release of both"
    )))
}

fn submit_frame(key: u64, submission: Submission) -> wire::Submit {
    let Submission { request_id, prompt_token_ids, sampling, sample, priority, deadline_ms, cache_salt } = submission;
    let group = (sample.size > 1).then(|| wire::SampleGroup {
        group_id: sample.group_id.to_be_bytes().to_vec(),
        index: sample.index,
        size: sample.size,
    });
    wire::Submit {
        key,
        request_id: request_id.to_be_bytes().to_vec(),
        prompt_token_ids,
        sampling: Some(sampling_frame(sampling)),
        priority,
        deadline_ms,
        cache_salt,
        sample_group: group,
        ..Default::default()
    }
}

fn sampling_frame(sampling: SamplingSpec) -> wire::Sampling {
    let logit_bias = sampling.logit_bias.into_iter().map(|(token_id, bias)| wire::LogitBias { token_id, bias });
    wire::Sampling {
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        logit_bias: logit_bias.collect(),
        seed: sampling.seed,
        stop_token_ids: sampling.stop_token_ids,
        ignore_eos: sampling.ignore_eos,
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        thinking_budget: sampling.thinking_budget,
        logit_processors: Vec::new(),
    }
}

fn describe(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) if status.message().is_empty() => with_causes(source),
        _ if status.message().is_empty() => status.code().description().to_owned(),
        _ => status.message().to_owned(),
    }
}

/// An error and what caused it, on one line, without repetition.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}
