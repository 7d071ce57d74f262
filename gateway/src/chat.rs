//! What a conversation looks like to the model, and what the model's tokens look like to a client.
//!
//! Pure functions over messages, text and token ids.

pub mod encode;
pub mod output;
pub mod pyjson;
pub mod reasoning;
