//! The front of Baleen: an OpenAI-compatible HTTP server for DeepSeek-V3.2 workers.
//!
//! The gateway owns text: chat encoding, tokenizing, detokenizing, stop strings, reasoning. Workers own tokens: only
//! token ids cross the wire. Dependencies point one way: `http` → `generate` → `chat`, `text`, `route`, `worker`.
//! The gateway keeps no state beyond the requests in progress.

pub mod admission;
pub mod app;
pub mod chat;
pub mod cli;
pub mod config;
pub mod discovery;
pub mod error;
pub mod generate;
pub mod http;
pub mod openai;
pub mod route;
pub mod supervisor;
pub mod telemetry;
pub mod text;
pub mod text_pool;
pub mod worker;
