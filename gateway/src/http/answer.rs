//! What all endpoints do alike that answer a body: admit, read, prepare, start, and answer in one piece or as a stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use serde::Serialize;
use tokio::time::timeout_at;

use super::chat::ChatAnswer;
use super::completions::CompletionAnswer;
use super::entry::{caller_of, read_body};
use super::messages::{MessagesAnswer, PING};
use super::responses::ResponsesAnswer;
use super::session;
use super::sse::{EventStream, write_event};
use crate::admission::Admitted;
use crate::admission::keyring::Caller;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generate::{Choice, Finish, GenerateError, GenerateSpec, Generation, Progress};
use crate::openai::response::{FinishReason, StopReason};
use crate::openai::{InvalidRequest, StreamSpec};
use crate::telemetry::{EndpointName, Metrics, Outcome};

/// Bodies above this are parsed and tokenized on a thread for long texts; shorter ones take less time than a change of
/// threads.
const LARGE_BODY_BYTES: usize = 32 * 1024;

/// How long a stream's headers wait for its first news, so that a refusal by the worker still gets its status.
const FIRST_NEWS_PATIENCE: Duration = Duration::from_secs(1);

/// A validated request, ready to be generated, and how it is to be answered.
pub struct Prepared {
    pub spec: GenerateSpec,
    /// Absent: one answer, not streamed.
    pub stream: Option<StreamSpec>,
    pub answer: Answer,
}

/// What becomes of a body of one endpoint.
pub type Work<T> = fn(&Arc<Model>, &[u8]) -> Result<T, InvalidRequest>;

/// How an answer is written. It holds what differs between the endpoints.
pub enum Answer {
    Chat(ChatAnswer),
    Completion(CompletionAnswer),
    Responses(ResponsesAnswer),
    Messages(MessagesAnswer),
}

impl Answer {
    /// Appends the events that the last step brought.
    pub fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>) {
        match self {
            Self::Chat(answer) => answer.write_step(generation, out),
            Self::Completion(answer) => answer.write_step(generation, out),
            Self::Responses(answer) => answer.write_step(generation, out),
            Self::Messages(answer) => answer.write_step(generation, out),
        }
    }

    /// Appends what follows the last choice's end: usage, where asked for, and the mark that the stream is whole.
    pub fn write_end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        match self {
            Self::Chat(answer) => answer.write_end(generation, out),
            Self::Completion(answer) => answer.write_end(generation, out),
            Self::Responses(answer) => answer.write_end(generation, out),
            Self::Messages(answer) => answer.write_end(generation, out),
        }
    }

    /// Appends the event of an error after the headers have left; nothing follows it.
    pub fn write_error(&mut self, generation: &Generation, error: &ApiError, out: &mut Vec<u8>) {
        match self {
            Self::Chat(_) | Self::Completion(_) => write_event(out, |out| {
                out.extend_from_slice(&error.to_json());
                Ok(())
            }),
            Self::Responses(answer) => answer.write_error(generation, error, out),
            Self::Messages(answer) => answer.write_error(error, out),
        }
    }

    /// What a stream says that has nothing to say.
    #[must_use]
    pub fn keep_alive(&self) -> &'static [u8] {
        match self {
            Self::Chat(_) | Self::Completion(_) | Self::Responses(_) => b": keep-alive\n\n",
            Self::Messages(_) => PING,
        }
    }

    /// The whole answer as JSON.
    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()> {
        match self {
            Self::Chat(answer) => answer.write_whole(generation, out),
            Self::Completion(answer) => answer.write_whole(generation, out),
            Self::Responses(answer) => answer.write_whole(generation, out),
            Self::Messages(answer) => answer.write_whole(generation, out),
        }
    }
}

/// A request from its arrival to its end: what it holds, and how it is counted and charged when it ends, by whatever
/// means.
pub struct ActiveRequest {
    /// What the answer is written from, while it is generated.
    pub generation: Option<Generation>,
    metrics: Arc<Metrics>,
    endpoint: EndpointName,
    caller: Caller,
    outcome: Outcome,
    admitted: Option<Admitted>,
}

impl ActiveRequest {
    fn new(metrics: Arc<Metrics>, endpoint: EndpointName, caller: Caller) -> Self {
        // Whoever drops it without a word is a client that left.
        Self { generation: None, metrics, endpoint, caller, outcome: Outcome::Aborted, admitted: None }
    }

    /// Says how the request ended, and gives back what it held.
    pub fn finish(&mut self, outcome: Outcome) {
        self.outcome = outcome;
        self.release();
    }

    fn fail(&mut self, error: ApiError) -> Response {
        self.finish(error.outcome());
        error.into_response()
    }

    fn release(&mut self) {
        if let Some(generation) = self.generation.take() {
            self.caller.charge_output(generation.usage().completion_tokens);
        }
        self.admitted = None;
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.release();
        self.metrics.count_request(self.endpoint, self.outcome);
        if let Some(metrics) = self.caller.metrics() {
            metrics.count_request(self.outcome);
        }
    }
}

/// How a request that has begun is to be answered, and by when.
struct Started {
    stream: Option<StreamSpec>,
    answer: Answer,
    deadline: Instant,
}

/// Serves one request of `endpoint`, whose bodies `prepare` understands.
pub async fn respond(app: Arc<App>, endpoint: EndpointName, request: Request, prepare: Work<Prepared>) -> Response {
    let arrived = Instant::now();
    let Some(caller) = caller_of(&request) else { return ApiError::unauthorized().into_response() };
    let (parts, body) = request.into_parts();
    let mut request = ActiveRequest::new(app.metrics.clone(), endpoint, caller);
    let deadline = match app.admission.deadline(&parts.headers, arrived) {
        Ok(deadline) => deadline,
        Err(error) => return request.fail(error),
    };
    let session = session::of_headers(&parts.headers);
    let starting = start(&app, &mut request, (body, prepare), session, (arrived, deadline));
    let started = timeout_at(deadline.into(), starting).await.unwrap_or_else(|_| Err(ApiError::deadline_exceeded()));
    let Started { stream, mut answer, deadline } = match started {
        Ok(started) => started,
        Err(error) => return request.fail(error),
    };
    let Some(generation) = &mut request.generation else { return request.fail(ApiError::internal()) };
    let ended = if stream.is_some() {
        // Nothing within the time is news as well: the headers leave without waiting longer.
        let patience = (Instant::now() + FIRST_NEWS_PATIENCE).min(deadline);
        match timeout_at(patience.into(), generation.step()).await.unwrap_or(Ok(Progress::Running)) {
            Ok(_) => {
                let interval = app.config.keep_alive_interval;
                return EventStream::new(answer, request, interval, deadline.into()).into_response();
            }
            Err(error) => Err(error.into()),
        }
    } else {
        let collected = timeout_at(deadline.into(), collect(generation)).await;
        collected.map_or_else(|_| Err(ApiError::deadline_exceeded()), |ended| ended.map_err(ApiError::from))
    };
    let mut out = Vec::new();
    match ended.and_then(|()| answer.write_whole(generation, &mut out).map_err(|_| ApiError::internal())) {
        Ok(()) => {
            let outcome = outcome(generation);
            request.finish(outcome);
            ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], out).into_response()
        }
        Err(error) => request.fail(error),
    }
}

/// Serves one request of `endpoint` that `work` answers by itself, without a worker.
pub async fn respond_at_once<T: Serialize + Send + 'static>(
    app: Arc<App>,
    endpoint: EndpointName,
    request: Request,
    work: Work<T>,
) -> Response {
    let arrived = Instant::now();
    let Some(caller) = caller_of(&request) else { return ApiError::unauthorized().into_response() };
    let (parts, body) = request.into_parts();
    let mut request = ActiveRequest::new(app.metrics.clone(), endpoint, caller);
    let deadline = match app.admission.deadline(&parts.headers, arrived) {
        Ok(deadline) => deadline,
        Err(error) => return request.fail(error),
    };
    let working = async {
        request.admitted = Some(app.admission.admit(&request.caller).await?);
        let model = app.model().cloned().ok_or_else(|| ApiError::not_ready(app.generator.why_not_ready()))?;
        let body = read_body(body, app.config.limits.max_body_bytes).await?;
        off_runtime(&model, body, work).await
    };
    match timeout_at(deadline.into(), working).await.unwrap_or_else(|_| Err(ApiError::deadline_exceeded())) {
        Ok(answer) => {
            request.finish(Outcome::Completed);
            Json(answer).into_response()
        }
        Err(error) => request.fail(error),
    }
}

/// Lets the request in, reads it, and begins to generate. What the request then holds is in `request`.
async fn start(
    app: &Arc<App>,
    request: &mut ActiveRequest,
    (body, prepare): (Body, Work<Prepared>),
    session: Option<u64>,
    (arrived, deadline): (Instant, Instant),
) -> Result<Started, ApiError> {
    app.refusal().map_or(Ok(()), Err)?;
    request.admitted = Some(app.admission.admit(&request.caller).await?);
    let model = app.model().cloned().ok_or_else(|| ApiError::not_ready(app.generator.why_not_ready()))?;
    let body = read_body(body, app.config.limits.max_body_bytes).await?;
    let Prepared { mut spec, stream, answer } = off_runtime(&model, body, prepare).await?;
    spec.session = session.or(spec.session);
    let deadline = deadline.min(app.admission.deadline_after(spec.deadline_ms, arrived));
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ApiError::deadline_exceeded());
    }
    // The worker stops by itself where this gateway should not get to tell it.
    spec.deadline_ms = Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1));
    let num_prompt_tokens: usize = spec.prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
    request.generation = Some(app.generator.start(spec, &model.tokenizer, arrived)?);
    request.caller.charge_prompt(u32::try_from(num_prompt_tokens).unwrap_or(u32::MAX));
    Ok(Started { stream, answer, deadline })
}

async fn collect(generation: &mut Generation) -> Result<(), GenerateError> {
    while generation.step().await? == Progress::Running {}
    Ok(())
}

/// Runs `work` on a body: at once if it is small, on a thread for long texts if not.
async fn off_runtime<T: Send + 'static>(model: &Arc<Model>, body: Bytes, work: Work<T>) -> Result<T, ApiError> {
    if body.len() <= LARGE_BODY_BYTES {
        return Ok(work(model, &body)?);
    }
    let shared = model.clone();
    let done = model.text_pool.run(move || work(&shared, &body)).await;
    Ok(done.map_err(|_| ApiError::internal())??)
}

/// How a generation that has ended is counted.
#[must_use]
pub fn outcome(generation: &Generation) -> Outcome {
    let aborted = generation.choices.iter().any(|choice| choice.finish == Some(Finish::Abort));
    if aborted { Outcome::Aborted } else { Outcome::Completed }
}

/// The model that the request names must be the one that is served.
///
/// # Errors
/// 404 with `param` "model".
pub fn check_model(model: &Model, asked: Option<&str>) -> Result<(), InvalidRequest> {
    match asked {
        Some(name) if name != model.name => Err(InvalidRequest::model_not_found(name)),
        _ => Ok(()),
    }
}

/// Why a choice ended, in OpenAI's terms. A stop token of the request, unlike the model's own, is named.
#[must_use]
pub fn finish_of<'a>(model: &Model, choice: &'a Choice) -> Option<(FinishReason, Option<StopReason<'a>>)> {
    Some(match choice.finish.as_ref()? {
        Finish::StopToken(id) => {
            let is_own = model.info.eos_token_ids.contains(id);
            (FinishReason::Stop, (!is_own).then_some(StopReason::TokenId(*id)))
        }
        Finish::StopString(text) => (FinishReason::Stop, Some(StopReason::Text(text))),
        Finish::Length => (FinishReason::Length, None),
        Finish::Abort => (FinishReason::Abort, None),
    })
}
