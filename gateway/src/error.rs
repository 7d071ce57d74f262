//! The one mapping from what can go wrong to an HTTP status and OpenAI's error object.

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};

use crate::generate::GenerateError;
use crate::openai::{ErrorObject, InvalidRequest, RejectKind};
use crate::telemetry::Outcome;
use crate::worker::FailureKind;

const DEADLINE_EXCEEDED: &str = "deadline_exceeded";

/// An answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    /// OpenAI's `type`: the class of error.
    pub kind: &'static str,
    pub message: Cow<'static, str>,
    /// The field at fault.
    pub param: Option<String>,
    /// OpenAI's `code`: the error within its class.
    pub code: Option<&'static str>,
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    #[must_use]
    pub fn bad_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    #[must_use]
    pub fn unknown_path(path: &str) -> Self {
        let message = format!("There is nothing at {path}.");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_code("unknown_url")
    }

    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("The model {name:?} does not exist here; GET /v1/models lists what does.");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_code("model_not_found");
        Self { param: Some("model".into()), ..error }
    }

    #[must_use]
    pub fn unknown_worker(name: &str) -> Self {
        let message = format!("There is no worker {name:?} here; GET /workers lists those there are.");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_code("worker_not_found");
        Self { param: Some("url".into()), ..error }
    }

    #[must_use]
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not answer {method}.");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message).with_code("method_not_allowed")
    }

    #[must_use]
    pub fn body_too_large(max_bytes: usize) -> Self {
        let message = format!("The request body is larger than {max_bytes} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).with_code("request_too_large")
    }

    #[must_use]
    pub fn body_too_slow() -> Self {
        let message = "The request body did not arrive in time.";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message).with_code("request_timeout")
    }

    #[must_use]
    pub fn unauthorized() -> Self {
        let message = "A valid API key is required: send it as `Authorization: Bearer KEY`.";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message).with_code("invalid_api_key")
    }

    /// A key that is known, and does not open this.
    #[must_use]
    pub fn forbidden(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message).with_code("permission_denied")
    }

    #[must_use]
    pub fn queue_full(max: usize, retry_after_s: u32) -> Self {
        let message =
            format!("All {max} places for requests are taken and the line is full. Try again in {retry_after_s} s.");
        Self::rate_limited(message).with_code("too_many_requests").after(retry_after_s)
    }

    #[must_use]
    pub fn queue_timeout(retry_after_s: u32) -> Self {
        let message = format!("The request stood in line for too long. Try again in {retry_after_s} s.");
        Self::rate_limited(message).with_code("queue_timeout").after(retry_after_s)
    }

    #[must_use]
    pub fn key_concurrency(max: u32) -> Self {
        let message = format!("This API key may have {max} requests at one time and has them. Wait for one to end.");
        Self::rate_limited(message).with_code("concurrency_limit_exceeded").after(1)
    }

    #[must_use]
    pub fn key_tokens(per_minute: u32, retry_after_s: u32) -> Self {
        let message = format!(
            "This API key may spend {per_minute} tokens a minute and has spent them. Try again in {retry_after_s} s."
        );
        Self::rate_limited(message).with_code("token_rate_exceeded").after(retry_after_s)
    }

    #[must_use]
    pub fn deadline_exceeded() -> Self {
        let message = "The request was not finished by its deadline.";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).with_code(DEADLINE_EXCEEDED)
    }

    #[must_use]
    pub fn bad_header(name: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { param: Some(name.into()), ..Self::bad_request(message) }
    }

    fn rate_limited(message: String) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    #[must_use]
    pub fn draining() -> Self {
        let message = "This server is shutting down and takes no new requests.";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).with_code("draining").after(1)
    }

    #[must_use]
    pub fn not_ready(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).with_code("not_ready").after(1)
    }

    #[must_use]
    pub fn conflict(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", message)
    }

    #[must_use]
    pub fn bad_gateway(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", message)
    }

    #[must_use]
    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "Something broke while this request was served.")
    }

    /// How a request that ends this way is counted.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        if self.status.is_server_error() { Outcome::Failed } else { Outcome::Rejected }
    }

    /// The error object as JSON: the response body, or the data of an event in a stream that has begun.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let object =
            ErrorObject { message: &self.message, kind: self.kind, param: self.param.as_deref(), code: self.code };
        // Strings and nulls always serialise.
        serde_json::to_vec(&object).unwrap_or_default()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.to_json()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For those who say the same in another shape.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<InvalidRequest> for ApiError {
    fn from(invalid: InvalidRequest) -> Self {
        let (status, kind) = match invalid.kind {
            RejectKind::BadRequest => (StatusCode::BAD_REQUEST, "invalid_request_error"),
            RejectKind::NotFound => (StatusCode::NOT_FOUND, "invalid_request_error"),
            RejectKind::NotImplemented => (StatusCode::NOT_IMPLEMENTED, "not_implemented_error"),
        };
        let InvalidRequest { param, message, code, .. } = invalid;
        Self { param, code, ..Self::new(status, kind, message) }
    }
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let GenerateError::Worker(failure) = error else {
            return match error {
                GenerateError::NoWorker(reason) => Self::not_ready(reason),
                GenerateError::Unable { ref field, .. } => {
                    let param = Some(field.clone());
                    Self { param, ..Self::new(StatusCode::NOT_IMPLEMENTED, "not_implemented_error", error.to_string()) }
                }
                GenerateError::SlowClient => {
                    Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", error.to_string())
                        .with_code("slow_client")
                }
                GenerateError::Worker(_) => Self::internal(),
            };
        };
        let (status, kind) = match failure.kind {
            FailureKind::InvalidArgument => (StatusCode::BAD_REQUEST, "invalid_request_error"),
            FailureKind::Unimplemented => (StatusCode::NOT_IMPLEMENTED, "not_implemented_error"),
            FailureKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
            FailureKind::Unavailable | FailureKind::Lost | FailureKind::PeerFailed => {
                (StatusCode::SERVICE_UNAVAILABLE, "server_error")
            }
            // No status that clients try again by themselves.
            FailureKind::Poison => (StatusCode::UNPROCESSABLE_ENTITY, "server_error"),
            FailureKind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
            FailureKind::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "server_error"),
        };
        let retry = status == StatusCode::SERVICE_UNAVAILABLE || failure.kind == FailureKind::Overloaded;
        // The worker's clock may run out a moment before the gateway's.
        let code = (failure.kind == FailureKind::DeadlineExceeded).then_some(DEADLINE_EXCEEDED);
        let error = Self::new(status, kind, failure.message);
        Self { param: failure.field, code, retry_after_s: retry.then_some(1), ..error }
    }
}
