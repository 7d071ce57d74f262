//! A model's raw output, read as calls: any division into chunks gives the same answer, no markup reaches content, and
//! what a client has of a call's arguments is always the start of one JSON object.

use baleen_gateway::chat::calls::{CallParser, Dialect};
use baleen_gateway::chat::delta::Delta;
use baleen_gateway::chat::encode::DSML;
use baleen_gateway::chat::markers::Lexer;
use serde::de::IgnoredAny;

use super::input;

#[derive(Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    complete: u32,
}

#[derive(Clone, Copy)]
struct Reader {
    dialect: Dialect,
    is_thinking: bool,
    is_cut: bool,
    max_calls: u32,
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
    let whole = reader.read([&*output]);
    assert_eq!(reader.read(divide(&output, seed)), whole, "the division changed the answer");
    check(&whole, reader);
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
    fn read<'a>(self, chunks: impl IntoIterator<Item = &'a str>) -> Answer {
        let mut parser = CallParser::new(self.dialect, self.is_thinking, self.max_calls);
        let mut lexer = Lexer::new(self.dialect.markers());
        let (mut answer, mut delta) = (Answer::default(), Delta::default());
        for chunk in chunks {
            lexer.push(chunk, |piece| parser.push(piece, &mut delta));
            answer.take(&mut delta);
        }
        lexer.finish(|piece| parser.push(piece, &mut delta));
        parser.finish(self.is_cut, &mut delta);
        answer.take(&mut delta);
        answer.complete = parser.num_complete_calls();
        answer
    }
}

impl Answer {
    fn take(&mut self, delta: &mut Delta) {
        self.content.push_str(&delta.content);
        self.reasoning.push_str(&delta.reasoning);
        for call in &delta.calls {
            if let Some(name) = &call.name {
                assert_eq!(call.index as usize, self.calls.len(), "calls begin in order");
                self.calls.push((name.clone(), String::new()));
            }
            assert_eq!(call.index as usize + 1, self.calls.len(), "only the newest call goes on");
            self.calls.last_mut().unwrap().1.push_str(&call.arguments);
        }
        delta.clear();
    }
}

fn check(answer: &Answer, reader: Reader) {
    if reader.dialect == Dialect::V32 {
        assert!(!answer.content.contains(DSML), "markup in content");
    }
    let (begun, complete) = (answer.calls.len(), answer.complete as usize);
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
