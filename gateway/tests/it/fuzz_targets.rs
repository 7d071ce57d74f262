//! The fuzz targets over recorded outputs and conversations, over what fuzzing has kept, and over all of those with a few
//! bytes changed: they hold, and they cannot rot between two runs of `make fuzz`.

use serde_json::{Value, json};

use targets::{chat_json, dsml, sse};

#[path = "../../fuzz/src/lib.rs"]
pub mod targets;

const OUTPUTS: &str = include_str!("../data/dsml/parse.jsonl");
const CONVERSATIONS: &str = include_str!("../data/dsml/encode.jsonl");
/// Changed copies of each input.
const CHANGES: u32 = 8;

fn rows(text: &str) -> impl Iterator<Item = Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap())
}

/// Recorded outputs behind each kind of settings.
fn outputs(flags: &[u8]) -> Vec<Vec<u8>> {
    let raw: Vec<String> = rows(OUTPUTS).map(|row| row["raw_text"].as_str().unwrap().to_owned()).collect();
    let with = |flags: u8| raw.iter().zip(0..).map(move |(text, seed)| [&[flags, seed], text.as_bytes()].concat());
    flags.iter().flat_map(|flags| with(*flags)).collect()
}

/// Inputs that fuzzing has kept: a line of hexadecimal digits each.
fn kept(lines: &str) -> Vec<Vec<u8>> {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    lines.lines().map(|line| line.as_bytes().chunks(2).map(byte).collect()).collect()
}

/// The input itself, then copies in which bytes are changed, taken out or repeated.
fn variants(input: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let mut state = 0x9E37_79B9_u32;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as usize % below.max(1)
    };
    let changed = (0..CHANGES).map({
        let input = input.to_vec();
        move |_| {
            let mut copy = input.clone();
            for _ in 0..=random(3) {
                let at = random(copy.len());
                let end = (at + 1 + random(12)).min(copy.len());
                match random(3) {
                    0 if at < copy.len() => copy[at] = u8::try_from(random(256)).unwrap(),
                    1 => drop(copy.drain(at.min(end)..end)),
                    _ => copy.extend_from_within(at.min(end)..end),
                }
            }
            copy
        }
    });
    std::iter::once(input.to_vec()).chain(changed)
}

#[test]
fn dsml() {
    let inputs = outputs(&[0, 1, 2, 3, 4, 8, 9, 16, 17]);
    let kept = kept(include_str!("../../fuzz/seeds/dsml.hex"));
    inputs.iter().chain(&kept).flat_map(|input| variants(input)).for_each(|input| dsml::run(&input));
}

#[test]
fn sse() {
    let inputs = outputs(&[0, 1, 4, 5, 0x0C, 0x2D, 0x7C, 0x80, 0xBF]);
    let kept = kept(include_str!("../../fuzz/seeds/sse.hex"));
    inputs.iter().chain(&kept).flat_map(|input| variants(input)).for_each(|input| sse::run(&input));
}

#[test]
fn chat_json() {
    let bodies = rows(CONVERSATIONS).map(|row| match row.get("request") {
        Some(request) => request.to_string(),
        None => json!({ "messages": row["messages"], "max_tokens": 16, "stop": ["a"] }).to_string(),
    });
    for body in bodies.chain(["".to_owned(), "[]".to_owned(), "{\"messages\": []}".to_owned()]) {
        variants(body.as_bytes()).for_each(|body| chat_json::run(&body));
    }
    let kept = kept(include_str!("../../fuzz/seeds/chat_json.hex"));
    kept.iter().flat_map(|input| variants(input)).for_each(|body| chat_json::run(&body));
}
