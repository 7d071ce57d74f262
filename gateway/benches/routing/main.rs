//! What routing costs and what it gains: time of a decision, memory of the index, and a simulated fleet under each
//! policy. Prints one JSON object; `bench/routing.py` runs it, checks the bars and draws the curves.
//!
//! The fleet is simulated, the router is the product's own: it sees what it would see of real workers, one report a
//! second and events of caches, and nothing of the simulator's insides.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement prints its result and stops at an error")]

mod decision;
mod fleet;
mod trace;

use serde_json::{Map, Value, json};

type Part = (&'static str, fn() -> Value);

const PARTS: &[Part] = &[
    ("decision", decision::measure),
    ("conversations", fleet::conversations),
    ("gain", fleet::gain),
    ("scale", fleet::scale),
];

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut result = Map::new();
    for (name, measure) in PARTS {
        if asked.is_empty() || asked.iter().any(|part| part == name) {
            result.insert((*name).to_owned(), measure());
        }
    }
    println!("{:#}", json!(result));
}
