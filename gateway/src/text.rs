//! Text and token ids: the tokenizer, what it need not do twice, the incremental way back from ids to text, and stop
//! strings.
//!
//! Everything here is pure: no I/O, no clock, no async.

pub mod detokenizer;
pub mod spans;
pub mod stop;
pub mod tokenizer;
