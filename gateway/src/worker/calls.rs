//! Unary calls to one worker head: what it is, its tokenizer, its cache.

use std::time::Duration;

use sha2::{Digest, Sha256};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::error::{WorkerError, describe, with_causes};
use super::key::{ShowKey, WorkerKey};
use super::outbox::Outbound;
use super::wire::worker_client::WorkerClient;
use super::{PROTOCOL_VERSION, Role, SILENCE_LIMIT, TokenizerFiles, TransferEndpoint, WorkerInfo, wire};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A worker gives up on its peer after its progress timer, 10 s unless it was told otherwise.
const PROBE_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;
/// No tokenizer comes near this; a worker that sends more is not one of ours.
const MAX_TOKENIZER_BYTES: usize = 256 * 1024 * 1024;

/// A connection to one worker head.
#[derive(Clone, Debug)]
pub struct WorkerCalls {
    client: WorkerClient<InterceptedService<Channel, ShowKey>>,
}

impl WorkerCalls {
    /// Connects to `address`, a `host:port`; every call shows `key`.
    ///
    /// # Errors
    /// The address is malformed, or nothing answers there within two seconds.
    pub async fn connect(address: &str, key: Option<WorkerKey>) -> Result<Self, WorkerError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| WorkerError::Refused(format!("{address} is not an address: {error}")))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .initial_stream_window_size(8 * 1024 * 1024)
            .initial_connection_window_size(16 * 1024 * 1024);
        let channel = endpoint.connect().await.map_err(|error| WorkerError::Unreachable(with_causes(&error)))?;
        let client = WorkerClient::with_interceptor(channel, ShowKey(key));
        Ok(Self { client: client.max_decoding_message_size(MAX_FRAME_BYTES) })
    }

    /// To a worker that nobody calls.
    #[cfg(test)]
    pub(super) fn unconnected() -> Self {
        let channel = Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        Self { client: WorkerClient::with_interceptor(channel, ShowKey(None)) }
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

    /// Has this worker, a decode worker, read a page of nobody from `peer`, whose life is `peer_boot_epoch`.
    ///
    /// # Errors
    /// One sentence: why no page came.
    pub async fn probe_transfer(&self, peer: &TransferEndpoint, peer_boot_epoch: u64) -> Result<(), String> {
        let mut client = self.client.clone();
        let peer = wire::TransferEndpoint { backend: peer.backend.clone(), address: peer.address.clone(), dp_rank: 0 };
        let request = wire::ProbeTransferRequest { peer: Some(peer), peer_boot_epoch };
        let call = tokio::time::timeout(PROBE_TIMEOUT, client.probe_transfer(request));
        let answer = call.await.map_err(|_| "the decode worker did not say whether one came".to_owned())?;
        let failure = answer.map_err(|status| describe(&status))?.into_inner().failure;
        if failure.is_empty() { Ok(()) } else { Err(failure) }
    }

    /// Opens the stream of frames both ways.
    ///
    /// # Errors
    /// The worker is gone or says nothing.
    pub(super) async fn stream(&self, outbound: Outbound) -> Result<Streaming<wire::WorkerFrame>, WorkerError> {
        let mut client = self.client.clone();
        let call = tokio::time::timeout(SILENCE_LIMIT, client.connect(outbound));
        Ok(call.await.map_err(|_| WorkerError::Silent)??.into_inner())
    }
}

/// Lower-case hex of the SHA-256 of `bytes`.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn usable(info: wire::GetInfoResponse) -> Result<WorkerInfo, WorkerError> {
    check_version(info.protocol_version)?;
    let role = Role::from(info.role());
    let topology = info.topology.unwrap_or_default();
    if topology.dp_size > 1 || topology.num_nodes > 1 {
        return Err(WorkerError::Refused(format!(
            "it has {} data-parallel ranks on {} nodes; this gateway fronts one rank on one node",
            topology.dp_size, topology.num_nodes
        )));
    }
    let endpoints = info.transfer_endpoints.into_iter();
    let endpoints =
        endpoints.map(|wire::TransferEndpoint { backend, address, .. }| TransferEndpoint { backend, address });
    Ok(WorkerInfo {
        boot_epoch: info.boot_epoch,
        role,
        layout_id: info.layout_id,
        transfer_endpoints: endpoints.collect(),
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

/// # Errors
/// The worker speaks another version of the contract.
pub(super) fn check_version(version: u32) -> Result<(), WorkerError> {
    if version == PROTOCOL_VERSION {
        return Ok(());
    }
    Err(WorkerError::Refused(format!(
        "it speaks version {version} of the worker contract and this gateway version {PROTOCOL_VERSION}: \
         install the same release of both"
    )))
}
