//! What every request passes before its endpoint: the check of its key, and the reading of its body within limits.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};

use crate::admission::keyring::Caller;
use crate::app::App;
use crate::error::ApiError;

const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read beyond the limit and thrown away, so that a client that still writes gets to read its answer.
const MAX_DISCARDED_BYTES: usize = 256 * 1024 * 1024;

/// Lets a request pass that shows a key in force, or any where none is configured, and notes whose it is.
pub async fn require_key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match app.admission.identify(request.headers()) {
        None => ApiError::unauthorized().into_response(),
        Some(Caller::Holder(key)) if !key.spec.enabled => {
            ApiError::forbidden("This API key is disabled.").into_response()
        }
        Some(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
    }
}

/// Lets a request pass whose key is an operator's. Stands inside `require_key`.
pub async fn require_operator(request: Request, next: Next) -> Response {
    if caller_of(&request).is_some_and(|caller| caller.is_operator()) {
        return next.run(request).await;
    }
    ApiError::forbidden("This is for operators: the key's entry needs `operator = true`.").into_response()
}

/// Whose request this is, as `require_key` noted.
#[must_use]
pub fn caller_of(request: &Request) -> Option<Caller> {
    request.extensions().get().cloned()
}

/// The whole body, if it has at most `max_bytes`.
///
/// # Errors
/// 413 where it is larger, 408 where it takes longer than 30 s, 400 where it breaks off.
pub async fn read_body(mut body: Body, max_bytes: usize) -> Result<Bytes, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let reading = async {
        let mut bytes = BytesMut::with_capacity(announced.min(max_bytes));
        let mut num_bytes = 0_usize;
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let frame = frame.map_err(|_| ApiError::bad_request("The request body broke off."))?;
            let Ok(data) = frame.into_data() else { continue };
            num_bytes += data.len();
            if num_bytes <= max_bytes {
                bytes.extend_from_slice(&data);
            } else if num_bytes > max_bytes.saturating_add(MAX_DISCARDED_BYTES) {
                break;
            }
        }
        if num_bytes > max_bytes { Err(ApiError::body_too_large(max_bytes)) } else { Ok(bytes.freeze()) }
    };
    tokio::time::timeout(BODY_TIMEOUT, reading).await.map_err(|_| ApiError::body_too_slow())?
}
