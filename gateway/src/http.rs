//! The routes and what wraps them: API key, request ids, one span a request, and a 500 object for a panic.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use futures::FutureExt;
use http::{HeaderName, HeaderValue, Method, Uri};
use tracing::{Instrument, error, info_span};

use crate::app::App;
use crate::error::ApiError;

pub mod active;
pub mod admin;
pub mod answer;
pub mod chat;
pub mod completions;
pub mod docs;
pub mod entry;
pub mod frames;
pub mod listen;
pub mod messages;
pub mod respond;
pub mod responses;
mod session;
pub mod sse;
pub mod tokenize;
pub mod workers;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID_LEN: usize = 64;

type Endpoint = (&'static str, MethodRouter<Arc<App>>);

/// What needs a key where one is configured.
fn guarded() -> Vec<Endpoint> {
    vec![
        ("/v1/chat/completions", post(chat::create)),
        ("/v1/completions", post(completions::create)),
        ("/v1/responses", post(responses::create)),
        ("/v1/messages", post(messages::create)),
        ("/v1/messages/count_tokens", post(messages::count_tokens)),
        ("/v1/tokenize", post(tokenize::tokenize)),
        ("/v1/detokenize", post(tokenize::detokenize)),
        ("/v1/models", get(admin::list_models)),
        ("/v1/models/{*id}", get(admin::get_model)),
        ("/version", get(admin::version)),
    ]
}

/// What needs an operator's key.
fn operators() -> Vec<Endpoint> {
    vec![
        ("/flush_cache", post(admin::flush_cache)),
        ("/abort_request", post(admin::abort_request)),
        ("/workers", get(workers::list).post(workers::add)),
        ("/workers/drain", post(workers::drain)),
        ("/workers/remove", post(workers::remove)),
    ]
}

/// What needs no key: probes, metrics, and the description of the API.
fn open() -> Vec<Endpoint> {
    vec![
        ("/livez", get(admin::livez)),
        ("/readyz", get(admin::readyz)),
        ("/health", get(admin::readyz)),
        ("/metrics", get(admin::metrics)),
        ("/openapi.json", get(docs::description)),
        ("/docs", get(docs::page)),
    ]
}

/// Every path of the gateway.
pub fn paths() -> impl Iterator<Item = &'static str> {
    guarded().into_iter().chain(operators()).chain(open()).map(|(path, _)| path)
}

fn router(endpoints: Vec<Endpoint>) -> Router<Arc<App>> {
    let add = |router: Router<Arc<App>>, (path, methods)| router.route(path, methods);
    endpoints.into_iter().fold(Router::new(), add).method_not_allowed_fallback(wrong_method)
}

/// Every route of the gateway.
pub fn routes(app: Arc<App>) -> Router {
    let operator = router(operators()).layer(middleware::from_fn(entry::require_operator));
    let key = middleware::from_fn_with_state(app.clone(), entry::require_key);
    let guarded = router(guarded()).merge(operator).fallback(unknown_path).layer(key);
    router(open())
        .merge(guarded)
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(app.clone(), trace))
        .layer(middleware::from_fn(messages::speak))
        .with_state(app)
}

async fn unknown_path(uri: Uri) -> ApiError {
    ApiError::unknown_path(uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

/// The answer of a handler, which is a 500 where it panics.
async fn caught(answering: impl Future<Output = Response>) -> Response {
    AssertUnwindSafe(answering).catch_unwind().await.unwrap_or_else(|panic| panicked(&*panic))
}

fn panicked(panic: &(dyn Any + Send)) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    error!(panic = text, "a request handler panicked");
    ApiError::internal().into_response()
}

/// Gives each request an id, its own span, and the id back to the client. An id that a client brings is only echoed:
/// nothing is looked up by it. A handler that panics is answered for here, without a layer of its own, which every
/// piece of a streamed body would pass through.
async fn trace(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).filter(|value| is_plain(value)).cloned();
    let id = given.unwrap_or_else(|| app.next_request_id());
    let span = info_span!("request", id = id.to_str().unwrap_or_default(), path = request.uri().path());
    let mut response = caught(next.run(request)).instrument(span).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn is_plain(value: &HeaderValue) -> bool {
    (1..=MAX_REQUEST_ID_LEN).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::panic, reason = "tests")]

    use axum::response::IntoResponse;
    use http::StatusCode;

    use super::caught;

    #[tokio::test]
    async fn a_handler_that_panics_is_answered_for() {
        assert_eq!(caught(async { panic!("on purpose") }).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(caught(async { StatusCode::OK.into_response() }).await.status(), StatusCode::OK);
    }
}
