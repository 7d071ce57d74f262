//! A gateway on a free port in front of given workers, and a client that talks to it.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baleen_gateway::app::App;
use baleen_gateway::cli::serve::Server;
use baleen_gateway::config::{Config, Limits, Source};
use baleen_gateway::text::tokenizer::Tokenizer;
use baleen_gateway::worker::pool::WorkerSpec;
use baleen_gateway::worker::{Role, wire};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::fake_worker::{Act, FakeWorker, micro_model, vocab_size};

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";
pub const MESSAGES: &str = "/v1/messages";

/// Bound of every wait in these tests; none of them is about speed.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Gateway {
    pub address: SocketAddr,
    pub app: Arc<App>,
    server: Server,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.body))
    }

    /// The error object of an answer that must be one.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        for field in ["message", "type", "param", "code"] {
            assert!(error.get(field).is_some(), "{field} is missing in {error}");
        }
        error
    }
}

/// The configuration of a gateway in front of `workers`.
pub fn config(workers: Vec<String>) -> Config {
    Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        limits: Limits {
            max_concurrent_requests: 64,
            queue_size: 0,
            queue_timeout: PATIENCE,
            max_request_time: PATIENCE * 10,
            max_body_bytes: 1 << 20,
        },
        source: Source::Remote(workers.into_iter().map(|address| WorkerSpec::at(address, Role::Unified)).collect()),
        names: Vec::new(),
        dns_server: None,
        dns_least_interval: Duration::from_millis(50),
        services: Vec::new(),
        kubeconfig: None,
        kubernetes_least_pause: Duration::from_millis(20),
        worker_key: None,
        workers_file: None,
        policies: baleen_gateway::route::policy::Policies::default(),
        served_model_name: None,
        tokenizer: None,
        style: baleen_gateway::chat::style::StyleChoice::default(),
        drain_timeout: Duration::from_secs(10),
        keep_alive_interval: PATIENCE,
        api_key_digest: None,
        api_key_file: None,
    }
}

/// The configuration of a gateway in front of pairs.
pub fn pairs(prefills: &[&FakeWorker], decodes: &[&FakeWorker]) -> Config {
    let of = |workers: &[&FakeWorker], role| -> Vec<WorkerSpec> {
        workers.iter().map(|worker| WorkerSpec::at(worker.address.to_string(), role)).collect()
    };
    let specs = [of(prefills, Role::Prefill), of(decodes, Role::Decode)].concat();
    Config { source: Source::Remote(specs), ..config(Vec::new()) }
}

impl Gateway {
    /// In front of `config`'s workers, all of which are ready.
    pub async fn start_whole(config: Config) -> Self {
        let num_workers = config.source.specs().len();
        let gateway = Self::start_unready(config).await;
        gateway.until("all workers are ready", |app| app.pool.ready().len() == num_workers).await;
        gateway
    }

    /// In front of one worker, and ready.
    pub async fn start(worker: &FakeWorker) -> Self {
        Self::start_with(worker, |_| {}).await
    }

    pub async fn start_with(worker: &FakeWorker, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = config(vec![worker.address.to_string()]);
        change(&mut config);
        let gateway = Self::start_unready(config).await;
        gateway.until("the gateway is ready", |app| !app.pool.ready().is_empty()).await;
        gateway
    }

    pub async fn start_unready(config: Config) -> Self {
        let listener = TcpListener::bind(config.listen).await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = App::new(config);
        let server = Server::start(app.clone(), listener);
        Self { address, app, server, client: Client::builder(TokioExecutor::new()).build_http() }
    }

    pub async fn until(&self, what: &str, condition: impl Fn(&App) -> bool) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !condition(&self.app) {
            assert!(tokio::time::Instant::now() < deadline, "still not so: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Every permit is back.
    pub async fn until_idle(&self) {
        self.until("no request is in progress", |app| app.admission.active() == 0).await;
    }

    pub async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        tokio::time::timeout(PATIENCE, self.client.request(request)).await.expect("an answer in time").unwrap()
    }

    pub fn request(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
        Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .header("content-type", "application/json")
            .body(Full::new(body.into()))
            .unwrap()
    }

    pub async fn collect(&self, request: Request<Full<Bytes>>) -> Reply {
        let response = self.send(request).await;
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("a whole answer in time").unwrap();
        Reply { status: parts.status, headers: parts.headers, body: body.to_bytes() }
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.collect(self.request(Method::GET, path, "")).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.collect(self.request(Method::POST, path, body.to_string())).await
    }

    /// The answer's JSON; it must be a success.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body).await;
        assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.body);
        reply.json()
    }

    /// Opens a stream.
    pub async fn stream(&self, path: &str, body: &Value) -> Events {
        let response = self.send(self.request(Method::POST, path, body.to_string())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        Events { body: response.into_body(), buffer: Vec::new(), comments: 0 }
    }

    /// Value of a sample of /metrics, labels summed up.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.body;
        let text = std::str::from_utf8(&text).unwrap().to_owned();
        let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        text.lines().filter(of_name).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    pub async fn drain(&self) {
        self.server.drain().await;
    }

    pub async fn stop(self) {
        self.server.stop().await;
    }
}

/// Server-sent events of a stream. Dropping it closes the connection.
pub struct Events {
    body: Incoming,
    buffer: Vec<u8>,
    pub comments: usize,
}

impl Events {
    /// Data of the next event; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).expect("events are UTF-8");
                if event.starts_with(':') {
                    self.comments += 1;
                    continue;
                }
                let (name, data) = match event.strip_prefix("event: ").and_then(|event| event.split_once('\n')) {
                    Some((name, data)) => (Some(name), data),
                    None => (None, event.as_str()),
                };
                let data = data.strip_prefix("data: ").expect("an event is data").trim_end().to_owned();
                if let Some(name) = name {
                    let typed: Value = serde_json::from_str(&data).expect("data is JSON");
                    assert_eq!(typed["type"], name, "the data repeats the event's name");
                }
                return Some(data);
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("an event in time");
            match frame {
                Some(Ok(frame)) => self.buffer.extend_from_slice(frame.data_ref().unwrap()),
                Some(Err(error)) => panic!("the stream broke: {error}"),
                None => {
                    assert!(self.buffer.is_empty(), "half an event at the end: {:?}", self.buffer);
                    return None;
                }
            }
        }
    }

    pub async fn next_json(&mut self) -> Value {
        let event = self.next().await.expect("an event");
        serde_json::from_str(&event).unwrap_or_else(|_| panic!("not JSON: {event}"))
    }

    /// Every event that is left; the last one tells whether the stream ended well.
    pub async fn rest(mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }

    /// Events of a stream that has no `[DONE]`.
    pub async fn typed(self) -> Vec<Value> {
        self.rest().await.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Chunks up to `[DONE]`, which must come.
    pub async fn chunks(self) -> Vec<Value> {
        let mut events = self.rest().await;
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{events:?}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Text of all deltas of a choice of a chat stream.
pub fn content(chunks: &[Value], index: u64) -> String {
    deltas(chunks, index).filter_map(|delta| delta["content"].as_str().map(str::to_owned)).collect()
}

pub fn deltas(chunks: &[Value], index: u64) -> impl Iterator<Item = Value> {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap().clone());
    choices
        .filter(move |choice| choice["index"] == index)
        .map(|choice| choice["delta"].clone())
        .collect::<Vec<_>>()
        .into_iter()
}

pub fn finish_reasons(chunks: &[Value]) -> Vec<String> {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap().clone());
    choices.filter_map(|choice| choice["finish_reason"].as_str().map(str::to_owned)).collect()
}

pub fn hello(more: &Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hello"}]}), more)
}

pub fn prompt(more: &Value) -> Value {
    with(json!({"prompt": "hello"}), more)
}

pub fn with(mut body: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The type of each event.
pub fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// Markup of a call of `get_weather`.
pub fn invoke(city: &str) -> String {
    format!(
        "<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">{city}</｜DSML｜parameter>\n\
         <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>"
    )
}

/// Markup of several calls.
pub fn block(invokes: &[String]) -> String {
    format!("\n\n<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>", invokes.join("\n"))
}

/// The built-in model's tokenizer.
pub fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let json = std::fs::read(micro_model().join("tokenizer.json")).unwrap();
        Tokenizer::from_json(&json, vocab_size()).unwrap()
    })
}

/// Token ids of a text.
pub fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode_raw(text).unwrap()
}

/// A script that says `text` one token a step and ends with the end-of-sequence token.
pub fn say(text: &str) -> Vec<Act> {
    let mut acts: Vec<Act> = ids(text).into_iter().map(|id| Act::Tokens(vec![id])).collect();
    acts.push(Act::Last(1, wire::FinishReason::Stop));
    acts
}

/// The same for a request that may have been begun elsewhere: the rest of `text` after the tokens that are out, slowly
/// enough to be caught in the middle.
pub fn say_slowly(text: &str, submit: &wire::Submit) -> Vec<Act> {
    let rest = ids(text).into_iter().skip(submit.resumed_token_ids.len());
    let mut acts: Vec<Act> =
        rest.flat_map(|id| [Act::Tokens(vec![id]), Act::Wait(Duration::from_millis(20))]).collect();
    acts.push(Act::Last(1, wire::FinishReason::Stop));
    acts
}

/// A script that never ends by itself: one token, a pause, one token, …
pub fn babble() -> Vec<Act> {
    let token = ids(" sea")[0];
    (0..2000).flat_map(|_| [Act::Tokens(vec![token]), Act::Wait(Duration::from_millis(5))]).collect()
}
