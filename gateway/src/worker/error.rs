//! Why a worker cannot be used, in words for an operator.

use thiserror::Error;
use tonic::{Code, Status};

use super::dispatch::BrokenStream;
use super::{SILENCE_LIMIT, STALL_LIMIT};

/// Why a worker cannot be used right now.
#[derive(Debug, Error)]
pub enum WorkerError {
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    #[error("it is still loading its model")]
    Loading,
    #[error("{0}")]
    Refused(String),
    #[error("its stream broke: {0}")]
    Broken(String),
    #[error(transparent)]
    Stream(#[from] BrokenStream),
    #[error("it answered no heartbeat for {} s", SILENCE_LIMIT.as_secs())]
    Silent,
    #[error("it has requests and computed no step for {} s", STALL_LIMIT.as_secs())]
    Stalled,
}

impl From<Status> for WorkerError {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::Unavailable | Code::Cancelled | Code::Unknown => Self::Unreachable(describe(&status)),
            _ => Self::Refused(describe(&status)),
        }
    }
}

/// What a call's failure says.
pub(super) fn describe(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) if status.message().is_empty() => with_causes(source),
        _ if status.message().is_empty() => status.code().description().to_owned(),
        _ => status.message().to_owned(),
    }
}

/// An error and what caused it, on one line, without repetition.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}
