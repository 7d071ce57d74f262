//! Workers that come and go while the gateway runs: those that a file lists, those that a name in DNS stands for, and
//! those that Kubernetes has for a Service.
//!
//! What a source says is followed by `follow`; a source that cannot be read changes nothing.

use std::time::Duration;

pub mod dns;
pub mod follow;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;

/// The first pause after Kubernetes' API server has failed; each further one is twice as long, up to a bound.
pub const LEAST_PAUSE: Duration = Duration::from_millis(500);
