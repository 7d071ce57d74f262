//! The routes and what wraps them: API key, request ids, one span a request, and a 500 object for a panic.

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{HeaderName, HeaderValue, Method, Uri};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::{Instrument, error, info_span};

use crate::app::App;
use crate::error::ApiError;

pub mod admin;
pub mod admission;
pub mod answer;
pub mod chat;
pub mod completions;
pub mod listen;
pub mod sse;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID_LEN: usize = 64;

/// Every route of the gateway.
pub fn routes(app: Arc<App>) -> Router {
    let operator = Router::new()
        .route("/flush_cache", post(admin::flush_cache))
        .route("/abort_request", post(admin::abort_request))
        .layer(middleware::from_fn(admission::require_operator));
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(admin::list_models))
        .route("/v1/models/{*id}", get(admin::get_model))
        .route("/version", get(admin::version))
        .merge(operator)
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(app.clone(), admission::require_key));
    Router::new()
        .route("/livez", get(admin::livez))
        .route("/readyz", get(admin::readyz))
        .route("/health", get(admin::readyz))
        .route("/metrics", get(admin::metrics))
        .method_not_allowed_fallback(wrong_method)
        .merge(guarded)
        .layer(DefaultBodyLimit::disable())
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(app.clone(), trace))
        .with_state(app)
}

async fn unknown_path(uri: Uri) -> ApiError {
    ApiError::unknown_path(uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(panic = text, "a request handler panicked");
    ApiError::internal().into_response()
}

/// Gives each request an id, its own span, and the id back to the client. An id that a client brings is only echoed:
/// nothing is looked up by it.
async fn trace(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).filter(|value| is_plain(value)).cloned();
    let id = given.unwrap_or_else(|| app.next_request_id());
    let span = info_span!("request", id = id.to_str().unwrap_or_default(), path = request.uri().path());
    let mut response = next.run(request).instrument(span).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn is_plain(value: &HeaderValue) -> bool {
    (1..=MAX_REQUEST_ID_LEN).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
}
