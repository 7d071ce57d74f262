//! What holds for every output: the division into chunks changes nothing, what a client has of a call is always the
//! start of one object, and what the encoder renders is read back.

use proptest::prelude::*;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::{Answer, Client, Dialect, Run, chars};
use crate::chat::delta::Delta;
use crate::chat::encode::{EncodeOptions, Ending, Message, Role, ToolCall, encode};
use crate::chat::markers::Marker;
use crate::chat::output::{OutputFold, OutputOptions};
use crate::chat::pyjson;
use crate::text::tokenizer::fixture::{VOCAB_SIZE, small};

/// Output in which whole, broken and unfinished markup is frequent.
fn output() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<",
            "/",
            "</",
            ">",
            "\n",
            "\n\n",
            " ",
            "\"",
            "=",
            "name=\"",
            "string=\"true\"",
            "string=\"false\"",
            "｜DSML｜",
            "<｜DSML｜",
            "</｜DSML｜",
            "｜DS",
            "ML｜",
            "<｜DSML",
            "｜",
            "function_calls",
            "invoke",
            "parameter",
            "function_calls>\n",
            "invoke>",
            "parameter>",
            "</think>",
            "<think>",
            "<｜DSML｜function_calls>\n",
            "</｜DSML｜function_calls>",
            "<｜DSML｜invoke name=\"f\">\n",
            "</｜DSML｜invoke>\n",
            "<｜DSML｜parameter name=\"a\" string=\"true\">",
            "<｜DSML｜parameter name=\"b\" string=\"false\">",
            "</｜DSML｜parameter>\n",
            "{\"a\": 1}",
            "[1]",
            "😀",
            "中",
        ])
        .prop_map(str::to_owned),
        "[ -~]{0,4}",
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// Any text at all: characters of every script and of none, and what spells markup.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![output(), "\\PC{0,16}", prop::collection::vec(any::<char>(), 0..16).prop_map(String::from_iter)]
}

/// A name that the format can carry: it has no escape for a quote.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![3 => "[a-zA-Z0-9_-]{1,8}", 1 => any_text().prop_map(|text| text.replace('"', "'"))]
}

fn json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter_map("JSON has no such number", |number| Some(Value::from(Some(number)?))
            .filter(Value::is_number)),
        "-?[1-9][0-9]{20,40}".prop_map(|digits| serde_json::from_str(&digits).unwrap()),
    ];
    let leaf =
        prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, any_text().prop_map(Value::from)];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((any_text(), inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn calls() -> impl Strategy<Value = Vec<ToolCall>> {
    let arguments = prop::collection::vec((name(), json()), 0..4).prop_map(Map::from_iter);
    let call = (name(), arguments).prop_map(|(name, arguments)| ToolCall { id: None, name, arguments });
    prop::collection::vec(call, 0..5)
}

/// Lengths of consecutive chunks; what is left over is one more.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1usize..9, 0..200)
}

fn divide<'a, T>(whole: &'a [T], lengths: &[usize]) -> Vec<&'a [T]> {
    let mut rest = whole;
    let mut parts = Vec::new();
    for length in lengths {
        let (part, after) = rest.split_at((*length).min(rest.len()));
        parts.push(part);
        rest = after;
    }
    parts.push(rest);
    parts
}

/// The answer that token ids fold into, taken a step at a time as a stream is. After each step every call's arguments
/// are the start of an object.
pub(super) fn fold(ids: &[u32], steps: &[usize], run: &Run) -> Answer {
    let options = OutputOptions {
        starts_in_reasoning: run.thinking,
        max_tool_calls: u32::MAX,
        dialect: run.dialect,
        ..OutputOptions::default()
    };
    let mut fold = OutputFold::new(small(), options);
    let (mut client, mut delta) = (Client::default(), Delta::default());
    for step in divide(ids, steps) {
        step.iter().for_each(|id| fold.push(*id, false, &mut delta));
        client.take(&mut delta);
        assert!(client.calls.iter().all(|(_, arguments)| is_start_of_object(arguments)), "{:?}", client.calls);
    }
    fold.finish(run.is_cut, &mut delta);
    client.take(&mut delta);
    let Client { content, reasoning, calls } = client;
    Answer { content, reasoning, calls, complete: fold.num_complete_calls() }
}

/// Whether the text is an object, or one cut inside a string value or behind a value.
fn is_start_of_object(text: &str) -> bool {
    let is_object = |text: &str| text.starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok();
    ["", "}", "\"}"].iter().any(|end| is_object(&(text.to_owned() + end)))
}

proptest! {
    #[test]
    fn any_division_gives_the_same(text in output(), is_thinking: bool, is_cut: bool, lengths in lengths()) {
        let run = Run { dialect: Dialect::V32, thinking: is_thinking, is_cut };
        let whole = run.chunks([text.as_str()]);
        prop_assert_eq!(&run.chunks(chars(&text)), &whole);
        for (at, _) in text.char_indices() {
            prop_assert_eq!(&run.chunks([&text[..at], &text[at..]]), &whole, "cut at {}", at);
        }
        let characters: Vec<char> = text.chars().collect();
        let parts: Vec<String> = divide(&characters, &lengths).into_iter().map(String::from_iter).collect();
        prop_assert_eq!(&run.chunks(parts.iter().map(String::as_str)), &whole, "in parts of {:?}", lengths);
        prop_assert!(!whole.content.contains("｜DSML｜"), "{}", whole.content);
        let sound = whole.calls.iter().filter(|(_, arguments)| serde_json::from_str::<Value>(arguments).is_ok()).count();
        prop_assert!(sound >= whole.complete as usize, "{:?}", whole);
        prop_assert!(whole.calls.len() <= whole.complete as usize + 1, "{:?}", whole);
    }

    #[test]
    fn tokens_give_what_their_text_gives(text in output(), is_thinking: bool, is_cut: bool, steps in lengths()) {
        let run = Run { dialect: Dialect::V32, thinking: is_thinking, is_cut };
        let ids = small().encode_raw(&text).unwrap();
        prop_assert_eq!(fold(&ids, &steps, &run), run.chunks([text.as_str()]));
    }

    #[test]
    fn any_ids_have_a_reading(ids in prop::collection::vec(0..VOCAB_SIZE + 8, 0..64), is_thinking: bool, is_cut: bool, steps in lengths()) {
        for dialect in [Dialect::V32, Dialect::V31, Dialect::V3] {
            let run = Run { dialect, thinking: is_thinking, is_cut };
            prop_assert_eq!(fold(&ids, &steps, &run), fold(&ids, &[], &run));
        }
    }

    #[test]
    fn legacy_outputs_are_total_too(text in output(), is_thinking: bool) {
        let markers = [("<｜DSML｜", Marker::CallBegin), ("</｜DSML｜", Marker::CallEnd), ("｜DSML｜", Marker::Separator)];
        let halves = [("｜DS", "<｜tool▁"), ("ML｜", "sep｜>")].into_iter();
        let markers = markers.into_iter().map(|(text, marker)| (text, marker.text())).chain(halves);
        let text = markers.fold(text, |text, (from, to)| text.replace(from, to));
        for dialect in [Dialect::V31, Dialect::V3] {
            let run = Run { dialect, thinking: is_thinking, is_cut: false };
            let whole = run.chunks([text.as_str()]);
            prop_assert_eq!(&run.chunks(chars(&text)), &whole);
            prop_assert!(!Marker::TOOL_SET.iter().any(|marker| whole.content.contains(marker.text())), "{}", whole.content);
        }
    }

    /// Names apart, any text stands anywhere: typed markup is not markup. A call without a name is dropped.
    #[test]
    fn what_is_rendered_is_read_back(
        calls in calls(),
        content in any_text(),
        reasoning in any_text(),
        thinking: bool,
        steps in lengths(),
    ) {
        let mut message = Message::new(Role::Assistant, content.clone());
        message.reasoning.clone_from(&reasoning);
        message.tool_calls.clone_from(&calls);
        prop_assume!(!thinking || !reasoning.is_empty() || !calls.is_empty());
        let options =
            EncodeOptions { ending: Ending::Closed, add_begin_of_sentence: false, ..EncodeOptions::request(thinking, false) };
        let tokenizer = small();
        let encoded = encode(std::slice::from_ref(&message), &options, &tokenizer).unwrap();
        let mut ids = tokenizer.encode_segments(&encoded.segments).unwrap();
        prop_assert_eq!(ids.pop(), tokenizer.control(Marker::EndOfSentence.text()));
        let answer = fold(&ids, &steps, &Run { dialect: Dialect::V32, thinking, is_cut: false });

        prop_assert_eq!(answer.content, content);
        prop_assert_eq!(answer.reasoning, if thinking { reasoning } else { String::new() });
        let named = calls.into_iter().filter(|call| !call.name.is_empty());
        let expected: Vec<(String, String)> = named.map(|call| {
            let mut arguments = String::new();
            pyjson::write_object(&call.arguments, &mut arguments);
            (call.name, arguments)
        }).collect();
        prop_assert_eq!(answer.complete as usize, expected.len());
        prop_assert_eq!(answer.calls, expected);
    }
}
