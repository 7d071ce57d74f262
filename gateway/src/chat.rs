//! What a conversation looks like to the model, and what the model's tokens look like to a client.
//!
//! Pure functions over messages, text and token ids.

pub mod calls;
pub mod constraint;
pub mod control;
pub mod delta;
pub mod dialect;
pub mod dsml;
pub mod encode;
pub mod legacy;
pub mod markers;
pub mod output;
pub mod pyjson;
pub mod reasoning;
mod seams;
pub mod style;
