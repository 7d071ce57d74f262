//! Text and token ids: the tokenizer, the incremental way back from ids to text, and stop strings.
//!
//! Everything here is pure: no I/O, no clock, no async.

pub mod detokenizer;
pub mod stop;
pub mod tokenizer;
