//! `GET /openapi.json` and `GET /docs`: the description of the API, for programs and for people.

use std::sync::LazyLock;

use axum::response::{Html, IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};

use crate::error::ApiError;
use crate::openai::openapi;

/// Absent only if the built-in files are broken.
static DESCRIPTION: LazyLock<Option<Bytes>> =
    LazyLock::new(|| openapi::document().and_then(|document| serde_json::to_vec(&document)).ok().map(Bytes::from));

/// One file with everything in it: it works where nothing else can be reached.
const PAGE: &str = include_str!("docs/page.html");

/// The page runs only what it brings and talks only to this server.
const POLICY: (HeaderName, HeaderValue) = (
    header::CONTENT_SECURITY_POLICY,
    HeaderValue::from_static(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
);

/// `GET /openapi.json`
pub async fn description() -> Response {
    match &*DESCRIPTION {
        Some(json) => {
            ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json.clone()).into_response()
        }
        None => ApiError::internal().into_response(),
    }
}

/// `GET /docs`
pub async fn page() -> Response {
    ([POLICY], Html(PAGE)).into_response()
}
