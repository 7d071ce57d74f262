//! Who may come in: the API key with its limits, one of a bounded number of permits, and a deadline. What asks for them
//! of every request is in `http::entry`.
//!
//! What a request holds here is a value, `Admitted`: dropping it, wherever that happens, gives everything back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;

use crate::config::{Config, KeyFile};
use crate::error::ApiError;
use crate::telemetry::Metrics;

pub mod keyring;
pub mod queue;
pub mod quota;

use keyring::{Caller, Keyring, OverLimit, Place};
use queue::{Permit, Queue, Refused};

/// A client's own limit on the time of its request.
const TIMEOUT_HEADER: &str = "x-request-timeout-ms";
const MAX_RETRY_AFTER_S: u64 = 3600;

/// Keys and permits of one gateway.
pub struct Admission {
    keys: Keyring,
    queue: Queue,
    metrics: Arc<Metrics>,
    max_request_time: Duration,
}

/// A request that was let in.
pub struct Admitted {
    pub caller: Caller,
    _place: Place,
    _permit: Permit,
}

impl Admission {
    #[must_use]
    pub fn new(config: &Config, metrics: Arc<Metrics>) -> Self {
        let limits = &config.limits;
        Self {
            keys: Keyring::new(config.keys(config.api_key_file.as_ref()), metrics.clone()),
            queue: Queue::new(limits.max_concurrent_requests, limits.queue_size, limits.queue_timeout),
            metrics,
            max_request_time: limits.max_request_time,
        }
    }

    /// Lets a request of `caller` in, at once or after a wait in line. Whoever cannot wait any longer drops the future.
    ///
    /// # Errors
    /// 429 where the key's limits or the line do not allow it now.
    pub async fn admit(&self, caller: &Caller) -> Result<Admitted, ApiError> {
        let arrived = Instant::now();
        let place = caller.enter(arrived).map_err(over_limit)?;
        let permit = self.queue.enter().await.map_err(|refused| match refused {
            Refused::Full { retry_after_s } => ApiError::queue_full(self.queue.max_active(), retry_after_s),
            Refused::TooLong { retry_after_s } => ApiError::queue_timeout(retry_after_s),
        })?;
        if permit.has_waited() {
            self.metrics.queue_time.record(arrived.elapsed().as_secs_f64());
        }
        Ok(Admitted { caller: caller.clone(), _place: place, _permit: permit })
    }

    /// The instant by which a request that arrived at `arrived` must be finished, as far as its headers say.
    ///
    /// # Errors
    /// 400 where the header is not a time.
    pub fn deadline(&self, headers: &HeaderMap, arrived: Instant) -> Result<Instant, ApiError> {
        let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(self.deadline_after(None, arrived)) };
        match value.to_str().ok().and_then(|text| text.parse::<u64>().ok()) {
            Some(ms @ 1..) => Ok(self.deadline_after(Some(ms), arrived)),
            _ => Err(ApiError::bad_header(
                TIMEOUT_HEADER,
                format!("The header `{TIMEOUT_HEADER}` should be a whole number of milliseconds, at least 1."),
            )),
        }
    }

    /// The same for a request whose body asks for `ms`: never later than the server's own limit.
    #[must_use]
    pub fn deadline_after(&self, ms: Option<u64>, arrived: Instant) -> Instant {
        let asked = ms.map_or(Duration::MAX, Duration::from_millis);
        arrived + asked.min(self.max_request_time)
    }

    /// Whose request this is by the key in its headers: nobody's where that is no key in force.
    #[must_use]
    pub fn identify(&self, headers: &HeaderMap) -> Option<Caller> {
        self.keys.identify(headers)
    }

    /// Puts the keys of a file that has changed in force, beside `--api-key`.
    pub fn replace_keys(&self, config: &Config, file: &KeyFile) {
        self.keys.replace(config.keys(Some(file)));
    }

    /// Requests in progress.
    #[must_use]
    pub fn active(&self) -> usize {
        self.queue.active()
    }

    /// Requests in line.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Brings the gauges up to date.
    pub fn publish(&self) {
        self.metrics.set_active(self.queue.active(), self.queue.max_active(), self.queue.waiting());
        self.keys.publish();
    }
}

fn over_limit(limit: OverLimit) -> ApiError {
    match limit {
        OverLimit::Concurrency { max } => ApiError::key_concurrency(max),
        OverLimit::Tokens { per_minute, wait } => {
            let seconds = wait.as_secs().saturating_add(1).min(MAX_RETRY_AFTER_S);
            ApiError::key_tokens(per_minute, u32::try_from(seconds).unwrap_or(u32::MAX))
        }
    }
}
