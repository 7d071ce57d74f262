#![expect(clippy::unwrap_used, reason = "tests")]

use super::{CompletionChoice, CompletionChunkWriter, write_completion};
use crate::openai::response::{FinishReason, ResponseHead, Usage};

fn head() -> ResponseHead {
    ResponseHead { id: "cmpl-1".to_owned(), created: 7, model: "m".to_owned() }
}

const HEAD: &str = r#"{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":["#;

#[test]
fn a_whole_answer_has_the_documented_fields() {
    let choice = CompletionChoice {
        finish_reason: Some(FinishReason::Length),
        token_ids: Some(&[5]),
        prompt_token_ids: Some(&[1]),
        ..CompletionChoice::new(0, " b")
    };
    let mut out = Vec::new();
    write_completion(&head(), &[choice], &Usage::default(), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let expected =
        r#"{"index":0,"text":" b","logprobs":null,"finish_reason":"length","token_ids":[5],"prompt_token_ids":[1]}]"#;
    assert!(text.starts_with(&[HEAD, expected, r#","usage":{"prompt_tokens":0,"#].concat()), "{text}");
}

#[test]
fn chunks_carry_usage_as_asked() {
    let write = |with_usage| {
        let mut out = Vec::new();
        let writer = CompletionChunkWriter::new(head(), with_usage);
        writer.write(&CompletionChoice::new(1, "a"), None, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let choice = r#"{"index":1,"text":"a","logprobs":null,"finish_reason":null}]"#;
    assert_eq!(write(false), [HEAD, choice, "}"].concat());
    assert_eq!(write(true), [HEAD, choice, r#","usage":null}"#].concat());
    let mut out = Vec::new();
    CompletionChunkWriter::new(head(), true).write_usage(&Usage::default(), &mut out).unwrap();
    let last = String::from_utf8(out).unwrap();
    assert!(last.starts_with(&[HEAD, r#"],"usage":{"prompt_tokens":0"#].concat()), "{last}");
}
