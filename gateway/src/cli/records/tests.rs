#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::Value;

use super::{Chunk, parse, render};
use crate::openai::Limits;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::fixture::{small, whole};

const CONVERSATIONS: &str = include_str!("../../../tests/data/dsml/encode.jsonl");
const OUTPUTS: &str = include_str!("../../../tests/data/dsml/parse.jsonl");

/// Holds a marker that the client typed, which must stay text: its ids differ from those of the whole string.
const TYPED_MARKER: &str = "enc-074";

fn rows(text: &'static str) -> impl Iterator<Item = Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap())
}

fn check_prompts(tokenizer: &Tokenizer, with_ids: bool) {
    let limits = Limits::load().unwrap();
    let mut checked = 0;
    for row in rows(CONVERSATIONS).filter(|row| row["is_policy"] == false) {
        let rendered = render(&row, tokenizer, &limits);
        assert_eq!(
            rendered.as_ref().ok().and_then(|row| row["prompt"].as_str()),
            row["prompt"].as_str(),
            "{}",
            row["id"]
        );
        if let (Ok(rendered), true) = (rendered, with_ids && row["id"] != TYPED_MARKER) {
            assert_eq!(rendered["token_ids"], row["prompt_token_ids"], "{}", row["id"]);
        }
        checked += 1;
    }
    assert_eq!(checked, 61);
}

#[test]
fn golden_conversations_render_byte_for_byte() {
    check_prompts(&small(), false);
}

#[test]
#[ignore = "needs BALEEN_V32_TOKENIZER=/path/to/tokenizer.json of DeepSeek-V3.2"]
fn golden_conversations_have_the_ids_of_the_whole_tokenizer() {
    check_prompts(&whole(), true);
}

#[test]
#[ignore = "needs BALEEN_V32_TOKENIZER=/path/to/tokenizer.json of DeepSeek-V3.2"]
fn golden_outputs_mean_the_same_by_tokens_as_by_text() {
    let tokenizer = std::sync::Arc::new(whole());
    for mut row in rows(OUTPUTS) {
        if row["declares_tools"] == false {
            row["tools_declared"] = Value::Array(Vec::new());
        }
        let text = parse(&row, Chunk::Whole, None).unwrap();
        assert_eq!(parse(&row, Chunk::Char, None).unwrap(), text, "{}", row["id"]);
        assert_eq!(parse(&row, Chunk::Token, Some(&tokenizer)).unwrap(), text, "{}", row["id"]);
        assert_eq!(
            text["finish_reason"],
            row["finish_reason"].as_str().filter(|_| row["declares_tools"] != false).unwrap_or("stop")
        );
    }
}
