//! Which session a request belongs to, where its headers say so: requests of one session go to one worker under the
//! policy `consistent_hashing`.

use http::HeaderMap;
use xxhash_rust::xxh3::xxh3_64;

/// The first of these that is there and not empty names the session: the one that SGLang's router reads, and a common one.
/// A header counts before the body's fields, since whoever stands in between can set it.
const HEADERS: [&str; 2] = ["x-smg-routing-key", "x-session-id"];

/// Hash of the session's name.
#[must_use]
pub fn of_headers(headers: &HeaderMap) -> Option<u64> {
    let named = HEADERS.iter().filter_map(|name| headers.get(*name));
    named.map(http::HeaderValue::as_bytes).find(|name| !name.is_empty()).map(xxh3_64)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::of_headers;

    #[test]
    fn a_session_is_named_by_the_first_header_that_says_something() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            let pairs = pairs
                .iter()
                .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)));
            of_headers(&pairs.collect::<HeaderMap>())
        };
        assert_eq!(of(&[("x-request-id", "a")]), None);
        assert_eq!(of(&[("x-session-id", "")]), None);
        assert!(of(&[("x-session-id", "a")]).is_some());
        assert_ne!(of(&[("x-session-id", "a")]), of(&[("x-session-id", "b")]));
        assert_eq!(of(&[("x-session-id", "b"), ("x-smg-routing-key", "a")]), of(&[("x-session-id", "a")]));
        assert_eq!(of(&[("x-session-id", "b"), ("x-smg-routing-key", "")]), of(&[("x-session-id", "b")]));
    }
}
