//! What is checked of every input. Each target is one function over bytes that panics when a property is broken; the
//! gateway's own tests run the same functions over `seeds/`, so they cannot rot between two fuzzing runs.

use baleen_gateway::chat::delta::Delta;

pub mod chat_json;
mod client;
pub mod dsml;
mod input;
pub mod sse;
