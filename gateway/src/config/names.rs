//! Names in DNS that stand for workers: `dns+srv://SERVICE` for service records, `dns://HOST:PORT` for addresses.

use std::fmt;
use std::time::Duration;

use super::ConfigError;
use crate::worker::Role;

/// However short its answers live, a name is asked for no more often.
pub const LEAST_INTERVAL: Duration = Duration::from_secs(5);

/// A name, and what its workers must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub question: Question,
    pub role: Role,
    /// The port their pages must be read at, where the operator has named one.
    pub transfer_port: Option<u16>,
}

/// What DNS is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// SRV records, which name hosts and ports.
    Service(String),
    /// A and AAAA records; all workers there have one port.
    Host { host: String, port: u16 },
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.question {
            Question::Service(name) => write!(formatter, "dns+srv://{name}"),
            Question::Host { host, port } => write!(formatter, "dns://{host}:{port}"),
        }
    }
}

/// What a URL asks DNS for; none where it is an address. `flag` is named where it is malformed.
///
/// # Errors
/// One sentence that says what is wrong with it.
pub(super) fn question(flag: &str, url: &str) -> Result<Option<Question>, ConfigError> {
    let wrong = |reason: &str, expected: &str| ConfigError(format!("{flag} {url}: {reason}, expected {expected}"));
    if let Some(rest) = url.strip_prefix("dns+srv://") {
        let expected = "dns+srv://NAME, as in dns+srv://_grpc._tcp.workers.example";
        let name = rest.trim_end_matches('/');
        if name.contains(':') {
            return Err(wrong("service records name the ports themselves", expected));
        }
        return if is_name(name) {
            Ok(Some(Question::Service(name.to_owned())))
        } else {
            Err(wrong("the name is malformed", expected))
        };
    }
    let Some(rest) = url.strip_prefix("dns://") else { return Ok(None) };
    let expected = "dns://HOST:PORT";
    let (host, port) =
        rest.trim_end_matches('/').rsplit_once(':').ok_or_else(|| wrong("the port is missing", expected))?;
    let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(|| wrong("the port is not one", expected))?;
    if !is_name(host) {
        return Err(wrong("the name is malformed", expected));
    }
    Ok(Some(Question::Host { host: host.to_owned(), port }))
}

/// Labels of 1 to 63 letters, digits, hyphens and underscores, 253 characters in all; the last may be a dot.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    name.len() <= 253 && name.strip_suffix('.').unwrap_or(name).split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::{Question, question};

    #[test]
    fn a_url_asks_for_services_or_hosts_or_is_an_address() {
        let asked = |url| question("--worker", url).unwrap();
        let service = "_grpc._tcp.workers.example.";
        assert_eq!(asked("dns+srv://_grpc._tcp.workers.example./"), Some(Question::Service(service.into())));
        assert_eq!(asked("dns://workers:30001"), Some(Question::Host { host: "workers".into(), port: 30001 }));
        assert_eq!(asked("grpc://workers:30001"), None);
        for (url, reason) in [
            ("dns+srv://", "malformed"),
            ("dns+srv://a..b", "malformed"),
            ("dns+srv://a:30001", "name the ports themselves"),
            ("dns://a", "the port is missing"),
            ("dns://a:0", "the port is not one"),
            ("dns://a b:1", "malformed"),
            ("dns://:1", "malformed"),
        ] {
            let sentence = question("--worker", url).unwrap_err().to_string();
            assert!(sentence.starts_with(&format!("--worker {url}: ")) && sentence.contains(reason), "{sentence}");
        }
    }
}
