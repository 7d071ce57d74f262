//! Why a request is refused, and OpenAI's nested error object.

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::chat::constraint::ConstraintError;
use crate::chat::constraint::schema::SchemaError;
use crate::chat::encode::EncodeError;
use crate::text::tokenizer::TokenizerError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectKind {
    /// 400: the request is wrong.
    BadRequest,
    /// 404: it names something that is not here.
    NotFound,
    /// 501: it asks for something this server cannot do.
    NotImplemented,
}

/// A refusal: one sentence, and the request field it is about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidRequest {
    pub kind: RejectKind,
    pub param: Option<String>,
    pub message: String,
    pub code: Option<&'static str>,
}

impl InvalidRequest {
    /// A field whose value is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind: RejectKind::BadRequest, param: Some(param.into()), message: message.into(), code: None }
    }

    /// A body that is wrong as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        Self { kind: RejectKind::BadRequest, param: None, message: message.into(), code: None }
    }

    /// A field that asks for an ability this server lacks.
    pub fn not_implemented(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            kind: RejectKind::NotImplemented,
            param: Some(param.into()),
            message: message.into(),
            code: Some("not_implemented"),
        }
    }

    /// A model name that this server does not serve.
    pub fn model_not_found(name: &str) -> Self {
        Self {
            kind: RejectKind::NotFound,
            param: Some("model".to_owned()),
            message: format!("The model `{name}` does not exist."),
            code: Some("model_not_found"),
        }
    }

    pub fn context_length_exceeded(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field(param, message) }
    }

    pub fn status(&self) -> u16 {
        match self.kind {
            RejectKind::BadRequest => 400,
            RejectKind::NotFound => 404,
            RejectKind::NotImplemented => 501,
        }
    }

    pub fn object(&self) -> ErrorObject<'_> {
        let kind = match self.kind {
            RejectKind::BadRequest | RejectKind::NotFound => "invalid_request_error",
            RejectKind::NotImplemented => "not_implemented_error",
        };
        ErrorObject { message: &self.message, kind, param: self.param.as_deref(), code: self.code }
    }
}

impl From<SchemaError> for InvalidRequest {
    fn from(error: SchemaError) -> Self {
        let message = format!("{error}.");
        Self::field(error.path, message)
    }
}

impl From<ConstraintError> for InvalidRequest {
    fn from(error: ConstraintError) -> Self {
        match error {
            ConstraintError::Schema(error) => error.into(),
            ConstraintError::Unenforceable { ref path, .. } => Self::field(path, format!("{error}.")),
            ConstraintError::Tokenizer(error) => Self::from_tokenizer(&error, "tools"),
        }
    }
}

impl From<EncodeError> for InvalidRequest {
    fn from(error: EncodeError) -> Self {
        match error {
            EncodeError::Invalid { param, message } => Self::field(param, format!("{message}.")),
            EncodeError::Tokenizer(error) => Self::from_tokenizer(&error, "messages"),
        }
    }
}

impl InvalidRequest {
    /// A text the tokenizer refuses, or a control token that the model does not have.
    pub fn from_tokenizer(error: &TokenizerError, param: &str) -> Self {
        match error {
            TokenizerError::MissingControl(_) => Self::not_implemented(param, error.to_string()),
            _ => Self::field(param, error.to_string()),
        }
    }
}

/// Serialises as `{"error": {"message", "type", "param", "code"}}`.
#[derive(Debug, Clone, Copy)]
pub struct ErrorObject<'a> {
    pub message: &'a str,
    /// "invalid_request_error", "server_error", …
    pub kind: &'a str,
    pub param: Option<&'a str>,
    pub code: Option<&'a str>,
}

impl Serialize for ErrorObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            r#type: &'a str,
            param: Option<&'a str>,
            code: Option<&'a str>,
        }
        let mut outer = serializer.serialize_struct("ErrorObject", 1)?;
        let inner = Inner { message: self.message, r#type: self.kind, param: self.param, code: self.code };
        outer.serialize_field("error", &inner)?;
        outer.end()
    }
}

#[cfg(test)]
mod tests {
    use super::InvalidRequest;

    #[test]
    fn the_object_is_nested_and_complete() {
        let error = InvalidRequest::model_not_found("gpt-4");
        assert_eq!(error.status(), 404);
        let expected = serde_json::json!({"error": {
            "message": "The model `gpt-4` does not exist.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }});
        assert_eq!(serde_json::to_value(error.object()).ok(), Some(expected));
        let body = serde_json::to_string(&InvalidRequest::body("no").object()).ok();
        let expected = r#"{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}"#;
        assert_eq!(body.as_deref(), Some(expected));
    }
}
