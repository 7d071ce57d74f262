//! A worker by Baleen's contract: one frame a step with a row for each running request.

use std::collections::HashSet;
use std::sync::Arc;

use baleen_gateway::worker::calls::sha256_hex;
use baleen_gateway::worker::wire;
use baleen_gateway::worker::wire::worker_server::{Worker, WorkerServer};
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::engine::{self, Command, EngineArgs, Output};
use crate::vocabulary::{END_OF_SENTENCE, VOCAB_SIZE, Vocabulary};

const CONTEXT_LENGTH_TOKENS: u32 = 1 << 17;
const CHUNK_BYTES: usize = 256 << 10;

/// Serves one gateway after another, or several at once.
pub fn serve(listener: TcpListener, args: &EngineArgs) -> anyhow::Result<impl Future<Output = anyhow::Result<()>>> {
    let vocabulary = Arc::new(Vocabulary::read(&args.tokenizer)?);
    let service = WorkerServer::new(Service { args: args.clone(), vocabulary }).max_decoding_message_size(64 << 20);
    Ok(async move {
        let server = tonic::transport::Server::builder().add_service(service);
        // The builder's own switch is for listeners of its own.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Ok(server.serve_with_incoming(incoming).await?)
    })
}

struct Service {
    args: EngineArgs,
    vocabulary: Arc<Vocabulary>,
}

type Frames = mpsc::UnboundedSender<Result<wire::WorkerFrame, Status>>;

/// Rows of one stream's steps.
struct StreamOutput {
    vocabulary: Arc<Vocabulary>,
    step: wire::StepFrame,
    frames: Frames,
    sequence: u64,
}

impl StreamOutput {
    fn send(&mut self, frame: wire::WorkerFrame) {
        self.sequence += 1;
        // A gateway that is gone needs no frames.
        let _ = self.frames.send(Ok(wire::WorkerFrame { sequence: self.sequence, ..frame }));
    }
}

/// What the engine knows of: a request, or the gateway's heartbeat, which is answered in the order of frames.
enum Job {
    Request(u64),
    Heartbeat(wire::Heartbeat),
}

impl Output for StreamOutput {
    type Job = Job;

    fn token(&mut self, job: &Job, index: u32, is_last: bool) -> bool {
        let key = match job {
            Job::Request(key) => *key,
            Job::Heartbeat(heartbeat) => {
                let load = Some(wire::LoadReport { total_pages: 1 << 20, ..Default::default() });
                self.send(wire::WorkerFrame { heartbeat: Some(*heartbeat), load, ..Default::default() });
                return true;
            }
        };
        let reason = if is_last { wire::FinishReason::Length } else { wire::FinishReason::Unspecified };
        self.step.keys.push(key);
        self.step.token_counts.push(1);
        self.step.token_ids.push(self.vocabulary.at(index).0);
        self.step.finish_reasons.push(reason.into());
        self.step.cached_tokens.push(0);
        true
    }

    fn end_step(&mut self) {
        if self.step.keys.is_empty() {
            return;
        }
        let next = wire::StepFrame { step: self.step.step + 1, ..Default::default() };
        let step = std::mem::replace(&mut self.step, next);
        self.send(wire::WorkerFrame { step: Some(step), ..Default::default() });
    }
}

#[tonic::async_trait]
impl Worker for Service {
    type GetTokenizerStream = BoxStream<'static, Result<wire::TokenizerChunk, Status>>;
    type ConnectStream = BoxStream<'static, Result<wire::WorkerFrame, Status>>;

    async fn get_info(&self, _: Request<wire::GetInfoRequest>) -> Result<Response<wire::GetInfoResponse>, Status> {
        Ok(Response::new(wire::GetInfoResponse {
            protocol_version: 1,
            boot_epoch: 1,
            model_id: "micro".into(),
            config_digest: "mock".into(),
            model_type: "deepseek_v32".into(),
            role: wire::Role::Unified.into(),
            topology: Some(wire::ParallelTopology { tp_size: 1, dp_size: 1, num_nodes: 1, ..Default::default() }),
            page_size_tokens: 64,
            capacity_pages: 1 << 20,
            context_length_tokens: CONTEXT_LENGTH_TOKENS,
            vocab_size: VOCAB_SIZE,
            tokenizer_sha256: sha256_hex(&self.vocabulary.json),
            max_running_requests: u32::try_from(self.args.max_running).unwrap_or(u32::MAX),
            worker_version: "mock".into(),
            dtype: "float32".into(),
            device: "mock".into(),
            eos_token_ids: vec![END_OF_SENTENCE],
            ..Default::default()
        }))
    }

    async fn get_tokenizer(
        &self,
        _: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let file = wire::TokenizerFile::Tokenizer.into();
        let chunks: Vec<Vec<u8>> = self.vocabulary.json.chunks(CHUNK_BYTES).map(<[u8]>::to_vec).collect();
        let count = chunks.len();
        let chunks = chunks.into_iter().enumerate();
        let chunks = chunks.map(move |(index, data)| Ok(wire::TokenizerChunk { file, data, last: index + 1 == count }));
        Ok(Response::new(futures::stream::iter(chunks).boxed()))
    }

    async fn flush_cache(
        &self,
        _: Request<wire::FlushCacheRequest>,
    ) -> Result<Response<wire::FlushCacheResponse>, Status> {
        Ok(Response::new(wire::FlushCacheResponse { freed_pages: 0 }))
    }

    async fn probe_transfer(
        &self,
        _: Request<wire::ProbeTransferRequest>,
    ) -> Result<Response<wire::ProbeTransferResponse>, Status> {
        Err(Status::unimplemented("this worker transfers nothing"))
    }

    async fn connect(
        &self,
        request: Request<Streaming<wire::GatewayFrame>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (frames, outgoing) = mpsc::unbounded_channel();
        let (commands, inbox) = mpsc::unbounded_channel();
        let mut output =
            StreamOutput { vocabulary: self.vocabulary.clone(), step: wire::StepFrame::default(), frames, sequence: 0 };
        let welcome = Some(wire::Welcome { protocol_version: 1, boot_epoch: 1 });
        output.send(wire::WorkerFrame { welcome, ..Default::default() });
        tokio::spawn(engine::run(self.args.clone(), inbox, output));
        tokio::spawn(receive(request.into_inner(), commands));
        Ok(Response::new(UnboundedReceiverStream::new(outgoing).boxed()))
    }
}

/// Passes a gateway's frames on, until it goes.
async fn receive(mut frames: Streaming<wire::GatewayFrame>, commands: mpsc::UnboundedSender<Command<Job>>) {
    while let Ok(Some(frame)) = frames.message().await {
        let submits = frame.submits.into_iter().map(|submit| {
            let num_tokens = submit.sampling.and_then(|sampling| sampling.max_tokens).unwrap_or(1);
            Command::Start { job: Job::Request(submit.key), num_tokens }
        });
        let aborted: HashSet<u64> = frame.aborts.iter().map(|abort| abort.key).collect();
        let matches = move |job: &Job| matches!(job, Job::Request(key) if aborted.contains(key));
        let aborts = (!frame.aborts.is_empty()).then(|| Command::Abort(Box::new(matches)));
        let heartbeat =
            frame.heartbeat.map(|heartbeat| Command::Start { job: Job::Heartbeat(heartbeat), num_tokens: 1 });
        for command in submits.chain(aborts).chain(heartbeat) {
            if commands.send(command).is_err() {
                return;
            }
        }
    }
}
