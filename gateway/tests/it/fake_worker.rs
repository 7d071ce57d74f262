//! A worker that serves the real contract on a free port and answers each request from a script.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baleen_gateway::worker::calls::sha256_hex;
use baleen_gateway::worker::wire;
use baleen_gateway::worker::wire::worker_server::{Worker, WorkerServer};
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status, Streaming};

pub const PAGE_SIZE_TOKENS: u32 = 64;
pub const CONTEXT_LENGTH_TOKENS: u32 = 4096;
/// Where the scripted prefill workers say that their pages are.
pub const PAGES: &str = "127.0.0.1:8998";
/// Everything that not every worker can.
const ABILITIES: [&str; 10] = [
    "prompt_logprobs",
    "penalties",
    "logit_bias",
    "min_tokens",
    "thinking_budget",
    "logit_processors",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
];

/// A token, its log-probability, and its alternatives with theirs.
pub type Score = (u32, f32, Vec<(u32, f32)>);

/// What the worker does for one request, in order.
#[derive(Clone, Debug)]
pub enum Act {
    /// One step frame with these tokens.
    Tokens(Vec<u32>),
    /// One step frame with these tokens and log-probabilities: each token's, then its alternatives'.
    Scored(Vec<Score>),
    /// One step frame with prompt scores.
    PromptScores(Vec<Score>),
    Finish(wire::FinishReason),
    /// The last token and the finish reason in one frame.
    Last(u32, wire::FinishReason),
    Fail(wire::ErrorCode, &'static str, &'static str),
    Wait(Duration),
    /// Says nothing about this request any more; the stream stays.
    Hang,
    /// Leaves out a frame number.
    Gap,
    /// A step frame whose columns do not fit.
    Malformed,
    /// Ends the stream.
    Close,
    /// Ends the stream as the end of the process would: who connects next finds another life.
    Die,
}

/// What the worker saw.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    Hello(wire::Hello),
    Submit(Box<wire::Submit>),
    Abort(u64),
    StreamEnded,
}

/// Why no page comes from a peer; nothing where one comes.
type Probe = Arc<dyn Fn(&wire::ProbeTransferRequest) -> String + Send + Sync>;

type Script = Arc<dyn Fn(&wire::Submit) -> Vec<Act> + Send + Sync>;

/// See the module. Dropping it kills the worker and every stream.
pub struct FakeWorker {
    pub address: SocketAddr,
    state: Arc<State>,
    seen: tokio::sync::Mutex<mpsc::UnboundedReceiver<Seen>>,
    kill: watch::Sender<bool>,
}

struct State {
    script: Mutex<Script>,
    info: Mutex<wire::GetInfoResponse>,
    loading: Mutex<bool>,
    tokenizer: Vec<u8>,
    seen: mpsc::UnboundedSender<Seen>,
    kill: watch::Receiver<bool>,
    flushed: AtomicU64,
    num_submits: AtomicU64,
    streams: Mutex<Vec<Arc<Outgoing>>>,
    probe: Mutex<Probe>,
    num_probes: AtomicU64,
    /// Whether trials of pages wait for their outcome.
    holds_probes: watch::Sender<bool>,
    /// What every call must show as `authorization`.
    shown_key: Mutex<Option<String>>,
    /// Whether frames of gateways are lost on their way.
    deaf: AtomicBool,
}

/// One stream's outgoing half.
struct Outgoing {
    frames: mpsc::UnboundedSender<Result<wire::WorkerFrame, Status>>,
    sequence: Mutex<u64>,
    running: Mutex<HashMap<u64, AbortHandle>>,
    closed: watch::Sender<bool>,
}

impl FakeWorker {
    /// A worker with the built-in model's tokenizer that answers every request with `script`.
    pub async fn start(script: impl Fn(&wire::Submit) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::start_on(listener, script).await
    }

    pub async fn start_on(
        listener: TcpListener,
        script: impl Fn(&wire::Submit) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let tokenizer = std::fs::read(micro_model().join("tokenizer.json")).unwrap();
        let (seen_sender, seen) = mpsc::unbounded_channel();
        let (kill, killed) = watch::channel(false);
        let state = Arc::new(State {
            script: Mutex::new(Arc::new(script)),
            info: Mutex::new(info(&tokenizer)),
            loading: Mutex::new(false),
            tokenizer,
            seen: seen_sender,
            kill: killed.clone(),
            flushed: AtomicU64::new(0),
            num_submits: AtomicU64::new(0),
            streams: Mutex::default(),
            probe: Mutex::new(Arc::new(|_| String::new())),
            num_probes: AtomicU64::new(0),
            holds_probes: watch::Sender::new(false),
            shown_key: Mutex::default(),
            deaf: AtomicBool::default(),
        });
        let service = WorkerServer::new(Service(state.clone())).max_decoding_message_size(64 << 20);
        let doorman = state.clone();
        let service = InterceptedService::new(service, move |request: Request<()>| doorman.admit(request));
        let mut killed_server = killed;
        tokio::spawn(async move {
            let serving = tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener));
            // Dropping the server closes its sockets, as the death of the process would.
            tokio::select! {
                ended = serving => ended.unwrap(),
                _ = killed_server.wait_for(|kill| *kill) => {}
            }
        });
        Self { address, state, seen: seen.into(), kill }
    }

    pub fn set_script(&self, script: impl Fn(&wire::Submit) -> Vec<Act> + Send + Sync + 'static) {
        *self.state.script.lock().unwrap() = Arc::new(script);
    }

    pub fn change_info(&self, change: impl FnOnce(&mut wire::GetInfoResponse)) {
        change(&mut self.state.info.lock().unwrap());
    }

    /// A worker of a pair, with the features that replays take.
    pub async fn start_as(
        role: wire::Role,
        script: impl Fn(&wire::Submit) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let worker = Self::start(script).await;
        worker.change_info(|info| {
            info.role = role.into();
            info.layout_id = "plain".into();
            info.features.push("resume".into());
            let endpoint = wire::TransferEndpoint { backend: "tcp".into(), address: PAGES.into(), dp_rank: 0 };
            info.transfer_endpoints = vec![endpoint];
        });
        worker
    }

    /// Lets pages be tried, as `probe` says.
    pub fn set_probe(&self, probe: impl Fn(&wire::ProbeTransferRequest) -> String + Send + Sync + 'static) {
        *self.state.probe.lock().unwrap() = Arc::new(probe);
        self.change_info(|info| info.features.push("probe_transfer".into()));
    }

    /// While held, a trial of pages gives neither success nor failure.
    pub fn hold_probes(&self, hold: bool) {
        self.state.holds_probes.send_replace(hold);
    }

    /// How often a page was tried.
    pub fn num_probes(&self) -> u64 {
        self.state.num_probes.load(Ordering::Relaxed)
    }

    /// Refuses every call that does not show this.
    pub fn set_shown_key(&self, shown: &str) {
        *self.state.shown_key.lock().unwrap() = Some(shown.to_owned());
    }

    /// Ends every stream; the worker can be connected again.
    pub fn cut(&self) {
        for stream in self.state.streams.lock().unwrap().drain(..) {
            stream.closed.send_replace(true);
        }
    }

    pub fn boot_epoch(&self) -> u64 {
        self.state.info.lock().unwrap().boot_epoch
    }

    pub fn set_loading(&self, loading: bool) {
        *self.state.loading.lock().unwrap() = loading;
    }

    /// Loses what gateways send on open streams, as a link does that is cut in one direction.
    pub fn set_deaf(&self, deaf: bool) {
        self.state.deaf.store(deaf, Ordering::Relaxed);
    }

    /// Sends a frame on every open stream.
    pub fn broadcast(&self, frame: &wire::WorkerFrame) {
        for stream in self.state.streams.lock().unwrap().iter() {
            stream.send(frame.clone());
        }
    }

    /// Ends every stream and refuses new connections.
    pub fn kill(&self) {
        self.kill.send_replace(true);
        self.cut();
    }

    pub async fn next_submit(&self) -> wire::Submit {
        match self.next_matching(|seen| matches!(seen, Seen::Submit(_))).await {
            Seen::Submit(submit) => *submit,
            other => panic!("expected a submit, saw {other:?}"),
        }
    }

    pub async fn next_abort(&self) -> u64 {
        match self.next_matching(|seen| matches!(seen, Seen::Abort(_))).await {
            Seen::Abort(key) => key,
            other => panic!("expected an abort, saw {other:?}"),
        }
    }

    pub async fn next_matching(&self, wanted: impl Fn(&Seen) -> bool) -> Seen {
        let mut seen = self.seen.lock().await;
        let next = async {
            loop {
                let seen = seen.recv().await.expect("the worker lives");
                if wanted(&seen) {
                    return seen;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), next).await.expect("the worker saw it in time")
    }

    /// Submits that ever came.
    pub fn num_submits(&self) -> usize {
        self.state.num_submits.load(Ordering::Relaxed).try_into().unwrap()
    }

    /// Keys whose script still runs.
    pub fn num_running(&self) -> usize {
        self.state.streams.lock().unwrap().iter().map(|stream| stream.running.lock().unwrap().len()).sum()
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The checkpoint that comes with the project.
pub fn micro_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/micro")
}

/// Number of embedding rows of the built-in model.
pub fn vocab_size() -> u32 {
    let config = std::fs::read(micro_model().join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["vocab_size"].as_u64().unwrap().try_into().unwrap()
}

fn info(tokenizer: &[u8]) -> wire::GetInfoResponse {
    wire::GetInfoResponse {
        protocol_version: 1,
        boot_epoch: rand::random(),
        model_id: "micro".into(),
        config_digest: "c0ffee".into(),
        model_type: "deepseek_v32".into(),
        role: wire::Role::Unified.into(),
        topology: Some(wire::ParallelTopology { tp_size: 1, dp_size: 1, num_nodes: 1, ..Default::default() }),
        page_size_tokens: PAGE_SIZE_TOKENS,
        capacity_pages: 1000,
        context_length_tokens: CONTEXT_LENGTH_TOKENS,
        vocab_size: vocab_size(),
        tokenizer_sha256: sha256_hex(tokenizer),
        max_running_requests: 64,
        worker_version: "test".into(),
        dtype: "float32".into(),
        device: "cpu".into(),
        eos_token_ids: vec![1],
        features: ABILITIES.map(str::to_owned).to_vec(),
        ..Default::default()
    }
}

impl State {
    /// As the worker's own check: every method, before anything of the call is read.
    fn admit(&self, request: Request<()>) -> Result<Request<()>, Status> {
        let shown = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        match &*self.shown_key.lock().unwrap() {
            Some(expected) if shown != Some(expected) => Err(Status::unauthenticated("it wants the key")),
            _ => Ok(request),
        }
    }
}

struct Service(Arc<State>);

#[tonic::async_trait]
impl Worker for Service {
    type GetTokenizerStream = BoxStream<'static, Result<wire::TokenizerChunk, Status>>;
    type ConnectStream = BoxStream<'static, Result<wire::WorkerFrame, Status>>;

    async fn get_info(&self, _: Request<wire::GetInfoRequest>) -> Result<Response<wire::GetInfoResponse>, Status> {
        if *self.0.loading.lock().unwrap() {
            return Err(Status::unavailable("the model is being loaded"));
        }
        Ok(Response::new(self.0.info.lock().unwrap().clone()))
    }

    async fn get_tokenizer(
        &self,
        _: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let file = wire::TokenizerFile::Tokenizer.into();
        let chunks: Vec<_> = self.0.tokenizer.chunks(256 << 10).map(<[u8]>::to_vec).collect();
        let count = chunks.len();
        let chunks = chunks.into_iter().enumerate();
        let chunks = chunks.map(move |(index, data)| Ok(wire::TokenizerChunk { file, data, last: index + 1 == count }));
        Ok(Response::new(futures::stream::iter(chunks.collect::<Vec<_>>()).boxed()))
    }

    async fn flush_cache(
        &self,
        _: Request<wire::FlushCacheRequest>,
    ) -> Result<Response<wire::FlushCacheResponse>, Status> {
        if self.0.streams.lock().unwrap().iter().any(|stream| !stream.running.lock().unwrap().is_empty()) {
            return Err(Status::failed_precondition("requests are running"));
        }
        self.0.flushed.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(wire::FlushCacheResponse { freed_pages: 5 }))
    }

    async fn probe_transfer(
        &self,
        request: Request<wire::ProbeTransferRequest>,
    ) -> Result<Response<wire::ProbeTransferResponse>, Status> {
        self.0.num_probes.fetch_add(1, Ordering::Relaxed);
        // Its sender is this worker's own.
        let _ = self.0.holds_probes.subscribe().wait_for(|holds| !holds).await;
        let probe = self.0.probe.lock().unwrap().clone();
        let failure = probe(request.get_ref());
        Ok(Response::new(wire::ProbeTransferResponse { duration_us: 1, failure }))
    }

    async fn connect(
        &self,
        request: Request<Streaming<wire::GatewayFrame>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (frames, outgoing) = mpsc::unbounded_channel();
        let (closed, mut is_closed) = watch::channel(false);
        let stream =
            Arc::new(Outgoing { frames, sequence: Mutex::new(0), running: Mutex::default(), closed: closed.clone() });
        self.0.streams.lock().unwrap().push(stream.clone());
        let boot_epoch = self.0.info.lock().unwrap().boot_epoch;
        let welcome = wire::Welcome { protocol_version: 1, boot_epoch };
        stream.send(wire::WorkerFrame { welcome: Some(welcome), ..Default::default() });
        let mut inbound = request.into_inner();
        let state = self.0.clone();
        let mut killed = state.kill.clone();
        tokio::spawn(async move {
            let mut expected = 1;
            loop {
                let frame = tokio::select! {
                    frame = inbound.message() => frame,
                    _ = killed.wait_for(|kill| *kill) => break,
                };
                let Ok(Some(frame)) = frame else { break };
                assert_eq!(frame.sequence, expected, "the gateway's frames are numbered without gaps");
                expected += 1;
                if state.deaf.load(Ordering::Relaxed) {
                    continue;
                }
                receive(&state, &stream, frame);
            }
            closed.send_replace(true);
            for (_, script) in stream.running.lock().unwrap().drain() {
                script.abort();
            }
            // The test may be over.
            let _ = state.seen.send(Seen::StreamEnded);
        });
        let end = async move {
            let _ = is_closed.wait_for(|closed| *closed).await;
        };
        Ok(Response::new(UnboundedReceiverStream::new(outgoing).take_until(Box::pin(end)).boxed()))
    }
}

fn receive(state: &Arc<State>, stream: &Arc<Outgoing>, frame: wire::GatewayFrame) {
    let see = |seen| {
        let _ = state.seen.send(seen);
    };
    if let Some(hello) = frame.hello {
        see(Seen::Hello(hello));
    }
    for submit in frame.submits {
        let acts = state.script.lock().unwrap().clone()(&submit);
        let key = submit.key;
        state.num_submits.fetch_add(1, Ordering::Relaxed);
        see(Seen::Submit(Box::new(submit)));
        let (playing, script) = (stream.clone(), acts);
        let life = state.clone();
        let task = tokio::spawn(async move {
            let dies = matches!(script.last(), Some(Act::Die));
            playing.play(key, script).await;
            if dies {
                life.info.lock().unwrap().boot_epoch = rand::random();
                playing.closed.send_replace(true);
            }
        });
        stream.running.lock().unwrap().insert(key, task.abort_handle());
        let (stream, done) = (stream.clone(), task);
        tokio::spawn(async move {
            let _ = done.await;
            stream.running.lock().unwrap().remove(&key);
        });
    }
    for abort in frame.aborts {
        if let Some(script) = stream.running.lock().unwrap().remove(&abort.key) {
            script.abort();
        }
        see(Seen::Abort(abort.key));
    }
    if let Some(heartbeat) = frame.heartbeat {
        let running = u32::try_from(stream.running.lock().unwrap().len()).unwrap();
        let load = wire::LoadReport { running_requests: running, total_pages: 1000, ..Default::default() };
        stream.send(wire::WorkerFrame { heartbeat: Some(heartbeat), load: Some(load), ..Default::default() });
    }
}

impl Outgoing {
    fn send(&self, mut frame: wire::WorkerFrame) {
        let mut sequence = self.sequence.lock().unwrap();
        *sequence += 1;
        frame.sequence = *sequence;
        let _ = self.frames.send(Ok(frame));
    }

    async fn play(&self, key: u64, script: Vec<Act>) {
        for act in script {
            match act {
                Act::Tokens(token_ids) => self.step(key, &token_ids, None, wire::FinishReason::Unspecified),
                Act::Last(token_id, reason) => self.step(key, &[token_id], None, reason),
                Act::Scored(scores) => {
                    let ids: Vec<u32> = scores.iter().map(|score| score.0).collect();
                    self.step(key, &ids, Some((false, scores)), wire::FinishReason::Unspecified);
                }
                Act::PromptScores(scores) => {
                    self.step(key, &[], Some((true, scores)), wire::FinishReason::Unspecified);
                }
                Act::Finish(reason) => self.step(key, &[], None, reason),
                Act::Fail(code, field, message) => {
                    let error =
                        wire::RequestError { key, code: code.into(), field: field.into(), message: message.into() };
                    self.send(wire::WorkerFrame { errors: vec![error], ..Default::default() });
                }
                Act::Wait(pause) => tokio::time::sleep(pause).await,
                Act::Hang => std::future::pending().await,
                Act::Gap => *self.sequence.lock().unwrap() += 1,
                Act::Malformed => {
                    let step = wire::StepFrame { keys: vec![key], token_counts: vec![3], ..Default::default() };
                    self.send(wire::WorkerFrame { step: Some(step), ..Default::default() });
                }
                Act::Close => {
                    self.closed.send_replace(true);
                }
                // The last act; whoever plays it changes the life first.
                Act::Die => {}
            }
        }
    }

    fn step(&self, key: u64, token_ids: &[u32], scores: Option<(bool, Vec<Score>)>, reason: wire::FinishReason) {
        let mut step = wire::StepFrame {
            step: 1,
            keys: vec![key],
            token_counts: vec![u32::try_from(token_ids.len()).unwrap()],
            token_ids: token_ids.to_vec(),
            finish_reasons: vec![reason.into()],
            cached_tokens: vec![0],
            ..Default::default()
        };
        if let Some((of_prompt, scores)) = scores {
            let mut columns = wire::LogprobColumns {
                rows: vec![0],
                counts: vec![u32::try_from(scores.len()).unwrap()],
                ..Default::default()
            };
            for (token_id, logprob, top) in scores {
                columns.token_ids.push(token_id);
                columns.logprobs.push(logprob);
                columns.top_counts.push(u32::try_from(top.len()).unwrap());
                columns.top_token_ids.extend(top.iter().map(|entry| entry.0));
                columns.top_logprobs.extend(top.iter().map(|entry| entry.1));
            }
            if of_prompt {
                step.prompt_logprobs = Some(columns);
            } else {
                step.logprobs = Some(columns);
            }
        }
        self.send(wire::WorkerFrame { step: Some(step), ..Default::default() });
    }
}
