#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::{Map, Value};

use super::{NUM_SHARDS, PromptIds, SpanCache};
use crate::chat::encode::{EncodeOptions, Message, Role, ToolCall, encode};
use crate::text::tokenizer::Segment;
use crate::text::tokenizer::fixture::{small, text};

const PLENTY: usize = 64 << 20;

fn long(what: &str) -> String {
    format!("{what}, told at such length that it is worth keeping: the whale dives, and dives again.")
}

fn segments(messages: &[Message], thinking: bool) -> Vec<Segment> {
    encode(messages, &EncodeOptions::request(thinking, false), &small()).unwrap().segments
}

fn prompt(cache: &SpanCache, segments: &[Segment], salt: &str) -> PromptIds {
    let prompt = cache.encode(&small(), segments, salt).unwrap();
    assert_eq!(prompt.token_ids, small().encode_segments(segments).unwrap());
    prompt
}

fn bytes_kept(cache: &SpanCache) -> usize {
    let bytes = cache.shards.iter().map(|shard| {
        let shard = shard.lock().unwrap();
        let young: usize = shard.young.values().map(|span| span.bytes()).sum();
        assert_eq!(young, shard.young_bytes);
        young + shard.old.values().map(|span| span.bytes()).sum::<usize>()
    });
    bytes.sum()
}

/// The turns of an agent: a question, then calls and results with reasoning before each, then an answer.
fn turn(number: usize) -> Vec<Message> {
    let mut messages = vec![Message::new(Role::User, long(&format!("question {number}")))];
    for step in 0..3 {
        let mut call = Message::new(Role::Assistant, "");
        call.reasoning = long(&format!("reasoning {number}.{step}"));
        let mut arguments = Map::new();
        arguments.insert("city".to_owned(), Value::from(long(&format!("argument {number}.{step}"))));
        call.tool_calls = vec![ToolCall { id: None, name: "look_up".to_owned(), arguments }];
        messages.push(call);
        messages.push(Message::new(Role::Tool, long(&format!("result {number}.{step}"))));
    }
    let mut answer = Message::new(Role::Assistant, long(&format!("answer {number}")));
    answer.reasoning = long(&format!("last reasoning {number}"));
    messages.push(answer);
    messages
}

#[test]
fn a_follow_up_turn_tokenizes_only_its_new_messages() {
    let cache = SpanCache::new(PLENTY);
    let mut messages = vec![Message::new(Role::System, long("the system's rules"))];
    for number in 0..5 {
        for message in turn(number) {
            // What a request says that the one before did not: the messages since the model's last turn.
            messages.push(message);
            let is_asked = matches!(messages.last().unwrap().role, Role::User | Role::Tool);
            if !is_asked {
                continue;
            }
            let new = messages.iter().rev().take(2);
            let new: usize = new.map(|message| message.content.len() + message.reasoning.len() + 200).sum();
            let tokenized = prompt(&cache, &segments(&messages, true), "").tokenized_bytes;
            let all: usize = segments(&messages, true).iter().map(Segment::text_len).sum();
            assert!(tokenized <= new + short_texts(&messages), "{tokenized} bytes of {all}, {new} of them new");
        }
    }
}

/// Bytes of texts that are too short to be kept.
fn short_texts(messages: &[Message]) -> usize {
    let lengths = segments(messages, true).into_iter().map(|segment| segment.text_len());
    lengths.filter(|length| *length < super::MIN_TEXT_BYTES).sum()
}

#[test]
fn a_new_user_message_drops_reasoning_and_leaves_every_other_text_as_it_was() {
    let cache = SpanCache::new(PLENTY);
    let mut messages = turn(0);
    prompt(&cache, &segments(&messages[..messages.len() - 1], true), "");
    let answer = messages.last().unwrap().content.clone();
    let question = long("question 1");
    messages.push(Message::new(Role::User, question.clone()));
    let follow_up = prompt(&cache, &segments(&messages, true), "");
    assert_eq!(follow_up.tokenized_bytes - short_texts(&messages), answer.len() + question.len());
}

#[test]
fn salts_share_nothing() {
    let cache = SpanCache::new(PLENTY);
    let segments = segments(&turn(0), false);
    for salt in ["a", "b", "", "ab"] {
        assert_eq!(prompt(&cache, &segments, salt).reused_bytes, 0, "{salt:?}");
        assert!(prompt(&cache, &segments, salt).reused_bytes > 0, "{salt:?}");
    }
}

#[test]
fn a_text_of_the_same_hash_is_no_hit() {
    let cache = SpanCache::new(PLENTY);
    let (text, other) = (long("one"), long("another"));
    let span = |text: &str| super::Span { salt: "".into(), text: text.into(), ids: [1].into() };
    cache.keep(7, span(&text));
    assert!(cache.find(7, "", &text).is_some());
    assert!(cache.find(7, "", &other).is_none() && cache.find(7, "salt", &text).is_none());
    cache.keep(7, span(&other));
    assert!(cache.find(7, "", &other).is_some() && cache.find(7, "", &text).is_none());
}

#[test]
fn what_is_in_use_stays_and_the_rest_goes_when_the_bytes_are_used_up() {
    let max_bytes = NUM_SHARDS * 2 * 4096;
    let cache = SpanCache::new(max_bytes);
    let used = [Segment::Text(long("used all the time"))];
    prompt(&cache, &used, "");
    for number in 0..2000 {
        let once = [Segment::Text(long(&format!("used once, {number}")))];
        assert_eq!(prompt(&cache, &once, "").reused_bytes, 0);
        assert!(prompt(&cache, &used, "").reused_bytes > 0, "forgotten after {number}");
        assert!(bytes_kept(&cache) <= max_bytes);
    }
    assert_eq!(prompt(&cache, &[Segment::Text(long("used once, 0"))], "").reused_bytes, 0);
    // What could never be kept pushes nothing out.
    let huge = [Segment::Text(long("huge").repeat(100))];
    assert_eq!((prompt(&cache, &huge, "").reused_bytes, prompt(&cache, &huge, "").reused_bytes), (0, 0));
    assert!(prompt(&cache, &used, "").reused_bytes > 0);
}

/// A message that may follow any other, with texts on both sides of the bound below which nothing is kept.
fn message() -> impl Strategy<Value = Message> {
    let content = (text(), 0usize..12).prop_map(|(text, times)| text.repeat(times));
    (0u8..4, content, text(), prop::collection::vec(text(), 0..3)).prop_map(|(role, content, reasoning, values)| {
        let role = [Role::System, Role::User, Role::Assistant, Role::Developer][usize::from(role)];
        let mut message = Message::new(role, content + "x");
        if role == Role::Assistant {
            message.reasoning = reasoning + "y";
            let arguments: Map<String, Value> =
                values.into_iter().enumerate().map(|(index, value)| (index.to_string(), Value::from(value))).collect();
            message.tool_calls = vec![ToolCall { id: None, name: "f".to_owned(), arguments }];
        }
        message
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn cached_equals_uncached_for_any_conversation(
        conversation in prop::collection::vec(message(), 1..12),
        thinking: bool,
        max_bytes in prop::sample::select(vec![0, NUM_SHARDS * 2 * 600, PLENTY]),
    ) {
        let cache = SpanCache::new(max_bytes);
        let mut messages = Vec::new();
        for message in conversation {
            let calls = message.tool_calls.len();
            messages.push(message);
            messages.extend((0..calls).map(|_| Message::new(Role::Tool, long("a result"))));
            let segments = segments(&messages, thinking);
            for salt in ["", "tenant"] {
                let prompt = prompt(&cache, &segments, salt);
                let bytes: usize = segments.iter().map(Segment::text_len).sum();
                prop_assert_eq!(prompt.tokenized_bytes + prompt.reused_bytes, bytes);
            }
            prop_assert!(bytes_kept(&cache) <= max_bytes);
        }
    }
}
