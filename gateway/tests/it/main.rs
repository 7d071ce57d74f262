//! The gateway over real sockets: a real HTTP client in front, a scripted worker speaking the real contract behind.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod admission;
mod chat;
mod commands;
mod completions;
mod constraints;
mod discovery;
mod fake_worker;
mod fuzz_targets;
mod gateway;
mod hard_outputs;
mod http_rules;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod lifecycle;
mod messages;
mod openapi;
mod pairs;
mod recovery;
mod replay;
mod responses;
mod supervisor;
mod tokenize;
mod tools;
mod workers;
