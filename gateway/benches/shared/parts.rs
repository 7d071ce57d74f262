//! What both measurements do with their parts: run those that were asked for, all of them by default, and print one JSON
//! object with what each has measured.

use serde_json::{Map, Value, json};

/// A part's name, and what measures it.
pub type Part = (&'static str, fn() -> Value);

/// Runs the parts that the command line names. Flags are cargo's and mean nothing here.
pub fn run(parts: &[Part]) {
    let asked: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut result = Map::new();
    for (name, measure) in parts {
        if asked.is_empty() || asked.iter().any(|part| part == name) {
            result.insert((*name).to_owned(), measure());
        }
    }
    println!("{:#}", json!(result));
}
