//! `/workers`: which worker an operator means.

use serde::Deserialize;

use super::error::InvalidRequest;
use super::fields::parse_body;
use crate::config::workers::worker_address;
use crate::worker::Role;
use crate::worker::pool::WorkerSpec;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Wire {
    url: Option<String>,
    role: Option<String>,
}

impl Wire {
    fn address(&self) -> Result<String, InvalidRequest> {
        let Some(url) = &self.url else {
            return Err(InvalidRequest::field("url", "'url', the worker's [grpc://]host:port, is required."));
        };
        worker_address("url", url).map_err(|error| InvalidRequest::field("url", format!("{error}.")))
    }
}

/// A worker that is to be taken in.
///
/// # Errors
/// Its address or role is missing or malformed.
pub fn new_worker(body: &[u8]) -> Result<WorkerSpec, InvalidRequest> {
    let wire: Wire = parse_body(body)?;
    let role = match wire.role.as_deref() {
        None | Some("unified") => Role::Unified,
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        Some(_) => {
            return Err(InvalidRequest::field("role", "'role' must be \"unified\", \"prefill\" or \"decode\"."));
        }
    };
    Ok(WorkerSpec::at(wire.address()?, role))
}

/// The name of a worker that is there.
///
/// # Errors
/// Its address is missing or malformed.
pub fn named_worker(body: &[u8]) -> Result<String, InvalidRequest> {
    parse_body::<Wire>(body)?.address()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_worker_is_named_by_its_address_and_role() {
        let new = |body: &str| new_worker(body.as_bytes()).map_err(|refusal| refusal.param.unwrap_or_default());
        let spec = new(r#"{"url": "grpc://a:1/", "role": "decode"}"#).unwrap();
        assert_eq!(spec, WorkerSpec::at("a:1".into(), Role::Decode));
        assert_eq!(new(r#"{"url": "a:1"}"#).unwrap().role, Role::Unified);
        assert_eq!(new(r#"{"url": "a:1", "role": "both"}"#), Err("role".into()));
        assert_eq!(new(r#"{"url": "a"}"#), Err("url".into()));
        assert_eq!(new("{}"), Err("url".into()));
        assert_eq!(named_worker(br#"{"url": "http://a:1"}"#).unwrap(), "a:1");
    }
}
