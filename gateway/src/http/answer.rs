//! What both generating endpoints do alike: admit, read, prepare, start, and answer in one piece or as a stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use tokio::sync::OwnedSemaphorePermit;

use super::admission::read_body;
use super::chat::ChatAnswer;
use super::completions::CompletionAnswer;
use super::sse::EventStream;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generate::{Choice, Finish, GenerateError, GenerateSpec, Generation, Progress};
use crate::openai::response::{FinishReason, StopReason};
use crate::openai::{InvalidRequest, StreamSpec};
use crate::telemetry::{EndpointName, Metrics, Outcome};

/// Bodies above this are parsed and tokenized on a thread that may block.
const LARGE_BODY_BYTES: usize = 16 * 1024;

/// How long a stream's headers wait for its first news, so that a refusal by the worker still gets its status.
const FIRST_NEWS_PATIENCE: Duration = Duration::from_secs(1);

/// A validated request, ready to be generated, and how it is to be answered.
pub struct Prepared {
    pub spec: GenerateSpec,
    /// Absent: one answer, not streamed.
    pub stream: Option<StreamSpec>,
    pub answer: Answer,
}

/// How an answer is written. It holds what differs between the endpoints.
pub enum Answer {
    Chat(ChatAnswer),
    Completion(CompletionAnswer),
}

impl Answer {
    /// Appends the events that the last step brought.
    pub fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>) {
        match self {
            Self::Chat(answer) => answer.write_step(generation, out),
            Self::Completion(answer) => answer.write_step(generation, out),
        }
    }

    /// Appends what follows the last choice's end: usage, where asked for.
    pub fn write_end(&self, generation: &Generation, out: &mut Vec<u8>) {
        match self {
            Self::Chat(answer) => answer.write_end(generation, out),
            Self::Completion(answer) => answer.write_end(generation, out),
        }
    }

    /// The whole answer as JSON.
    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()> {
        match self {
            Self::Chat(answer) => answer.write_whole(generation, out),
            Self::Completion(answer) => answer.write_whole(generation, out),
        }
    }
}

/// A request in progress: holds its permit, and is counted when it ends, by whatever means.
pub struct ActiveRequest {
    metrics: Arc<Metrics>,
    endpoint: EndpointName,
    outcome: Outcome,
    _permit: OwnedSemaphorePermit,
}

impl ActiveRequest {
    fn new(metrics: Arc<Metrics>, endpoint: EndpointName, permit: OwnedSemaphorePermit) -> Self {
        // Whoever drops it without a word is a client that left.
        Self { metrics, endpoint, outcome: Outcome::Aborted, _permit: permit }
    }

    /// Says how the request ended.
    pub fn finish(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.metrics.count_request(self.endpoint, self.outcome);
    }
}

/// Serves one request of `endpoint`, whose bodies `prepare` understands.
pub async fn respond(
    app: Arc<App>,
    endpoint: EndpointName,
    body: Body,
    prepare: fn(&Arc<Model>, &[u8]) -> Result<Prepared, InvalidRequest>,
) -> Response {
    let arrived = Instant::now();
    let permit = match app.refusal().map_or_else(|| app.admission.admit(), Err) {
        Ok(permit) => permit,
        Err(error) => {
            app.metrics.count_request(endpoint, error.outcome());
            return error.into_response();
        }
    };
    let mut request = ActiveRequest::new(app.metrics.clone(), endpoint, permit);
    let started = async {
        let model = app.model().cloned().ok_or_else(|| ApiError::not_ready(app.generator.why_not_ready()))?;
        let body = read_body(body, app.config.limits.max_body_bytes).await?;
        let prepared = prepare_off_runtime(&model, body, prepare).await?;
        let generation = app.generator.start(prepared.spec, &model.tokenizer, arrived)?;
        Ok::<_, ApiError>((generation, prepared.stream, prepared.answer))
    };
    let (mut generation, stream, mut answer) = match started.await {
        Ok(started) => started,
        Err(error) => {
            request.finish(error.outcome());
            return error.into_response();
        }
    };
    let ended = if stream.is_some() {
        // Nothing within the time is news as well: the headers leave without waiting longer.
        let first = tokio::time::timeout(FIRST_NEWS_PATIENCE, generation.step()).await;
        match first.unwrap_or(Ok(Progress::Running)) {
            Ok(_) => {
                let interval = app.config.keep_alive_interval;
                return EventStream::new(generation, answer, request, interval).into_response();
            }
            Err(error) => Err(error),
        }
    } else {
        collect(&mut generation).await
    };
    let mut out = Vec::new();
    let written = ended
        .map_err(ApiError::from)
        .and_then(|()| answer.write_whole(&generation, &mut out).map_err(|_| ApiError::internal()));
    match written {
        Ok(()) => {
            request.finish(outcome(&generation));
            ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], out).into_response()
        }
        Err(error) => {
            request.finish(error.outcome());
            error.into_response()
        }
    }
}

async fn collect(generation: &mut Generation) -> Result<(), GenerateError> {
    while generation.step().await? == Progress::Running {}
    Ok(())
}

async fn prepare_off_runtime(
    model: &Arc<Model>,
    body: Bytes,
    prepare: fn(&Arc<Model>, &[u8]) -> Result<Prepared, InvalidRequest>,
) -> Result<Prepared, ApiError> {
    if body.len() <= LARGE_BODY_BYTES {
        return Ok(prepare(model, &body)?);
    }
    let model = model.clone();
    let prepared = tokio::task::spawn_blocking(move || prepare(&model, &body)).await;
    Ok(prepared.map_err(|_| ApiError::internal())??)
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
