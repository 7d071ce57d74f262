//! The part of Kubernetes' API server that a gateway asks: endpoint slices of one namespace, listed and watched over
//! HTTP/1.1 in chunks, with a history that can be lost.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices";
pub const SERVICE: &str = "workers";

type Body = BoxBody<Bytes, std::io::Error>;
type Chunk = Result<Frame<Bytes>, std::io::Error>;

/// What the server has and how it answers.
#[derive(Default)]
pub struct Cluster {
    slices: BTreeMap<String, Value>,
    version: u64,
    /// Version and event of everything since `oldest`.
    history: Vec<(u64, Value)>,
    oldest: u64,
    watchers: Vec<UnboundedSender<Chunk>>,
    /// Status of every answer to this verb, in place of the answer.
    pub refusal: Option<(&'static str, StatusCode)>,
    /// The only token that is let in.
    pub token: Option<String>,
    /// A watch from before the history is refused by an event, or by a status.
    pub tells_gone_by_status: bool,
    pub num_lists: usize,
    /// The versions that watches were asked from.
    pub watched_from: Vec<u64>,
    pub num_refused: usize,
}

pub struct ApiServer {
    pub address: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
    serving: Option<JoinHandle<()>>,
    folder: TempDir,
}

impl ApiServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cluster = Arc::new(Mutex::new(Cluster { version: 1, ..Cluster::default() }));
        let folder = tempfile::tempdir().unwrap();
        let server = Self { address, serving: Some(serve(listener, cluster.clone())), cluster, folder };
        server.write_token("first");
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "test", "user": {"tokenFile": server.folder.path().join("token")}}],
        });
        std::fs::write(server.kubeconfig(), kubeconfig.to_string()).unwrap();
        server
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub fn write_token(&self, token: &str) {
        std::fs::write(self.folder.path().join("token"), token).unwrap();
    }

    pub fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().unwrap()
    }

    /// Closes every connection and the port.
    pub async fn go_away(&mut self) {
        let serving = self.serving.take().unwrap();
        serving.abort();
        _ = serving.await;
        self.cluster().watchers.clear();
    }

    pub async fn come_back(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.serving = Some(serve(listener, self.cluster.clone()));
    }
}

/// Accepts until it is aborted, which ends the connections too.
fn serve(listener: TcpListener, cluster: Arc<Mutex<Cluster>>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let cluster = cluster.clone();
            let answer = service_fn(move |request| {
                let answer = cluster.lock().unwrap().answer(&request);
                async { Ok::<_, Infallible>(answer) }
            });
            let http = hyper::server::conn::http1::Builder::new();
            connections.spawn(http.serve_connection(TokioIo::new(socket), answer));
        }
    })
}

impl Cluster {
    /// Adds or changes a slice and tells whoever watches.
    pub fn put(&mut self, name: &str, endpoints: &Value) {
        self.put_with_ports(name, &json!([{"name": "", "port": 1, "protocol": "TCP"}]), endpoints);
    }

    pub fn put_with_ports(&mut self, name: &str, ports: &Value, endpoints: &Value) {
        self.version += 1;
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": name, "namespace": "llm", "resourceVersion": self.version.to_string(),
                "labels": {"kubernetes.io/service-name": SERVICE},
            },
            "ports": ports, "endpoints": endpoints,
        });
        let kind = if self.slices.insert(name.to_owned(), slice.clone()).is_none() { "ADDED" } else { "MODIFIED" };
        self.tell(&json!({"type": kind, "object": slice}));
    }

    pub fn remove(&mut self, name: &str) {
        self.version += 1;
        let mut slice = self.slices.remove(name).unwrap();
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.tell(&json!({"type": "DELETED", "object": slice}));
    }

    /// The version moves on though nothing of this Service has changed.
    pub fn bookmark(&mut self) {
        self.version += 10;
        let object = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"resourceVersion": self.version.to_string()},
        });
        self.tell(&json!({"type": "BOOKMARK", "object": object}));
    }

    fn tell(&mut self, event: &Value) {
        self.history.push((self.version, event.clone()));
        self.say(&format!("{event}\n"));
    }

    /// Sends these bytes to whoever watches.
    pub fn say(&mut self, text: &str) {
        let chunk = || Ok(Frame::data(Bytes::from(text.to_owned())));
        self.watchers.retain(|watcher| watcher.unbounded_send(chunk()).is_ok());
    }

    /// Ends every watch, as after its time.
    pub fn end_watches(&mut self) {
        self.watchers.clear();
    }

    /// Breaks every watch off in the middle of a line.
    pub fn cut_watches(&mut self) {
        self.say("{\"type\":\"MODI");
        for watcher in self.watchers.drain(..) {
            _ = watcher.unbounded_send(Err(std::io::Error::other("cut")));
        }
    }

    pub fn num_watchers(&mut self) -> usize {
        self.watchers.retain(|watcher| !watcher.is_closed());
        self.watchers.len()
    }

    /// Watches from before now are refused.
    pub fn forget_history(&mut self) {
        self.history.clear();
        self.version += 10;
        self.oldest = self.version;
    }

    fn answer(&mut self, request: &Request<Incoming>) -> Response<Body> {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.contains("watch=true");
        let shown = request.headers().get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
        if self.token.as_ref().is_some_and(|token| shown != format!("Bearer {token}")) {
            return self.refuse(StatusCode::UNAUTHORIZED);
        }
        if request.uri().path() != PATH || !query.contains("labelSelector=kubernetes.io%2Fservice-name%3Dworkers") {
            return self.refuse(StatusCode::NOT_FOUND);
        }
        let verb = if is_watch { "watch" } else { "list" };
        if let Some((_, status)) = self.refusal.filter(|(refused, _)| *refused == verb) {
            return self.refuse(status);
        }
        if !is_watch {
            self.num_lists += 1;
            let items: Vec<&Value> = self.slices.values().collect();
            let list = json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList",
                "metadata": {"resourceVersion": self.version.to_string()}, "items": items,
            });
            return whole(StatusCode::OK, &list);
        }
        assert!(query.contains("allowWatchBookmarks=true"), "{query}");
        let version = query.split('&').find_map(|word| word.strip_prefix("resourceVersion=")).unwrap();
        self.watch_from(version.parse().unwrap())
    }

    fn watch_from(&mut self, version: u64) -> Response<Body> {
        self.watched_from.push(version);
        let (sender, receiver) = unbounded();
        if version < self.oldest {
            if self.tells_gone_by_status {
                return self.refuse(StatusCode::GONE);
            }
            let event = json!({"type": "ERROR", "object": status(StatusCode::GONE)});
            sender.unbounded_send(Ok(Frame::data(Bytes::from(format!("{event}\n"))))).unwrap();
            return streamed(receiver);
        }
        for (_, event) in self.history.iter().filter(|(at, _)| *at > version) {
            sender.unbounded_send(Ok(Frame::data(Bytes::from(format!("{event}\n"))))).unwrap();
        }
        self.watchers.push(sender);
        streamed(receiver)
    }

    fn refuse(&mut self, code: StatusCode) -> Response<Body> {
        self.num_refused += 1;
        whole(code, &status(code))
    }
}

fn status(code: StatusCode) -> Value {
    let message = format!("the test server says {code}");
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code.as_u16(), "message": message})
}

fn whole(code: StatusCode, body: &Value) -> Response<Body> {
    let body = Full::from(body.to_string()).map_err(|never| match never {}).boxed();
    Response::builder().status(code).header("content-type", "application/json").body(body).unwrap()
}

fn streamed(chunks: UnboundedReceiver<Chunk>) -> Response<Body> {
    // The headers go out at once, not with the first event.
    let chunks = stream::iter([Ok(Frame::data(Bytes::new()))]).chain(chunks);
    Response::builder()
        .header("content-type", "application/json")
        .body(BodyExt::boxed(StreamBody::new(chunks)))
        .unwrap()
}
