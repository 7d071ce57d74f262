//! Who may come in: the API key, the body's size, and one of a bounded number of permits, held until the last byte.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::config;
use crate::error::ApiError;

const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read beyond the limit and thrown away, so that a client that still writes gets to read its answer.
const MAX_DISCARDED_BYTES: usize = 256 * 1024 * 1024;

/// Permits for requests in progress.
#[derive(Debug)]
pub struct Admission {
    permits: Arc<Semaphore>,
    max: usize,
}

impl Admission {
    #[must_use]
    pub fn new(max: usize) -> Self {
        let max = max.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(max)), max }
    }

    /// A permit, to be held as long as the request is in progress.
    ///
    /// # Errors
    /// 429 where all are taken.
    pub fn admit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.permits.clone().try_acquire_owned().map_err(|_| ApiError::too_many_requests(self.max))
    }

    /// Requests in progress.
    #[must_use]
    pub fn active(&self) -> usize {
        self.max - self.permits.available_permits()
    }

    /// Requests that may be in progress at one time.
    #[must_use]
    pub fn max(&self) -> usize {
        self.max
    }
}

/// Lets a request pass that shows the configured key, or any where none is configured.
pub async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match &app.config.api_key_digest {
        Some(expected) if !shows_key(request.headers(), expected) => ApiError::unauthorized().into_response(),
        _ => next.run(request).await,
    }
}

fn shows_key(headers: &HeaderMap, expected: &[u8; 32]) -> bool {
    let Some(value) = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()) else { return false };
    let Some((scheme, key)) = value.split_once(' ') else { return false };
    scheme.eq_ignore_ascii_case("bearer") && config::digest(key.trim()).ct_eq(expected).into()
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
