//! A response body that pulls a generation and frames its news as server-sent events.
//!
//! Everything that is there when the connection can write goes out in one piece. No task and no queue stands between
//! the worker's stream and the socket: when the client stops reading, nothing here is polled, and when it leaves, the
//! body is dropped and with it the generation.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Frame;
use tokio::task::unconstrained;
use tokio::time::{Instant, Sleep};

use super::active::{ActiveRequest, outcome};
use super::answer::Answer;
use crate::error::ApiError;
use crate::generate::{GenerateError, Progress};
use crate::telemetry::Outcome;

/// What a step of one choice takes, with room to spare.
const FRAME_BYTES: usize = 512;

/// See the module.
pub struct EventStream {
    answer: Box<dyn Answer>,
    /// Its generation is gone once the last event is in the buffer.
    request: ActiveRequest,
    buffer: Vec<u8>,
    /// Choices already hold a step that has not been written.
    holds_step: bool,
    last_write: Instant,
    keep_alive_interval: Duration,
    deadline: Instant,
    /// Fires when a keep-alive may be due, and at the deadline.
    timer: Pin<Box<Sleep>>,
    /// Whom the timer will wake.
    timer_waker: Option<Waker>,
}

/// What the timer of a stream fired for.
enum Due {
    KeepAlive,
    Deadline,
}

impl EventStream {
    /// A stream of the generation of `request`, whose first step has been taken already. With nothing to say for
    /// `keep_alive_interval` it says so, lest a proxy between take it for dead; at `deadline` it ends with an error.
    #[must_use]
    pub fn new(
        answer: Box<dyn Answer>,
        request: ActiveRequest,
        keep_alive_interval: Duration,
        deadline: Instant,
    ) -> Self {
        let now = Instant::now();
        Self {
            answer,
            request,
            buffer: Vec::new(),
            holds_step: true,
            last_write: now,
            keep_alive_interval,
            deadline,
            timer: Box::pin(tokio::time::sleep_until(deadline.min(now + keep_alive_interval))),
            timer_waker: None,
        }
    }

    fn write_step(&mut self) {
        self.holds_step = false;
        let Some(generation) = &mut self.request.generation else { return };
        // Made when it is needed: thousands of streams wait for their next step with nothing to write.
        self.buffer.reserve(FRAME_BYTES);
        self.answer.write_step(generation, &mut self.buffer);
        if generation.is_done() {
            self.answer.write_end(generation, &mut self.buffer);
            let outcome = outcome(generation);
            self.request.finish(outcome);
        }
    }

    /// An error after the headers have left: an event that says so, then the end.
    fn write_error(&mut self, error: &ApiError, outcome: Outcome) {
        if let Some(generation) = &self.request.generation {
            self.answer.write_error(generation, error, &mut self.buffer);
        }
        self.request.finish(outcome);
    }

    fn poll_timer(&mut self, context: &mut Context<'_>) -> Poll<Due> {
        // Asked after every token: that the timer still runs, and for this task, is seen without polling it.
        let runs = !self.timer.is_elapsed();
        if runs && self.timer_waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            return Poll::Pending;
        }
        // The timer is not moved at every write; it finds out when it fires. Unconstrained, so that pending always
        // means that it will wake this task.
        while pin!(unconstrained(self.timer.as_mut())).poll(context).is_ready() {
            self.timer_waker = None;
            let due = self.last_write + self.keep_alive_interval;
            let now = Instant::now();
            if now >= self.deadline {
                return Poll::Ready(Due::Deadline);
            }
            let next = if due > now { due } else { now + self.keep_alive_interval };
            self.timer.as_mut().reset(next.min(self.deadline));
            if due <= now {
                return Poll::Ready(Due::KeepAlive);
            }
        }
        self.timer_waker = Some(context.waker().clone());
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
            let Some(generation) = &mut this.request.generation else { return Poll::Ready(None) };
            match generation.poll_step(context) {
                Poll::Ready(Ok(Progress::Running | Progress::Done)) => this.write_step(),
                Poll::Ready(Err(error)) => {
                    let is_clients = error == GenerateError::SlowClient;
                    let outcome = if is_clients { Outcome::Aborted } else { Outcome::Failed };
                    this.write_error(&error.into(), outcome);
                }
                Poll::Pending => match ready!(this.poll_timer(context)) {
                    Due::KeepAlive => this.buffer.extend_from_slice(this.answer.keep_alive()),
                    Due::Deadline => this.write_error(&ApiError::deadline_exceeded(), Outcome::Failed),
                },
            }
        }
        this.last_write = Instant::now();
        let bytes = std::mem::take(&mut this.buffer);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.request.generation.is_none() && self.buffer.is_empty()
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
