//! Workers that come and go while the gateway runs: those that a file lists, those that a name in DNS stands for, and
//! those that Kubernetes has for a Service.
//!
//! What a source says is followed by `follow`; a source that cannot be read changes nothing.

pub mod dns;
pub mod follow;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
