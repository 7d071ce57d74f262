//! Kubernetes Services whose endpoints are workers: `k8s://NAMESPACE/SERVICE[:PORT]`.

use std::fmt;
use std::time::Duration;

use super::ConfigError;
use crate::worker::Role;

/// The first pause after the API server has failed; each further one is twice as long, up to a bound.
pub const LEAST_PAUSE: Duration = Duration::from_millis(500);

/// A Service, and what its workers must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub place: ServicePlace,
    pub role: Role,
    /// The port their pages must be read at, where the operator has named one.
    pub transfer_port: Option<u16>,
}

/// Where the API server has it, and which of its ports is the workers' own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePlace {
    pub namespace: String,
    pub name: String,
    pub port: ServicePort,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServicePort {
    /// The one there is.
    Only,
    Named(String),
    /// The number that the workers listen on, whether or not the Service knows it.
    Number(u16),
}

impl fmt::Display for ServicePlace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, name, port } = self;
        match port {
            ServicePort::Only => write!(formatter, "k8s://{namespace}/{name}"),
            ServicePort::Named(port) => write!(formatter, "k8s://{namespace}/{name}:{port}"),
            ServicePort::Number(port) => write!(formatter, "k8s://{namespace}/{name}:{port}"),
        }
    }
}

/// The Service that a URL names; none where it is something else. `flag` is named where it is malformed.
///
/// # Errors
/// One sentence: what is wrong with it, or that this gateway cannot ask Kubernetes.
pub(super) fn service(flag: &str, url: &str) -> Result<Option<ServicePlace>, ConfigError> {
    let Some(rest) = url.strip_prefix("k8s://") else { return Ok(None) };
    let wrong = |reason: &str| ConfigError(format!("{flag} {url}: {reason}, expected k8s://NAMESPACE/SERVICE[:PORT]"));
    let place = parse(rest.trim_end_matches('/')).map_err(wrong)?;
    if cfg!(feature = "kubernetes") {
        return Ok(Some(place));
    }
    Err(ConfigError(format!(
        "{flag} {url}: this gateway was built without Kubernetes: build it with `cargo build --release -p \
         baleen-gateway --features kubernetes`"
    )))
}

fn parse(text: &str) -> Result<ServicePlace, &'static str> {
    let (namespace, rest) = text.split_once('/').ok_or("the namespace is missing")?;
    let (name, port) = match rest.split_once(':') {
        None => (rest, ServicePort::Only),
        Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            let number = port.parse().ok().filter(|&port| port > 0);
            (name, ServicePort::Number(number.ok_or("the port is not a number from 1 to 65535")?))
        }
        Some((name, port)) if is_label(port) => (name, ServicePort::Named(port.to_owned())),
        Some(_) => return Err("the port is malformed"),
    };
    if !is_label(namespace) {
        return Err("the namespace is malformed");
    }
    if !is_label(name) {
        return Err("the Service's name is malformed");
    }
    Ok(ServicePlace { namespace: namespace.to_owned(), name: name.to_owned(), port })
}

/// What Kubernetes takes as a name: 1 to 63 lower-case letters, digits and hyphens, none of these at an end.
fn is_label(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(is_inner) && !name.starts_with('-') && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::{ServicePort, parse, service};

    #[test]
    fn a_url_names_a_service_and_one_of_its_ports() {
        for (text, port) in [
            ("llm/decode", ServicePort::Only),
            ("llm/decode:grpc", ServicePort::Named("grpc".into())),
            ("llm/decode:30001", ServicePort::Number(30001)),
        ] {
            let place = parse(text).unwrap();
            assert_eq!((place.namespace.as_str(), place.name.as_str(), &place.port), ("llm", "decode", &port));
            assert_eq!(place.to_string(), format!("k8s://{text}"));
        }
        assert_eq!(service("--worker", "dns://a:1").unwrap(), None);
    }

    #[test]
    fn a_malformed_url_is_refused_with_its_fault() {
        let long = format!("k8s://{}/a", "n".repeat(64));
        for (url, reason) in [
            ("k8s://decode", "the namespace is missing"),
            ("k8s:///decode", "the namespace is malformed"),
            ("k8s://llm/", "the namespace is missing"),
            ("k8s://llm/a/b", "the Service's name is malformed"),
            ("k8s://LLM/a", "the namespace is malformed"),
            ("k8s://llm/-a", "the Service's name is malformed"),
            ("k8s://llm/a:", "the port is malformed"),
            ("k8s://llm/a:0", "not a number from 1 to 65535"),
            ("k8s://llm/a:65536", "not a number from 1 to 65535"),
            ("k8s://llm/a:gr pc", "the port is malformed"),
            (&long, "the namespace is malformed"),
        ] {
            let sentence = service("--decode", url).unwrap_err().to_string();
            assert!(sentence.starts_with(&format!("--decode {url}: ")) && sentence.contains(reason), "{sentence}");
        }
    }

    #[cfg(not(feature = "kubernetes"))]
    #[test]
    fn a_gateway_without_the_feature_says_how_to_build_one_with_it() {
        let sentence = service("--worker", "k8s://llm/workers").unwrap_err().to_string();
        assert!(sentence.contains("built without Kubernetes") && sentence.contains("--features kubernetes"));
    }
}
