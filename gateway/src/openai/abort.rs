//! `POST /abort_request`: which requests an operator ends.

use serde::Deserialize;

use super::error::InvalidRequest;
use super::fields::parse_body;

/// What is to be ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AbortRequest {
    All,
    /// The `id` of a response.
    One(String),
}

impl AbortRequest {
    /// Parses a body.
    ///
    /// # Errors
    /// It names neither one response nor all, or a field is of a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object")]
        struct Wire {
            rid: Option<String>,
            abort_all: Option<bool>,
        }
        match parse_body(body)? {
            Wire { abort_all: Some(true), .. } => Ok(Self::All),
            Wire { rid: Some(rid), .. } => Ok(Self::One(rid)),
            Wire { rid: None, .. } => {
                let message = "'rid', the id of a response, is required, or 'abort_all': true.";
                Err(InvalidRequest::field("rid", message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::AbortRequest;

    #[test]
    fn a_body_names_one_response_or_all() {
        let parse = |body: &str| AbortRequest::parse(body.as_bytes()).map_err(|refusal| refusal.param);
        assert_eq!(parse(r#"{"rid": "cmpl-1"}"#), Ok(AbortRequest::One("cmpl-1".to_owned())));
        assert_eq!(parse(r#"{"rid": "cmpl-1", "abort_all": true}"#), Ok(AbortRequest::All));
        assert_eq!(parse(r#"{"abort_all": null}"#), Err(Some("rid".to_owned())));
        assert_eq!(parse(r#"{"abort_all": "yes"}"#), Err(Some("abort_all".to_owned())));
        assert_eq!(parse("[]"), Err(None));
    }
}
