#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::json;

use super::{ChatLogprobs, CompletionLogprobRecorder, TokenLogprob};
use crate::text::tokenizer::fixture::small;

fn token(token_id: u32, logprob: f32, top: &[(u32, f32)]) -> TokenLogprob {
    TokenLogprob { token_id, logprob: Some(logprob), top: top.to_vec() }
}

fn id(text: &str) -> u32 {
    small().encode_raw(text).unwrap()[0]
}

#[test]
fn chat_tokens_show_text_and_bytes() {
    let tokenizer = small();
    let whale = tokenizer.encode_raw("🐳").unwrap();
    let tokens = [token(id("a"), -0.5, &[(id("a"), -0.5), (whale[0], f32::NEG_INFINITY)]), token(whale[0], -1.25, &[])];
    let half = tokenizer.token_bytes(whale[0]);
    let shown = serde_json::to_value(ChatLogprobs { tokenizer: &tokenizer, tokens: &tokens }).unwrap();
    let expected = json!({"content": [
        {
            "token": "a", "logprob": -0.5, "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "\u{FFFD}", "logprob": -9999.0, "bytes": half},
            ],
        },
        {"token": "\u{FFFD}", "logprob": -1.25, "bytes": half, "top_logprobs": []},
    ]});
    assert_eq!(shown, expected);
}

#[test]
fn completion_offsets_count_characters_of_the_text() {
    let tokenizer = small();
    let mut recorder = CompletionLogprobRecorder::default();
    let whale = tokenizer.encode_raw("🐳").unwrap();
    let first = TokenLogprob { token_id: id("é"), logprob: None, top: Vec::new() };
    recorder.record(&tokenizer, &first, true);
    let prompt = recorder.take();
    assert_eq!((prompt.tokens.as_slice(), prompt.text_offset.as_slice()), (&["é".to_owned()][..], &[0][..]));
    assert_eq!((prompt.token_logprobs.as_slice(), prompt.top_logprobs.as_slice()), (&[None][..], &[None][..]));

    for token_id in &whale {
        recorder.record(&tokenizer, &token(*token_id, -1.0, &[]), true);
    }
    recorder.record(&tokenizer, &token(id("b"), -2.0, &[]), true);
    recorder.record(&tokenizer, &token(1, -3.0, &[]), false);
    let rest = recorder.take();
    let mut offsets = vec![1; whale.len()];
    offsets.extend([2, 3]);
    assert_eq!(rest.text_offset, offsets);
    assert!(rest.tokens[0].starts_with("bytes:\\xf0"), "{:?}", rest.tokens);
    assert_eq!(rest.tokens[whale.len()], "b");
}

#[test]
fn alternatives_are_an_object_with_the_chosen_token() {
    let tokenizer = small();
    let mut recorder = CompletionLogprobRecorder::default();
    // Two ids without a row look alike; the likelier one stays.
    recorder.record(&tokenizer, &token(id("a"), -3.0, &[(2000, -0.5), (id("b"), -1.0), (2001, -2.0)]), true);
    recorder.record(&tokenizer, &token(id("b"), -1.0, &[(id("b"), -1.0)]), true);
    let shown = serde_json::to_string(&recorder.take()).unwrap();
    let expected = concat!(
        r#"{"tokens":["a","b"],"token_logprobs":[-3.0,-1.0],"#,
        r#""top_logprobs":[{"":-0.5,"b":-1.0,"a":-3.0},{"b":-1.0}],"text_offset":[0,1]}"#
    );
    assert_eq!(shown, expected);
}
