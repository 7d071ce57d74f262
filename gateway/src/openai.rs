//! The OpenAI-compatible wire: request bodies into validated specifications, results into response objects.
//!
//! Unvalidated types stop here: what leaves this module obeys the one table of limits that the worker reads too.

pub mod abort;
pub mod anthropic;
pub mod chat;
pub mod completions;
pub mod constraint;
pub mod error;
pub mod facts;
mod fields;
pub mod generation;
pub mod limits;
pub mod logprobs;
pub mod models;
mod node;
pub mod openapi;
mod processors;
pub mod response;
pub mod responses;
mod rewrite;
pub mod sampling;
pub mod sections;
mod strict_json;
pub mod tokenize;
pub mod workers;

pub use error::{ErrorObject, InvalidRequest, RejectKind};
pub use facts::ModelFacts;
pub use generation::{GenerationSpec, StreamSpec};
pub use limits::Limits;
pub use sampling::SamplingSpec;

#[cfg(test)]
mod tests;
