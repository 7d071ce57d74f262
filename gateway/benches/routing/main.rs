//! What routing costs and what it gains: time of a decision, memory of the index, and a simulated fleet under each
//! policy. Prints one JSON object; `bench/routing.py` runs it, checks the bars and draws the curves.
//!
//! The fleet is simulated, the router is the product's own: it sees what it would see of real workers, one report a
//! second and events of caches, and nothing of the simulator's insides.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement prints its result and stops at an error")]

mod decision;
mod fleet;
#[path = "../shared/parts.rs"]
mod parts;
mod trace;

fn main() {
    parts::run(&[
        ("decision", decision::measure),
        ("conversations", fleet::conversations),
        ("gain", fleet::gain),
        ("scale", fleet::scale),
    ]);
}
