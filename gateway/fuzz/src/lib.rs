//! What is checked of every input. Each target is one function over bytes that panics when a property is broken; the
//! gateway's own tests run the same functions over `seeds/`, so they cannot rot between two fuzzing runs.

pub mod chat_json;
pub mod dsml;
mod input;
pub mod sse;
