//! How fast output becomes content and calls.

use baleen_gateway::chat::calls::CallParser;
use baleen_gateway::chat::delta::Delta;
use baleen_gateway::chat::dialect::Dialect;
use baleen_gateway::chat::markers::Lexer;
use serde_json::{Value, json};

use crate::clock::{least_ns, mb_per_s, round};
use crate::corpus;
use crate::shapes::SHAPES;

const MEGABYTE: usize = 1 << 20;
const TIMES: usize = 7;
/// Bytes of a push: all at once, about a token, and a character.
const FEEDS: [(&str, usize); 3] = [("whole", usize::MAX), ("tokens", 4), ("characters", 1)];

pub fn measure() -> Value {
    let plain = corpus::text(4 * MEGABYTE, 0);
    let calls = calls(4 * MEGABYTE);
    let speed = |text: &str, bytes| mb_per_s(text.len(), least_ns(TIMES, || read(text, bytes)));
    let speeds = FEEDS.map(|(feed, bytes)| {
        json!({ "feed": feed, "plain_mb_per_s": speed(&plain, bytes), "dsml_mb_per_s": speed(&calls, bytes) })
    });
    let growth: Vec<Value> = SHAPES.iter().flat_map(|shape| FEEDS.map(|feed| growth(shape, feed))).collect();
    json!({ "speeds": speeds, "growth": growth })
}

/// Time for two megabytes over time for one.
fn growth(shape: &crate::shapes::Shape, (feed, bytes): (&str, usize)) -> Value {
    let (one, two) = (shape.text(MEGABYTE), shape.text(2 * MEGABYTE));
    let (mut one_ns, mut two_ns) = (u64::MAX, u64::MAX);
    // Taken in turns, so that a slow spell of the machine meets both.
    for _ in 0..TIMES {
        one_ns = one_ns.min(least_ns(1, || read(&one, bytes)));
        two_ns = two_ns.min(least_ns(1, || read(&two, bytes)));
    }
    let ratio = round(two_ns as f64 / one_ns as f64);
    json!({ "shape": shape.name, "feed": feed, "ratio": ratio, "mb_per_s": mb_per_s(two.len(), two_ns) })
}

/// What the answer of `text` is, in bytes; the text comes in pushes of `bytes`, rounded up to whole characters.
fn read(text: &str, bytes: usize) -> usize {
    let mut parser = CallParser::new(Dialect::V32, false, u32::MAX);
    let mut lexer = Lexer::new(Dialect::V32.markers());
    let mut delta = Delta::default();
    let mut length = 0;
    let mut rest = text;
    while !rest.is_empty() {
        let end = (bytes..rest.len()).find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
        let (chunk, after) = rest.split_at(end);
        rest = after;
        lexer.push(chunk, |piece| parser.push(piece, &mut delta));
        length += len_and_clear(&mut delta);
    }
    lexer.finish(|piece| parser.push(piece, &mut delta));
    parser.finish(false, &mut delta);
    length + len_and_clear(&mut delta)
}

fn len_and_clear(delta: &mut Delta) -> usize {
    let length = delta.content.len() + delta.calls.iter().map(|call| call.arguments.len()).sum::<usize>();
    delta.clear();
    length
}

/// Calls as the model writes them, with short and long strings, numbers and nested JSON.
fn calls(bytes: usize) -> String {
    let mut text = String::from("I look it up.\n\n<｜DSML｜function_calls>\n");
    let mut number = 0;
    while text.len() < bytes {
        let long = corpus::text(1024, number).replace("｜DSML｜", "");
        text.push_str(&format!(
            "<｜DSML｜invoke name=\"write_file\">\n\
             <｜DSML｜parameter name=\"path\" string=\"true\">src/part_{number}.rs</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"text\" string=\"true\">{long}</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"mode\" string=\"false\">{number}</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"options\" string=\"false\">{{\"a\": [1, 2.5, null], \"b\": {{\"c\": \"d\"}}}}</｜DSML｜parameter>\n\
             </｜DSML｜invoke>\n"
        ));
        number += 1;
    }
    text.push_str("</｜DSML｜function_calls>");
    text
}
