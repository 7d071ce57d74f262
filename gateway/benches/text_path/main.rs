//! What text costs: parsing of output, tokenization of prompts, and one streamed token, in CPU time of one thread.
//!
//! Prints one JSON object; `bench/text_path.py` runs it and holds it against the bars. With
//! `BALEEN_V32_TOKENIZER=/path/to/tokenizer.json` prompts are tokenized by the whole vocabulary of DeepSeek-V3.2,
//! without it by the micro model's. `text_path parser` (or `tokens`, `stream`) measures one part alone.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement prints its result and stops at an error")]

mod clock;
mod corpus;
mod parser;
#[path = "../shared/parts.rs"]
mod parts;
mod shapes;
mod stream;
mod tokens;

fn main() {
    parts::run(&[("parser", parser::measure), ("tokens", tokens::measure), ("stream", stream::measure)]);
}
