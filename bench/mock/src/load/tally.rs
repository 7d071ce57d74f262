//! What came back, counted.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::connection::Answer;

/// See the module.
#[derive(Debug, Default)]
pub struct Tally {
    by_status: BTreeMap<u16, u64>,
    latencies_us: Vec<u32>,
    first_bytes_us: Vec<u32>,
    refusals_us: Vec<u32>,
    retry_afters: u64,
    pub gaps_us: Vec<u32>,
    events: u64,
    reads: u64,
}

impl Tally {
    /// Counts an answer to a request that was due at `due`. Times are those of successes, and apart from them those of
    /// refusals that ask to come again later.
    pub fn count(&mut self, answer: &Answer, due: Instant) {
        *self.by_status.entry(answer.status).or_default() += 1;
        if matches!(answer.status, 429 | 503) {
            self.refusals_us.push(us(answer.end - due));
            self.retry_afters += u64::from(answer.has_retry_after);
        }
        if answer.status != 200 {
            return;
        }
        self.events += u64::from(answer.events);
        self.reads += u64::from(answer.reads);
        self.latencies_us.push(us(answer.end - due));
        self.first_bytes_us.extend(answer.first_byte.map(|first| us(first - due)));
    }

    pub fn add(&mut self, other: Self) {
        for (status, count) in other.by_status {
            *self.by_status.entry(status).or_default() += count;
        }
        self.latencies_us.extend(other.latencies_us);
        self.first_bytes_us.extend(other.first_bytes_us);
        self.gaps_us.extend(other.gaps_us);
        self.refusals_us.extend(other.refusals_us);
        self.retry_afters += other.retry_afters;
        self.events += other.events;
        self.reads += other.reads;
    }

    /// Everything as JSON; rates are over `seconds`.
    pub fn report(mut self, seconds: f64) -> Value {
        let good = self.by_status.get(&200).copied().unwrap_or_default();
        json!({
            "by_status": self.by_status.iter().map(|(status, count)| (status.to_string(), *count)).collect::<BTreeMap<_, _>>(),
            "good": good,
            "good_per_s": good as f64 / seconds,
            "events": self.events,
            "events_per_read": self.events as f64 / self.reads.max(1) as f64,
            "latency_us": quantiles(&mut self.latencies_us),
            "first_byte_us": quantiles(&mut self.first_bytes_us),
            "gap_us": quantiles(&mut self.gaps_us),
            "refusals": self.refusals_us.len(),
            "retry_afters": self.retry_afters,
            "refusal_us": quantiles(&mut self.refusals_us),
        })
    }
}

fn us(duration: std::time::Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

fn quantiles(values: &mut [u32]) -> Value {
    if values.is_empty() {
        return Value::Null;
    }
    values.sort_unstable();
    let at = |q: f64| values[((values.len() - 1) as f64 * q).round() as usize];
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64;
    json!({"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999), "max": at(1.0)})
}
