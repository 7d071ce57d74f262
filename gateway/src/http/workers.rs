//! The operator's view of the workers: which there are, one more, one less, none new for one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use http::StatusCode;
use serde_json::{Value, json};

use super::entry::read_body;
use crate::app::App;
use crate::error::ApiError;
use crate::openai::workers::{named_worker, new_worker};
use crate::worker::Role;
use crate::worker::pool::{Condition, ReadyWorker, WorkerSlot};

const MAX_BODY_BYTES: usize = 64 * 1024;

/// `GET /workers`
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let ready = app.pool.ready();
    let slots = app.pool.slots();
    let workers: Vec<Value> =
        slots.iter().map(|slot| describe(slot, ready.iter().find(|worker| worker.name == slot.name))).collect();
    Json(json!({"workers": workers, "unpaired": app.pool.unpaired()}))
}

fn describe(slot: &WorkerSlot, ready: Option<&ReadyWorker>) -> Value {
    let (state, reason) = match slot.condition() {
        Condition::Ready => ("ready", None),
        Condition::Draining => ("draining", None),
        Condition::NotReady(reason) => ("not ready", Some(reason)),
        Condition::Refused(reason) => ("refused", Some(reason)),
    };
    let load = ready.map(|worker| {
        let load = &worker.link.load;
        json!({
            "requests_of_this_gateway": worker.link.in_flight().requests,
            "running_requests": load.running_requests.load(Ordering::Relaxed),
            "waiting_requests": load.waiting_requests.load(Ordering::Relaxed),
            "used_pages": load.used_pages.load(Ordering::Relaxed),
            "total_pages": load.total_pages.load(Ordering::Relaxed),
        })
    });
    json!({
        "name": &*slot.name,
        "role": slot.spec.role.to_string(),
        "state": state,
        "reason": reason,
        "load": load,
    })
}

/// `POST /workers`: connects one more. It takes requests once it is ready.
pub async fn add(State(app): State<Arc<App>>, body: Body) -> Result<(StatusCode, Json<Value>), ApiError> {
    let spec = new_worker(&read_body(body, MAX_BODY_BYTES).await?)?;
    let is_unified = |role| role == Role::Unified;
    if app.pool.slots().iter().any(|slot| is_unified(slot.spec.role) != is_unified(spec.role)) {
        return Err(ApiError::conflict(
            "Workers that do all of a request and workers of pairs are not served side by side: this gateway has the \
             other kind.",
        ));
    }
    let name = spec.name.clone();
    app.pool.add(spec).map_err(|reason| ApiError::conflict(format!("Not added: {reason}.")))?;
    Ok((StatusCode::CREATED, Json(json!({"name": name}))))
}

/// `POST /workers/drain`: no new request goes there; those in progress end.
pub async fn drain(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let name = named_worker(&read_body(body, MAX_BODY_BYTES).await?)?;
    found(app.pool.set_aside(&name, true), name)
}

/// `POST /workers/remove`: it is given up; requests in progress go on elsewhere.
pub async fn remove(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let name = named_worker(&read_body(body, MAX_BODY_BYTES).await?)?;
    found(app.pool.remove(&name), name)
}

fn found(is_there: bool, name: String) -> Result<Json<Value>, ApiError> {
    if is_there { Ok(Json(json!({"name": name}))) } else { Err(ApiError::unknown_worker(&name)) }
}
