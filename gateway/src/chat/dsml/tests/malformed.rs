//! Every way of breaking the format that engines have been seen to stumble over, and what becomes of each by
//! `docs/adr/0009-malformed-dsml.md`: rows of `tests/data/dsml/malformed.jsonl`, each read whole, in halves, by
//! characters and by tokens.

use serde::Deserialize;

use super::properties::fold;
use super::{Answer, Dialect, Run, chars};
use crate::text::tokenizer::fixture::small;

const ROWS: &str = include_str!("../../../../tests/data/dsml/malformed.jsonl");

/// A shape and its reading; `§` stands for the marker.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    shape: String,
    output: String,
    #[serde(default)]
    thinking: bool,
    /// Whether the output was cut off.
    #[serde(default)]
    cut: bool,
    #[serde(default)]
    reasoning: String,
    #[serde(default)]
    content: String,
    #[serde(default)]
    calls: Vec<Call>,
    /// Calls whose arguments are whole: all of them where the row does not say.
    complete: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    name: String,
    arguments: String,
}

fn expected(row: &Row) -> Answer {
    let marked = |text: &str| text.replace('§', "｜DSML｜");
    Answer {
        content: row.content.clone(),
        reasoning: marked(&row.reasoning),
        calls: row.calls.iter().map(|call| (call.name.clone(), marked(&call.arguments))).collect(),
        complete: row.complete.unwrap_or_else(|| u32::try_from(row.calls.len()).unwrap()),
    }
}

#[test]
fn every_broken_shape_has_its_reading() {
    for row in ROWS.lines().map(|line| serde_json::from_str::<Row>(line).unwrap()) {
        let run = Run { dialect: Dialect::V32, thinking: row.thinking, is_cut: row.cut };
        let (text, expected) = (row.output.replace('§', "｜DSML｜"), expected(&row));
        assert_eq!(run.chunks([text.as_str()]), expected, "{}", row.shape);
        assert_eq!(run.chunks(chars(&text)), expected, "{}, by characters", row.shape);
        for (at, _) in text.char_indices() {
            assert_eq!(run.chunks([&text[..at], &text[at..]]), expected, "{}, cut at {at}", row.shape);
        }
        let ids = small().encode_raw(&text).unwrap();
        assert_eq!(fold(&ids, &[], &run), expected, "{}, by tokens", row.shape);
    }
}
