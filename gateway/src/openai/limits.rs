//! The one table of numeric limits, shared with the worker through `limits.json` of the contract.

use std::collections::HashMap;

use serde::Deserialize;

use super::error::InvalidRequest;
use crate::chat::constraint::Constraint;

const TABLE: &str = include_str!("../../../proto/baleen/worker/v1/limits.json");

/// Bounds of one field; absent ones do not bind.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    #[serde(default = "unbounded_below")]
    pub min: f64,
    #[serde(default = "unbounded_above")]
    pub max: f64,
    /// `min` itself is not allowed.
    #[serde(default)]
    pub min_exclusive: bool,
    pub max_items: Option<usize>,
    pub max_bytes: Option<usize>,
}

fn unbounded_below() -> f64 {
    f64::NEG_INFINITY
}

fn unbounded_above() -> f64 {
    f64::INFINITY
}

/// What a request may hold before it becomes tokens; only the gateway sees it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestLimits {
    pub n: Limit,
    pub stop: Limit,
    pub messages: Limit,
    pub content_parts: Limit,
    pub tools: Limit,
    pub tool_calls: Limit,
    /// One JSON Schema, regular expression or grammar.
    pub schema: Limit,
    /// Texts to choose among.
    pub choice: Limit,
}

/// Fields of `Sampling` and `Submit`, and of requests.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub max_tokens: Limit,
    pub min_tokens: Limit,
    pub temperature: Limit,
    pub top_p: Limit,
    pub top_k: Limit,
    pub min_p: Limit,
    pub repetition_penalty: Limit,
    pub frequency_penalty: Limit,
    pub presence_penalty: Limit,
    pub logit_bias: Limit,
    pub seed: Limit,
    pub stop_token_ids: Limit,
    pub logprobs: Limit,
    pub prompt_logprobs: Limit,
    pub thinking_budget: Limit,
    pub priority: Limit,
    pub deadline_ms: Limit,
    pub cache_salt: Limit,
    pub constraint: Limit,
    pub logit_processors: Limit,
    #[serde(skip)]
    pub request: RequestLimits,
}

impl Limits {
    /// Parses the table that was built in. It fails when the table and this program disagree on the fields.
    pub fn load() -> Result<Self, serde_json::Error> {
        #[derive(Deserialize)]
        struct Table {
            fields: Limits,
            request: RequestLimits,
        }
        serde_json::from_str::<Table>(TABLE).map(|Table { fields, request }| Self { request, ..fields })
    }
}

impl Limits {
    /// Whether what was compiled from the request's `field` fits into a submit.
    pub(crate) fn check_constraint(&self, field: &str, constraint: &Constraint) -> Result<(), InvalidRequest> {
        match self.constraint.max_bytes {
            Some(max) if constraint.text().len() > max => {
                let message = format!(
                    "'{field}' makes a grammar of {} bytes; at most {max} are allowed. Declare fewer or simpler schemas.",
                    constraint.text().len()
                );
                Err(InvalidRequest::field(field, message))
            }
            _ => Ok(()),
        }
    }

    /// The same rows by name.
    pub(super) fn table() -> Result<HashMap<String, Limit>, serde_json::Error> {
        #[derive(Deserialize)]
        struct Table {
            fields: HashMap<String, Limit>,
            request: HashMap<String, Limit>,
        }
        serde_json::from_str(TABLE).map(|Table { fields, request }| fields.into_iter().chain(request).collect())
    }
}

impl Limit {
    /// The value as the worker will see it, in range.
    pub(super) fn check_f32(&self, param: &str, value: f64) -> Result<f32, InvalidRequest> {
        #[expect(clippy::cast_possible_truncation, reason = "the wire carries single precision")]
        let single = value as f32;
        let holds = |number: f64| {
            let above = if self.min_exclusive { number > self.min } else { number >= self.min };
            above && number <= self.max
        };
        // As it was written and as it is rounded: either may cross a bound that the other respects.
        if holds(value) && holds(f64::from(single)) {
            return Ok(single);
        }
        Err(self.out_of_range(param, &value.to_string()))
    }

    /// The value as an unsigned integer, in range.
    pub(super) fn check_u32(&self, param: &str, value: i128) -> Result<u32, InvalidRequest> {
        self.check_integer(param, value)
    }

    pub(super) fn check_integer<T: TryFrom<i128>>(&self, param: &str, value: i128) -> Result<T, InvalidRequest> {
        #[expect(clippy::cast_precision_loss, reason = "every integer bound is exact in double precision")]
        let seen = value as f64;
        let in_range = seen >= self.min && seen <= self.max;
        match T::try_from(value) {
            Ok(number) if in_range => Ok(number),
            _ => Err(self.out_of_range(param, &digits(value))),
        }
    }

    pub(super) fn check_items(&self, param: &str, items: usize) -> Result<(), InvalidRequest> {
        match self.max_items {
            Some(max) if items > max => {
                let message = format!("'{param}' has {items} entries; at most {max} are allowed.");
                Err(InvalidRequest::field(param, message))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_bytes(&self, param: &str, bytes: usize) -> Result<(), InvalidRequest> {
        match self.max_bytes {
            Some(max) if bytes > max => {
                let message = format!("'{param}' is {bytes} bytes long; at most {max} are allowed.");
                Err(InvalidRequest::field(param, message))
            }
            _ => Ok(()),
        }
    }

    fn out_of_range(&self, param: &str, value: &str) -> InvalidRequest {
        let Self { min, max, .. } = self;
        let range = if self.min_exclusive {
            format!("above {min} and at most {max}")
        } else {
            format!("between {min} and {max}")
        };
        InvalidRequest::field(param, format!("'{param}' must be {range}, but it is {value}."))
    }
}

/// An integer for a message; of one beyond 64 bits the last digits are not known.
pub(super) fn digits(value: i128) -> String {
    if value > u64::MAX.into() || value < i64::MIN.into() { "beyond 64 bits".to_owned() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::Limits;

    #[test]
    fn the_built_in_table_is_complete_and_its_bounds_hold() {
        let limits = Limits::load().unwrap();
        assert!(limits.temperature.check_f32("temperature", 2.0).is_ok());
        for bad in [-0.1, 2.1, f64::NAN, f64::INFINITY] {
            let error = limits.temperature.check_f32("temperature", bad).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("temperature"), "{bad}");
        }
        // Too small for single precision is zero to the worker, and zero is excluded.
        assert!(limits.top_p.check_f32("top_p", 1e-60).is_err());
        assert!(limits.top_p.check_f32("top_p", 1e-30).is_ok());
        // Just above the bound is the bound itself in single precision.
        assert!(limits.min_p.check_f32("min_p", 1.0 + f64::EPSILON).is_err());
        assert!(limits.logprobs.check_u32("logprobs", 20).is_ok());
        assert!(limits.logprobs.check_u32("logprobs", 21).is_err());
        assert!(limits.priority.check_integer::<i32>("priority", -1000).is_ok());
        assert!(limits.max_tokens.check_u32("max_tokens", 1 << 32).is_err());
        assert!(limits.cache_salt.check_bytes("cache_salt", 257).is_err());
        assert!(limits.logit_bias.check_items("logit_bias", 301).is_err());
    }
}
