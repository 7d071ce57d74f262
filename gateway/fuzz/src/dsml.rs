//! A model's raw output, read as calls: any division into chunks gives the same answer, no markup reaches content, and
//! what a client has of a call's arguments is always the start of one JSON object.

use baleen_gateway::chat::calls::CallParser;
use baleen_gateway::chat::dialect::Dialect;
use baleen_gateway::chat::markers::{Lexer, Marker};
use serde::de::IgnoredAny;

use super::client::Client;
use super::{Delta, input};

/// How an output is read.
#[derive(Debug, Clone, Copy)]
pub struct Reader {
    pub dialect: Dialect,
    pub is_thinking: bool,
    pub is_cut: bool,
    pub max_calls: u32,
}

/// Two bytes of settings, then the output.
pub fn run(data: &[u8]) {
    let (flags, seed, output) = input::settings(data);
    let output = String::from_utf8_lossy(output);
    let reader = Reader {
        dialect: match flags >> 3 & 3 {
            1 => Dialect::V31,
            2 => Dialect::V3,
            _ => Dialect::V32,
        },
        is_thinking: flags & 1 != 0,
        is_cut: flags & 2 != 0,
        max_calls: if flags & 4 != 0 { 1 } else { u32::MAX },
    };
    let (whole, num_complete) = reader.read([&*output]);
    assert_eq!(reader.read(divide(&output, seed)), (whole.clone(), num_complete), "the division changed the answer");
    check(&whole, num_complete as usize, reader);
}

/// Cuts a text at character boundaries.
fn divide(text: &str, seed: u8) -> impl Iterator<Item = &str> {
    let mut rest = text;
    let mut lengths = input::chunk_lengths(seed);
    std::iter::from_fn(move || {
        let length = lengths.next()?;
        let end = rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at);
        let (chunk, after) = rest.split_at(end);
        rest = after;
        (!chunk.is_empty()).then_some(chunk)
    })
}

impl Reader {
    /// The answer, and how many of its calls are whole.
    pub fn read<'a>(self, chunks: impl IntoIterator<Item = &'a str>) -> (Client, u32) {
        let mut parser = CallParser::new(self.dialect, self.is_thinking, self.max_calls);
        let mut lexer = Lexer::new(self.dialect.markers());
        let (mut client, mut delta) = (Client::default(), Delta::default());
        for chunk in chunks {
            lexer.push(chunk, |piece| parser.push(piece, &mut delta));
            client.take(&mut delta);
        }
        lexer.finish(|piece| parser.push(piece, &mut delta));
        parser.finish(self.is_cut, &mut delta);
        client.take(&mut delta);
        (client, parser.num_complete_calls())
    }
}

/// What must be true of every answer.
pub fn check(answer: &Client, complete: usize, reader: Reader) {
    let markup = if reader.dialect == Dialect::V32 { &[Marker::Dsml] } else { Marker::TOOL_SET };
    assert!(!markup.iter().any(|marker| answer.content.contains(marker.text())), "markup in content");
    let begun = answer.calls.len();
    assert!(
        begun == complete || begun == complete + 1 && reader.dialect == Dialect::V32,
        "{begun} calls of {complete}"
    );
    assert!(begun <= reader.max_calls as usize, "{begun} calls");
    for (index, (name, arguments)) in answer.calls.iter().enumerate() {
        assert!(!name.is_empty(), "a call without a name");
        assert!(is_object(arguments) || index >= complete && is_object_start(arguments), "arguments {arguments:?}");
    }
}

/// However deep: values are handed on, not built.
fn is_object(text: &str) -> bool {
    text.starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Whether the text, cut inside a string value or after a value, is the start of an object.
fn is_object_start(text: &str) -> bool {
    ["}", "\"}"].iter().any(|end| is_object(&(text.to_owned() + end)))
}
