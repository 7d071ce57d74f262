//! A server by OpenAI's API, as it stands behind routers that forward HTTP: chat completions, streamed and not.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::engine::{self, Command, EngineArgs, Output};
use crate::vocabulary::Vocabulary;

type Commands = mpsc::UnboundedSender<Command<mpsc::UnboundedSender<u32>>>;
type Reply = Response<BoxBody<Bytes, Infallible>>;

/// Serves every connection from one engine.
pub fn serve(listener: TcpListener, args: &EngineArgs) -> anyhow::Result<impl Future<Output = anyhow::Result<()>>> {
    let vocabulary = Arc::new(Vocabulary::read(&args.tokenizer)?);
    let (commands, inbox) = mpsc::unbounded_channel();
    tokio::spawn(engine::run(args.clone(), inbox, Mailboxes));
    Ok(async move {
        loop {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            let (commands, vocabulary) = (commands.clone(), vocabulary.clone());
            let service = service_fn(move |request| answer(request, commands.clone(), vocabulary.clone()));
            tokio::spawn(
                http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(socket), service),
            );
        }
    })
}

/// Each request's tokens go to its own mailbox, by their index.
struct Mailboxes;

impl Output for Mailboxes {
    type Job = mpsc::UnboundedSender<u32>;

    fn token(&mut self, mailbox: &Self::Job, index: u32, _is_last: bool) -> bool {
        mailbox.send(index).is_ok()
    }

    fn end_step(&mut self) {}
}

#[derive(Deserialize)]
struct ChatRequest {
    max_tokens: Option<u32>,
    /// Some routers send the limit on under its newer name.
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    stream: bool,
}

async fn answer(
    request: Request<Incoming>,
    commands: Commands,
    vocabulary: Arc<Vocabulary>,
) -> Result<Reply, Infallible> {
    if request.uri().path() != "/v1/chat/completions" {
        // What routers ask to learn whether and what a worker serves.
        let about = json!({
            "status": "ok", "model_path": "micro", "served_model_name": "micro", "model_id": "micro",
            "tokenizer_path": "micro", "object": "list", "data": [{"id": "micro", "object": "model", "owned_by": "mock"}],
        });
        return Ok(whole(StatusCode::OK, about.to_string()));
    }
    let Ok(body) = request.into_body().collect().await.map(http_body_util::Collected::to_bytes) else {
        return Ok(whole(StatusCode::BAD_REQUEST, String::new()));
    };
    let Ok(ChatRequest { max_tokens, max_completion_tokens, stream }) = serde_json::from_slice(&body) else {
        return Ok(whole(StatusCode::BAD_REQUEST, String::new()));
    };
    let max_tokens = max_tokens.or(max_completion_tokens).unwrap_or(1);
    let (mailbox, mut tokens) = mpsc::unbounded_channel();
    // The engine lives as long as the server.
    let _ = commands.send(Command::Start { job: mailbox, num_tokens: max_tokens });
    if stream {
        return Ok(events(tokens, max_tokens, vocabulary));
    }
    let mut text = String::new();
    while let Some(index) = tokens.recv().await {
        text.push_str(&vocabulary.at(index).1);
    }
    let usage = json!({"prompt_tokens": 100, "completion_tokens": max_tokens, "total_tokens": 100 + max_tokens});
    let message = json!({"role": "assistant", "content": text, "tool_calls": null});
    let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "length"});
    let object = json!({
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion", "created": 1_760_000_000,
        "model": "micro", "choices": [choice], "usage": usage,
    });
    Ok(whole(StatusCode::OK, object.to_string()))
}

fn whole(status: StatusCode, body: String) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from(body)).boxed());
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    reply
}

fn events(tokens: mpsc::UnboundedReceiver<u32>, num_tokens: u32, vocabulary: Arc<Vocabulary>) -> Reply {
    let frames = UnboundedReceiverStream::new(tokens).map(move |index| {
        let mut event = chunk(&json!({"content": vocabulary.at(index).1}), None);
        if index == 0 {
            event.insert_str(0, &chunk(&json!({"role": "assistant", "content": ""}), None));
        }
        if index + 1 == num_tokens {
            event.push_str(&chunk(&json!({}), Some("length")));
            event.push_str("data: [DONE]\n\n");
        }
        Ok::<_, Infallible>(Frame::data(Bytes::from(event)))
    });
    let mut reply = Response::new(BodyExt::boxed(StreamBody::new(frames.chain(stream::empty()))));
    reply.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/event-stream"));
    reply
}

fn chunk(delta: &serde_json::Value, finish_reason: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
    let object = json!({
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk",
        "created": 1_760_000_000, "model": "micro", "choices": [choice],
    });
    format!("data: {object}\n\n")
}
