//! A response body that pulls a generation and frames its news as server-sent events.
//!
//! Everything that is there when the connection can write goes out in one piece. No task and no queue stands between
//! the worker's stream and the socket: when the client stops reading, nothing here is polled, and when it leaves, the
//! body is dropped and with it the generation.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::answer::{ActiveRequest, Answer, outcome};
use crate::error::ApiError;
use crate::generate::{GenerateError, Generation, Progress};
use crate::telemetry::Outcome;

/// What a step of one choice takes, with room to spare.
const FRAME_BYTES: usize = 512;
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// See the module.
pub struct EventStream {
    generation: Option<Generation>,
    answer: Answer,
    request: ActiveRequest,
    buffer: Vec<u8>,
    /// Choices already hold a step that has not been written.
    holds_step: bool,
    last_write: Instant,
    keep_alive_interval: Duration,
    keep_alive: Pin<Box<Sleep>>,
}

impl EventStream {
    /// A stream of `generation`, whose first step has been taken already. With nothing to say for
    /// `keep_alive_interval` it says so, lest a proxy between take it for dead.
    #[must_use]
    pub fn new(generation: Generation, answer: Answer, request: ActiveRequest, keep_alive_interval: Duration) -> Self {
        let now = Instant::now();
        Self {
            generation: Some(generation),
            answer,
            request,
            buffer: Vec::with_capacity(FRAME_BYTES),
            holds_step: true,
            last_write: now,
            keep_alive_interval,
            keep_alive: Box::pin(tokio::time::sleep_until(now + keep_alive_interval)),
        }
    }

    fn write_step(&mut self) {
        self.holds_step = false;
        let Some(generation) = &mut self.generation else { return };
        self.answer.write_step(generation, &mut self.buffer);
        if generation.is_done() {
            self.answer.write_end(generation, &mut self.buffer);
            self.buffer.extend_from_slice(DONE);
            self.request.finish(outcome(generation));
            self.generation = None;
        }
    }

    /// An error after the headers have left: an event with the error object, then the end without `[DONE]`.
    fn write_error(&mut self, error: GenerateError) {
        self.generation = None;
        self.request.finish(match error {
            GenerateError::SlowClient => Outcome::Aborted,
            _ => Outcome::Failed,
        });
        write_event(&mut self.buffer, |out| {
            out.extend_from_slice(&ApiError::from(error).to_json());
            Ok(())
        });
    }

    fn poll_keep_alive(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // The timer is not moved at every write; it finds out when it fires.
        while self.keep_alive.as_mut().poll(context).is_ready() {
            let due = self.last_write + self.keep_alive_interval;
            let now = Instant::now();
            self.keep_alive.as_mut().reset(if due > now { due } else { now + self.keep_alive_interval });
            if due <= now {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}

impl HttpBody for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.holds_step {
            this.write_step();
        }
        while this.buffer.is_empty() {
            let Some(generation) = &mut this.generation else { return Poll::Ready(None) };
            match generation.poll_step(context) {
                Poll::Ready(Ok(Progress::Running | Progress::Done)) => this.write_step(),
                Poll::Ready(Err(error)) => this.write_error(error),
                Poll::Pending if this.poll_keep_alive(context).is_ready() => this.buffer.extend_from_slice(KEEP_ALIVE),
                Poll::Pending => return Poll::Pending,
            }
        }
        this.last_write = Instant::now();
        let bytes = std::mem::replace(&mut this.buffer, Vec::with_capacity(FRAME_BYTES));
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.generation.is_none() && self.buffer.is_empty()
    }
}

impl IntoResponse for EventStream {
    fn into_response(self) -> Response {
        let mut response = Body::new(self).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }
}

/// Writes one `data:` event; `write` gives one line of JSON.
pub fn write_event(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) {
    let start = out.len();
    out.extend_from_slice(b"data: ");
    // Memory grows as needed, so only a value that cannot be serialised fails; its event is left out.
    match write(out) {
        Ok(()) => out.extend_from_slice(b"\n\n"),
        Err(_) => out.truncate(start),
    }
}
