//! Everything but generation: models, probes, metrics, version, and the operator's verbs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use tonic::Code;

use super::entry::read_body;
use crate::app::App;
use crate::error::ApiError;
use crate::openai::abort::AbortRequest;
use crate::openai::models::{ModelCard, ModelList};
use crate::telemetry::{METRICS_CONTENT_TYPE, WorkerGauges};
use crate::worker::PROTOCOL_VERSION;
use crate::worker::pool::Condition;

const MAX_ADMIN_BODY_BYTES: usize = 64 * 1024;

/// `GET /v1/models`
pub async fn list_models(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList::new(app.model().map(|model| model.card()).into_iter().collect()))
}

/// `GET /v1/models/{id}`
pub async fn get_model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<ModelCard>, ApiError> {
    match app.model() {
        Some(model) if model.name == id => Ok(Json(model.card())),
        _ => Err(ApiError::unknown_model(&id)),
    }
}

/// `GET /livez`: the process answers.
pub async fn livez() -> &'static str {
    "ok\n"
}

/// `GET /readyz` and `GET /health`: requests are taken now.
pub async fn readyz(State(app): State<Arc<App>>) -> Response {
    let workers: Vec<Value> = app.pool.slots().iter().map(|slot| worker_state(&slot.name, slot.condition())).collect();
    let (status, text) = match app.refusal() {
        None => (StatusCode::OK, "ready".to_owned()),
        Some(error) => (error.status, error.message.into_owned()),
    };
    (status, Json(json!({"status": text, "workers": workers}))).into_response()
}

fn worker_state(name: &str, condition: Condition) -> Value {
    match condition {
        Condition::Ready => json!({"name": name, "state": "ready"}),
        Condition::Draining => json!({"name": name, "state": "draining"}),
        Condition::Refused(reason) => json!({"name": name, "state": "refused", "reason": reason}),
        Condition::NotReady(reason) => json!({"name": name, "state": "not ready", "reason": reason}),
    }
}

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let ready = app.pool.ready();
    for slot in app.pool.slots().iter() {
        let worker = ready.iter().find(|worker| worker.name == slot.name);
        let gauges = worker.map_or_else(WorkerGauges::default, |worker| {
            let load = &worker.link.load;
            WorkerGauges {
                ready: true,
                running_requests: load.running_requests.load(Ordering::Relaxed),
                waiting_requests: load.waiting_requests.load(Ordering::Relaxed),
                used_pages: load.used_pages.load(Ordering::Relaxed),
                total_pages: load.total_pages.load(Ordering::Relaxed),
                waiting_prompt_tokens: load.waiting_prompt_tokens.load(Ordering::Relaxed),
            }
        });
        app.metrics.set_worker(&slot.name, &gauges);
    }
    app.admission.publish();
    let text = app.metrics.handle().render();
    ([(header::CONTENT_TYPE, HeaderValue::from_static(METRICS_CONTENT_TYPE))], text).into_response()
}

/// `GET /version`
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION"), "protocol_version": PROTOCOL_VERSION}))
}

/// `POST /flush_cache`: every ready worker drops the cached pages that no request uses.
pub async fn flush_cache(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let ready = app.pool.ready();
    if ready.is_empty() {
        return Err(ApiError::not_ready(app.generator.why_not_ready()));
    }
    let mut freed_pages = 0_u64;
    for worker in ready.iter() {
        let freed = worker.link.calls().flush_cache().await.map_err(|status| match status.code() {
            Code::FailedPrecondition => ApiError::conflict(status.message().to_owned()),
            _ => ApiError::bad_gateway(format!("{} did not flush its cache: {}", worker.name, status.message())),
        })?;
        freed_pages += u64::from(freed);
    }
    Ok(Json(json!({"freed_pages": freed_pages})))
}

/// `POST /abort_request`: ends one request in progress, or all. Its client gets what was generated so far and the
/// finish reason "abort".
pub async fn abort_request(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let body = read_body(body, MAX_ADMIN_BODY_BYTES).await?;
    let aborted = match AbortRequest::parse(&body)? {
        AbortRequest::All => app.generator.abort_all(),
        AbortRequest::One(rid) => usize::from(response_id(&rid).is_some_and(|id| app.generator.abort(id))),
    };
    Ok(Json(json!({"aborted": aborted})))
}

/// The number behind `chatcmpl-…`, `cmpl-…`, `resp_…` or `msg_…`.
fn response_id(rid: &str) -> Option<u128> {
    let digits = rid.rsplit_once(['-', '_']).map_or(rid, |(_, digits)| digits);
    (digits.len() == 32).then(|| u128::from_str_radix(digits, 16).ok())?
}
