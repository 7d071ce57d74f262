//! The API keys in force: whose a request is, and what that holder uses at this moment.
//!
//! Keys are compared by digest, all of them at every request, so that the time it takes tells nothing. A new set of
//! keys replaces the old one at once; who keeps a name keeps its count of requests and its balance.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::{HeaderMap, header};
use subtle::ConstantTimeEq;

use super::quota::TokenBucket;
use crate::config::keys::{KeySpec, digest};
use crate::telemetry::Metrics;
use crate::telemetry::keys::{KeyMetrics, Refusal};

/// Anthropic's clients send their key in this header.
const API_KEY_HEADER: &str = "x-api-key";

/// See the module.
pub struct Keyring {
    metrics: Arc<Metrics>,
    keys: ArcSwap<Vec<Arc<Key>>>,
}

/// One key in force.
pub struct Key {
    pub spec: KeySpec,
    usage: Arc<Usage>,
}

/// What the holder of a name uses. Outlives a change of its key.
struct Usage {
    num_present: AtomicUsize,
    bucket: Mutex<Option<TokenBucket>>,
    metrics: KeyMetrics,
}

/// Whose a request is.
#[derive(Clone)]
pub enum Caller {
    /// No keys are configured: everybody may do everything.
    Anybody,
    Holder(Arc<Key>),
}

/// Why a caller may not come in now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverLimit {
    Concurrency { max: u32 },
    Tokens { per_minute: u32, wait: Duration },
}

/// A caller's place among its own requests; dropping it gives the place back.
pub struct Place(Caller);

impl Drop for Place {
    fn drop(&mut self) {
        if let Caller::Holder(key) = &self.0 {
            key.usage.num_present.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Keyring {
    /// The keys of `specs`; none at all lets everybody in.
    #[must_use]
    pub fn new(specs: Vec<KeySpec>, metrics: Arc<Metrics>) -> Self {
        let ring = Self { metrics, keys: ArcSwap::default() };
        ring.replace(specs);
        ring
    }

    /// From now on these keys are in force. Requests in progress go on.
    pub fn replace(&self, specs: Vec<KeySpec>) {
        let before = self.keys.load();
        let keys = specs.into_iter().map(|spec| {
            let known = before.iter().find(|key| key.spec.name == spec.name);
            let usage = known.map_or_else(|| Arc::new(Usage::new(&spec.name, &self.metrics)), |key| key.usage.clone());
            Arc::new(Key { spec, usage })
        });
        self.keys.store(Arc::new(keys.collect()));
    }

    /// Whose request this is; `None` where its key is missing or unknown.
    #[must_use]
    pub fn identify(&self, headers: &HeaderMap) -> Option<Caller> {
        let keys = self.keys.load();
        if keys.is_empty() {
            return Some(Caller::Anybody);
        }
        let shown = digest(shown_key(headers)?);
        let mut found = None;
        for key in keys.iter() {
            if bool::from(key.spec.digest.ct_eq(&shown)) {
                found = Some(key);
            }
        }
        found.cloned().map(Caller::Holder)
    }

    /// Every key's name and how many requests it has present.
    pub fn publish(&self) {
        for key in self.keys.load().iter() {
            key.usage.metrics.set_present(key.usage.num_present.load(Ordering::Relaxed));
        }
    }
}

/// The key that a request shows, as a bearer token or in Anthropic's header.
fn shown_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name| headers.get(name).and_then(|value| http::HeaderValue::to_str(value).ok());
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text(API_KEY_HEADER).map(str::trim))
}

impl Caller {
    /// Takes a place for one more request.
    ///
    /// # Errors
    /// The key's own limits do not allow it now.
    pub fn enter(&self, now: Instant) -> Result<Place, OverLimit> {
        if let Self::Holder(key) = self {
            key.enter(now)?;
        }
        Ok(Place(self.clone()))
    }

    /// Pays for the tokens of a prompt.
    pub fn charge_prompt(&self, num_tokens: u32) {
        if let Self::Holder(key) = self {
            key.usage.metrics.prompt_tokens.increment(num_tokens.into());
            key.charge(num_tokens);
        }
    }

    /// Pays for generated tokens.
    pub fn charge_output(&self, num_tokens: u32) {
        if let Self::Holder(key) = self {
            key.usage.metrics.output_tokens.increment(num_tokens.into());
            key.charge(num_tokens);
        }
    }

    /// What is counted for this caller by name, if it has one.
    #[must_use]
    pub fn metrics(&self) -> Option<&KeyMetrics> {
        match self {
            Self::Anybody => None,
            Self::Holder(key) => Some(&key.usage.metrics),
        }
    }

    /// Whether the operator's routes are open to it.
    #[must_use]
    pub fn is_operator(&self) -> bool {
        match self {
            Self::Anybody => true,
            Self::Holder(key) => key.spec.operator,
        }
    }
}

impl Key {
    fn enter(&self, now: Instant) -> Result<(), OverLimit> {
        let present = &self.usage.num_present;
        let before = present.fetch_add(1, Ordering::Relaxed);
        let allowed = match self.spec.max_concurrent_requests {
            Some(max) if before >= max as usize => Err(OverLimit::Concurrency { max }),
            _ => self.check_tokens(now),
        };
        allowed.inspect_err(|limit| {
            present.fetch_sub(1, Ordering::Relaxed);
            self.usage.metrics.count_refusal(match limit {
                OverLimit::Concurrency { .. } => Refusal::Concurrency,
                OverLimit::Tokens { .. } => Refusal::Tokens,
            });
        })
    }

    fn check_tokens(&self, now: Instant) -> Result<(), OverLimit> {
        let Some(per_minute) = self.spec.tokens_per_minute else { return Ok(()) };
        let mut bucket = self.usage.bucket();
        let bucket = bucket.get_or_insert_with(|| TokenBucket::full(per_minute, now));
        bucket.check(per_minute, now).map_err(|wait| OverLimit::Tokens { per_minute, wait })
    }

    fn charge(&self, num_tokens: u32) {
        let Some(per_minute) = self.spec.tokens_per_minute else { return };
        let now = Instant::now();
        let mut bucket = self.usage.bucket();
        bucket.get_or_insert_with(|| TokenBucket::full(per_minute, now)).charge(num_tokens, per_minute, now);
    }
}

impl Usage {
    fn new(name: &str, metrics: &Metrics) -> Self {
        Self { num_present: AtomicUsize::new(0), bucket: Mutex::default(), metrics: KeyMetrics::new(name, metrics) }
    }

    fn bucket(&self) -> MutexGuard<'_, Option<TokenBucket>> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn spec(name: &str, key: &str) -> KeySpec {
        KeySpec { name: name.into(), operator: false, ..KeySpec::single(digest(key)) }
    }

    fn ring(specs: Vec<KeySpec>) -> Keyring {
        Keyring::new(specs, Arc::new(Metrics::new()))
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    fn name(caller: Option<Caller>) -> String {
        match caller {
            Some(Caller::Holder(key)) => key.spec.name.clone(),
            Some(Caller::Anybody) => "anybody".into(),
            None => "nobody".into(),
        }
    }

    #[test]
    fn a_key_names_its_holder_in_either_header() {
        let ring = ring(vec![spec("alice", "a"), spec("bob", "b")]);
        for (header, value, expected) in [
            ("authorization", "Bearer a", "alice"),
            ("authorization", "bearer  b ", "bob"),
            ("x-api-key", "b", "bob"),
            ("authorization", "Bearer c", "nobody"),
            ("authorization", "Basic a", "nobody"),
            ("authorization", "a", "nobody"),
            ("authorization", "Bearer ", "nobody"),
            ("x-other", "a", "nobody"),
        ] {
            assert_eq!(name(ring.identify(&headers(header, value))), expected, "{header}: {value}");
        }
        assert_eq!(name(super::Keyring::new(vec![], Arc::new(Metrics::new())).identify(&HeaderMap::new())), "anybody");
    }

    #[test]
    fn a_place_is_held_until_it_is_dropped() {
        let ring = ring(vec![KeySpec { max_concurrent_requests: Some(1), ..spec("alice", "a") }]);
        let alice = ring.identify(&headers("x-api-key", "a")).unwrap();
        let now = Instant::now();
        let place = alice.enter(now).unwrap();
        assert_eq!(alice.enter(now).err(), Some(OverLimit::Concurrency { max: 1 }));
        drop(place);
        assert!(alice.enter(now).is_ok());
    }

    #[test]
    fn who_keeps_a_name_keeps_its_use_when_keys_change() {
        let limited =
            |key| KeySpec { max_concurrent_requests: Some(1), tokens_per_minute: Some(100), ..spec("alice", key) };
        let ring = ring(vec![limited("old"), spec("bob", "b")]);
        let now = Instant::now();
        let old = ring.identify(&headers("x-api-key", "old")).unwrap();
        let place = old.enter(now).unwrap();
        ring.replace(vec![limited("new")]);
        for gone in ["old", "b"] {
            assert_eq!(name(ring.identify(&headers("x-api-key", gone))), "nobody");
        }
        let new = ring.identify(&headers("x-api-key", "new")).unwrap();
        assert_eq!(new.enter(now).err(), Some(OverLimit::Concurrency { max: 1 }));
        old.charge_output(1000);
        drop(place);
        assert!(matches!(new.enter(now).err(), Some(OverLimit::Tokens { per_minute: 100, .. })));
    }
}
