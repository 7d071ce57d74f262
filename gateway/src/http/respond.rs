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

use super::active::{ActiveRequest, outcome};
use super::answer::{Answer, Prepared};
use super::entry::{caller_of, read_body};
use super::session;
use super::sse::EventStream;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generate::{GenerateError, Generation, Progress};
use crate::openai::{InvalidRequest, StreamSpec};
use crate::telemetry::{EndpointName, Outcome};

/// Bodies above this are parsed and tokenized on a thread for long texts; shorter ones take less time than a change of
/// threads.
const LARGE_BODY_BYTES: usize = 32 * 1024;

/// How long a stream's headers wait for its first news, so that a refusal by the worker still gets its status.
const FIRST_NEWS_PATIENCE: Duration = Duration::from_secs(1);

/// What becomes of a body of one endpoint.
pub type Work<T> = fn(&Arc<Model>, &[u8]) -> Result<T, InvalidRequest>;

/// A request whose body is still to be read.
struct Arrival {
    body: Body,
    /// Hash of the name that its headers give its session.
    session: Option<u64>,
    at: Instant,
    deadline: Instant,
}

/// How a request that has begun is to be answered, and by when.
struct Started {
    stream: Option<StreamSpec>,
    answer: Box<dyn Answer>,
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
    let starting = start(&app, &mut request, Arrival { body, session, at: arrived, deadline }, prepare);
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
    arrival: Arrival,
    prepare: Work<Prepared>,
) -> Result<Started, ApiError> {
    app.pool.attempt_while_recovering(|| app.refusal().map_or(Ok(()), Err)).await?;
    request.admitted = Some(app.admission.admit(&request.caller).await?);
    let model = app.model().cloned().ok_or_else(|| ApiError::not_ready(app.generator.why_not_ready()))?;
    let body = read_body(arrival.body, app.config.limits.max_body_bytes).await?;
    let Prepared { mut spec, stream, answer } = off_runtime(&model, body, prepare).await?;
    spec.session = arrival.session.or(spec.session);
    let deadline = arrival.deadline.min(app.admission.deadline_after(spec.deadline_ms, arrival.at));
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ApiError::deadline_exceeded());
    }
    // The worker stops by itself where this gateway should not get to tell it.
    spec.deadline_ms = Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1));
    let num_prompt_tokens: usize = spec.prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
    request.generation = Some(app.generator.start(spec, &model.tokenizer, arrival.at).await?);
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
