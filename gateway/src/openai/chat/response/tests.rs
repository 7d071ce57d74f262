#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::{ChatChoice, ChatChunkChoice, ChatChunkWriter, ChatDelta, ChatMessage, ChunkText, write_completion};
use crate::openai::response::{FinishReason, ResponseHead, StopReason, Usage};

fn head() -> ResponseHead {
    ResponseHead { id: "chatcmpl-1".to_owned(), created: 7, model: "m\"1".to_owned() }
}

fn usage() -> Usage {
    Usage { prompt_tokens: 10, cached_tokens: 4, completion_tokens: 5, reasoning_tokens: 2 }
}

const USAGE: &str = concat!(
    r#""usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":4},"#,
    r#""completion_tokens_details":{"reasoning_tokens":2},"prompt_cache_hit_tokens":4,"prompt_cache_miss_tokens":6}"#
);

const CHUNK: &str = r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"1","choices":["#;

fn chunk(with_usage: bool, choice: ChatChunkChoice<'_>, usage: Option<&Usage>) -> String {
    let mut out = Vec::new();
    ChatChunkWriter::new(head(), with_usage).write(&choice, usage, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn a_whole_answer_has_the_documented_fields() {
    let choice = ChatChoice {
        index: 0,
        message: ChatMessage::new("a\n", None, &[]),
        logprobs: None,
        finish_reason: FinishReason::Length,
        stop_reason: None,
        token_ids: None,
    };
    let thinking = ChatChoice {
        index: 1,
        message: ChatMessage::new("", Some("hm"), &[]),
        finish_reason: FinishReason::Stop,
        stop_reason: Some(StopReason::Text("END")),
        token_ids: Some(&[3, 4]),
        ..choice
    };
    let mut out = Vec::new();
    write_completion(&head(), &[choice, thinking], &usage(), Some(&[1, 2]), &mut out).unwrap();
    let expected = [
        r#"{"id":"chatcmpl-1","object":"chat.completion","created":7,"model":"m\"1","choices":["#,
        r#"{"index":0,"message":{"role":"assistant","content":"a\n"},"logprobs":null,"finish_reason":"length"},"#,
        r#"{"index":1,"message":{"role":"assistant","content":"","reasoning_content":"hm"},"logprobs":null,"#,
        r#""finish_reason":"stop","stop_reason":"END","token_ids":[3,4]}],"#,
        USAGE,
        r#","prompt_token_ids":[1,2]}"#,
    ];
    assert_eq!(String::from_utf8(out).unwrap(), expected.concat());
}

#[test]
fn a_stream_begins_with_the_role() {
    let plain = chunk(false, ChatChunkChoice::new(0, ChatDelta::role(false)), None);
    let expected = r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#;
    assert_eq!(plain, [CHUNK, expected].concat());
    let thinking = chunk(false, ChatChunkChoice::new(0, ChatDelta::role(true)), None);
    let expected = r#"{"index":0,"delta":{"role":"assistant","content":null,"reasoning_content":""},"#;
    assert!(thinking.starts_with(&[CHUNK, expected].concat()), "{thinking}");
}

#[test]
fn text_goes_where_it_belongs() {
    let content = chunk(false, ChatChunkChoice::new(2, ChatDelta::content("é\"")), None);
    let expected = r#"{"index":2,"delta":{"content":"é\""},"logprobs":null,"finish_reason":null}]}"#;
    assert_eq!(content, [CHUNK, expected].concat());
    let reasoning = chunk(false, ChatChunkChoice::new(2, ChatDelta::reasoning("r")), None);
    assert!(reasoning.contains(r#""delta":{"reasoning_content":"r"}"#), "{reasoning}");
}

#[test]
fn a_choice_ends_with_an_empty_delta() {
    let end = ChatChunkChoice::finish(0, FinishReason::Stop, Some(StopReason::TokenId(9)));
    let expected = r#"{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":9}]}"#;
    assert_eq!(chunk(false, end, None), [CHUNK, expected].concat());
}

#[test]
fn usage_is_null_until_it_is_due() {
    let text = || ChatChunkChoice::new(0, ChatDelta::content("a"));
    assert!(!chunk(false, text(), None).contains("usage"));
    assert!(chunk(true, text(), None).ends_with(r#"}],"usage":null}"#));
    assert!(chunk(true, text(), Some(&usage())).ends_with(&format!("}}],{USAGE}}}")));
    let mut out = Vec::new();
    ChatChunkWriter::new(head(), true).write_usage(&usage(), &mut out).unwrap();
    assert_eq!(String::from_utf8(out).unwrap(), format!("{CHUNK}],{USAGE}}}"));
}

#[test]
fn chunks_are_appended() {
    let mut out = b"data: ".to_vec();
    let choice = ChatChunkChoice { token_ids: Some(&[5]), ..ChatChunkChoice::new(0, ChatDelta::content("a")) };
    ChatChunkWriter::new(head(), false).write_first(&choice, None, &[1, 2], &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(text.starts_with(r#"data: {"id":"#), "{text}");
    assert!(text.ends_with(r#""token_ids":[5]}],"prompt_token_ids":[1,2]}"#), "{text}");
}

proptest! {
    #[test]
    fn a_chunk_of_text_alone_is_the_chunk_with_that_delta(
        text in any::<String>(),
        index in 0..200_u32,
        thinks in any::<bool>(),
        with_usage in any::<bool>(),
    ) {
        let (delta, part) = match thinks {
            true => (ChatDelta::reasoning(&text), ChunkText::Reasoning(&text)),
            false => (ChatDelta::content(&text), ChunkText::Content(&text)),
        };
        let mut out = Vec::new();
        ChatChunkWriter::new(head(), with_usage).write_text(index, part, &mut out).unwrap();
        let whole = chunk(with_usage, ChatChunkChoice::new(index, delta), None);
        prop_assert_eq!(String::from_utf8(out).unwrap(), whole);
    }
}
