#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::Value;

use super::{EncodeError, EncodeOptions, Encoded, Ending, Message, Role, encode};
use crate::chat::style::Style;
use crate::openai::chat::ChatRequest;
use crate::openai::{Limits, ModelFacts};
use crate::text::tokenizer::fixture::{SMALL_JSON, VOCAB_SIZE, small, small_id, text, whole};
use crate::text::tokenizer::{Segment, Tokenizer};

const GOLDEN: &str = include_str!("../../../tests/data/encode.jsonl");

fn message(role: Role, content: &str) -> Message {
    Message::new(role, content)
}

fn assistant(content: &str, reasoning: &str) -> Message {
    Message { reasoning: reasoning.to_owned(), ..Message::new(Role::Assistant, content) }
}

fn render(tokenizer: &Tokenizer, encoded: &Encoded) -> String {
    let mut bytes = Vec::new();
    for segment in &encoded.segments {
        match segment {
            Segment::Text(text) => bytes.extend_from_slice(text.as_bytes()),
            Segment::Control(id) => bytes.extend_from_slice(tokenizer.token_bytes(*id)),
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn prompt(messages: &[Message], thinking: bool, continue_final: bool) -> (String, bool) {
    let tokenizer = small();
    let encoded = encode(messages, &EncodeOptions::request(thinking, continue_final), &tokenizer).unwrap();
    (render(&tokenizer, &encoded), encoded.starts_in_reasoning)
}

/// Reads a row's messages the way the wire does.
fn encode_row(row: &Value, tokenizer: &Tokenizer) -> Option<Encoded> {
    let mut request = row.get("request").cloned().unwrap_or_else(|| serde_json::json!({}));
    if let Some(messages) = row.get("messages") {
        request["messages"] = messages.clone();
        request["chat_template_kwargs"] = serde_json::json!({"thinking": row["thinking"]});
    }
    let model = ModelFacts { vocab_size: VOCAB_SIZE, context_len: 1 << 17, style: Style::V32 };
    let request = ChatRequest::parse(request.to_string().as_bytes()).unwrap();
    let mut spec = request.validate(&Limits::load().unwrap(), &model).ok()?;
    if row["level"] == "encoder" {
        spec.encode.ending = Ending::Closed;
        spec.encode.add_begin_of_sentence = row["add_begin_of_sentence"].as_bool().unwrap();
    }
    encode(&spec.messages, &spec.encode, tokenizer).ok()
}

/// `id_of` turns the golden ids into the tokenizer's.
fn check_golden(tokenizer: &Tokenizer, id_of: impl Fn(u32) -> Option<u32>) -> usize {
    let mut rows = 0;
    for line in GOLDEN.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let name = &row["name"];
        let encoded = encode_row(&row, tokenizer);
        let rendered = encoded.as_ref().map(|encoded| render(tokenizer, encoded));
        assert_eq!(rendered.as_deref(), row["prompt"].as_str(), "{name}");
        if let Some(encoded) = encoded {
            let golden: Vec<u32> = serde_json::from_value(row["prompt_token_ids"].clone()).unwrap();
            let expected: Vec<u32> = golden.into_iter().map(|id| id_of(id).unwrap()).collect();
            assert_eq!(tokenizer.encode_segments(&encoded.segments).unwrap(), expected, "{name}");
        }
        rows += 1;
    }
    rows
}

#[test]
fn golden_conversations_render_byte_for_byte_and_id_for_id() {
    assert_eq!(check_golden(&small(), small_id), 26);
}

#[test]
#[ignore = "needs BALEEN_V32_TOKENIZER=/path/to/tokenizer.json of DeepSeek-V3.2"]
fn golden_conversations_have_the_ids_of_the_whole_tokenizer() {
    assert_eq!(check_golden(&whole(), Some), 26);
}

#[test]
fn neighbouring_texts_are_one_segment() {
    let tokenizer = small();
    let messages = [message(Role::System, "a"), message(Role::System, "b"), message(Role::User, "c")];
    let encoded = encode(&messages, &EncodeOptions::request(false, false), &tokenizer).unwrap();
    assert_eq!(encoded.segments[1], Segment::Text("ab".to_owned()));
}

#[test]
fn a_prompt_always_ends_in_an_open_turn() {
    let user = || message(Role::User, "q");
    let opened = "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>";
    assert_eq!(prompt(&[user()], false, false), (opened.to_owned(), false));
    let system_only = prompt(&[message(Role::System, "s")], true, false);
    assert_eq!(system_only, ("<｜begin▁of▁sentence｜>s<｜Assistant｜><think>".to_owned(), true));
    let (answered, in_reasoning) = prompt(&[user(), assistant("a", "r")], true, false);
    let expected =
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>r</think>a<｜end▁of▁sentence｜><｜Assistant｜><think>";
    assert_eq!((answered.as_str(), in_reasoning), (expected, true));
}

#[test]
fn a_final_assistant_message_is_continued() {
    let user = message(Role::User, "q");
    let after = |reply: Message, thinking| {
        let (text, in_reasoning) = prompt(&[user.clone(), reply], thinking, true);
        (text.trim_start_matches("<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>").to_owned(), in_reasoning)
    };
    assert_eq!(after(assistant("Sure", ""), false), ("</think>Sure".to_owned(), false));
    // In chat mode reasoning has no place.
    assert_eq!(after(assistant("Sure", "r"), false), ("</think>Sure".to_owned(), false));
    assert_eq!(after(assistant("Sure", "r"), true), ("<think>r</think>Sure".to_owned(), false));
    assert_eq!(after(assistant("Sure", ""), true), ("<think></think>Sure".to_owned(), false));
    assert_eq!(after(assistant("", "r"), true), ("<think>r".to_owned(), true));
    assert_eq!(after(assistant("", ""), true), ("<think>".to_owned(), true));
}

#[test]
fn only_an_assistant_message_can_be_continued() {
    let error = encode(&[message(Role::User, "q")], &EncodeOptions::request(false, true), &small()).unwrap_err();
    assert!(matches!(error, EncodeError::Invalid { ref param, .. } if param == "messages"), "{error}");
}

#[test]
fn missing_reasoning_is_an_error_that_names_the_message() {
    let messages = [message(Role::User, "q"), assistant("a", "")];
    let error = encode(&messages, &EncodeOptions::request(true, false), &small()).unwrap_err();
    assert!(
        matches!(error, EncodeError::Invalid { ref param, .. } if param == "messages[1].reasoning_content"),
        "{error}"
    );
    assert!(encode(&messages, &EncodeOptions::request(false, false), &small()).is_ok());
}

#[test]
fn a_control_token_is_required_only_when_it_is_used() {
    let mut root: Value = serde_json::from_slice(SMALL_JSON).unwrap();
    let added = root["added_tokens"].as_array_mut().unwrap();
    added.retain(|token| token["content"] != "<think>");
    let tokenizer = Tokenizer::from_json(root.to_string().as_bytes(), VOCAB_SIZE).unwrap();
    let messages = [message(Role::User, "q")];
    assert!(encode(&messages, &EncodeOptions::request(false, false), &tokenizer).is_ok());
    let error = encode(&messages, &EncodeOptions::request(true, false), &tokenizer).unwrap_err();
    assert!(error.to_string().contains("`<think>`"), "{error}");
}

proptest! {
    #[test]
    fn what_a_client_writes_never_becomes_a_control_token(
        contents in prop::collection::vec((0..3usize, text(), text()), 1..5),
        thinking: bool,
    ) {
        let tokenizer = small();
        let roles = [Role::System, Role::User, Role::Assistant];
        let mut messages: Vec<Message> = contents
            .into_iter()
            .map(|(role, content, reasoning)| Message { reasoning: reasoning + ".", ..Message::new(roles[role], content) })
            .collect();
        messages.push(message(Role::User, "q"));
        let options = EncodeOptions::request(thinking, false);
        let encoded = encode(&messages, &options, &tokenizer).unwrap();
        let first_control = tokenizer.control("｜DSML｜").unwrap();
        let controls = |ids: &[u32]| ids.iter().filter(|id| **id < 3 || **id >= first_control).count();
        let expected = encoded.segments.iter().filter(|segment| matches!(segment, Segment::Control(_))).count();
        let ids = tokenizer.encode_segments(&encoded.segments).unwrap();
        prop_assert_eq!(controls(&ids), expected);
    }
}
