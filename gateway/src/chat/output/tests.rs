#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::{Delta, OutputFold, OutputOptions};
use crate::text::stop::StopStrings;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::fixture::{small, small_id};

const GOLDEN: &str = include_str!("../../../tests/data/output.jsonl");

const EOS: u32 = 1;
const DSML: u32 = 1937;
const THINK: u32 = 1938;
const END_THINK: u32 = 1939;
const NO_ROW: u32 = 2000;

fn options(stop: &[&str], starts_in_reasoning: bool) -> OutputOptions {
    OutputOptions {
        stop: StopStrings::new(stop),
        include_stop: false,
        starts_in_reasoning,
        skip_special_tokens: true,
        ..OutputOptions::default()
    }
}

fn ids(text: &str) -> Vec<u32> {
    small().encode_raw(text).unwrap()
}

struct Folded {
    reasoning: String,
    content: String,
    stopped: Option<String>,
    reasoning_tokens: u32,
}

fn fold(ids: &[u32], options: OutputOptions) -> Folded {
    let mut fold = OutputFold::new(small(), options);
    let mut delta = Delta::default();
    for id in ids {
        fold.push(*id, *id == EOS, &mut delta);
    }
    let stopped = fold.stopped().map(str::to_owned);
    fold.finish(false, &mut delta);
    Folded {
        reasoning: delta.reasoning,
        content: delta.content,
        stopped,
        reasoning_tokens: fold.num_reasoning_tokens(),
    }
}

#[test]
fn golden_outputs_split_as_expected() {
    let mut rows = 0;
    for line in GOLDEN.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let golden: Vec<u32> = serde_json::from_value(row["token_ids"].clone()).unwrap();
        let ids: Vec<u32> = golden.into_iter().map(|id| small_id(id).unwrap()).collect();
        let folded = fold(&ids, options(&[], row["thinking"].as_bool().unwrap()));
        assert_eq!(folded.content, row["content"].as_str().unwrap(), "{}", row["name"]);
        assert_eq!(folded.reasoning, row["reasoning_content"].as_str().unwrap(), "{}", row["name"]);
        rows += 1;
    }
    assert_eq!(rows, 14);
}

#[test]
fn reasoning_tokens_are_those_before_the_closing_token() {
    let thought = ids("I add them.");
    let mut tokens = vec![THINK];
    tokens.extend(&thought);
    tokens.push(END_THINK);
    tokens.extend(ids("Four."));
    let folded = fold(&tokens, options(&[], true));
    assert_eq!((folded.reasoning.as_str(), folded.content.as_str()), ("I add them.", "Four."));
    assert_eq!(folded.reasoning_tokens as usize, thought.len());
    // The same tokens after a prompt that ended reasoning are content.
    let folded = fold(&tokens, options(&[], false));
    assert_eq!(folded.content, "<think>I add them.</think>Four.");
    assert_eq!(folded.reasoning_tokens, 0);
}

#[test]
fn typed_think_tags_are_text() {
    let tokenizer = small();
    let typed = tokenizer.encode_segments(&[crate::text::tokenizer::Segment::Text("a</think>b".to_owned())]).unwrap();
    let folded = fold(&typed, options(&[], true));
    assert_eq!((folded.reasoning.as_str(), folded.content.as_str()), ("a</think>b", ""));
}

#[test]
fn stop_strings_match_in_content_only() {
    let tokens = ids("say STOP here</think>then STOP there");
    let folded = fold(&tokens, options(&["STOP"], true));
    assert_eq!((folded.reasoning.as_str(), folded.content.as_str()), ("say STOP here", "then "));
    assert_eq!(folded.stopped.as_deref(), Some("STOP"));
}

#[test]
fn a_matched_stop_string_can_stay() {
    let folded = fold(&ids("then STOP there"), OutputOptions { include_stop: true, ..options(&["STOP"], false) });
    assert_eq!(folded.content, "then STOP");
}

#[test]
fn stop_tokens_and_special_tokens_give_no_text() {
    let mut tokens = ids("a");
    tokens.extend([2, DSML, NO_ROW, u32::MAX, EOS]);
    assert_eq!(fold(&tokens, options(&[], false)).content, "a｜DSML｜");
    let visible = OutputOptions { skip_special_tokens: false, ..options(&[], false) };
    assert_eq!(fold(&tokens, visible.clone()).content, "a<｜▁pad▁｜>｜DSML｜");
    // With ignore_eos the end-of-sentence token is a token like others.
    let mut fold = OutputFold::new(small(), visible);
    let mut delta = Delta::default();
    fold.push(EOS, false, &mut delta);
    assert_eq!(delta.content, "<｜end▁of▁sentence｜>");
}

#[test]
fn half_a_character_at_the_end_of_either_part_becomes_a_replacement() {
    let whale = ids("🐳");
    assert!(whale.len() > 1);
    let half = &whale[..whale.len() - 1];
    let tokens = [half, &[END_THINK], half].concat();
    let folded = fold(&tokens, options(&["\u{FFFD}!"], true));
    assert_eq!((folded.reasoning.as_str(), folded.content.as_str()), ("\u{FFFD}", "\u{FFFD}"));
}

#[test]
fn half_a_character_before_a_marker_ends_there_where_calls_are_read_too() {
    let whale = ids("🐳");
    let half = &whale[..whale.len() - 1];
    let tokens = [half, &[END_THINK], &ids("ok"), half, &[DSML], &whale].concat();
    let with_tools = OutputOptions { max_tool_calls: u32::MAX, ..options(&[], true) };
    let folded = fold(&tokens, with_tools);
    assert_eq!((folded.reasoning.as_str(), folded.content.as_str()), ("\u{FFFD}", "ok\u{FFFD}🐳"));
}

#[test]
fn text_is_held_back_no_longer_than_needed() {
    let mut fold = OutputFold::new(small(), options(&["\n\nUser:"], false));
    let mut seen = Vec::new();
    for id in ids("one\n\nUse two") {
        let mut delta = Delta::default();
        fold.push(id, false, &mut delta);
        seen.push(delta.content);
    }
    assert_eq!(seen.concat(), "one\n\nUse two");
    assert_eq!(seen[0], "one");
    assert!(seen.contains(&String::new()), "{seen:?}");
}

/// The whole output at once, by the definition of each rule.
fn specification(tokenizer: &Tokenizer, tokens: &[u32], options: &OutputOptions, stop: &[String]) -> (String, String) {
    let end = tokens.iter().position(|id| *id == EOS).unwrap_or(tokens.len());
    let mut tokens = &tokens[..end];
    let mut thought: &[u32] = &[];
    if options.starts_in_reasoning {
        let close = tokens.iter().position(|id| *id == END_THINK);
        thought = &tokens[..close.unwrap_or(tokens.len())];
        tokens = close.map_or(&[], |at| &tokens[at + 1..]);
        while let [THINK, rest @ ..] = thought {
            thought = rest;
        }
    }
    let text = |tokens: &[u32]| {
        let visible = tokens.iter().filter(|id| **id == DSML || !tokenizer.is_special(**id));
        let bytes: Vec<u8> = visible.flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut content = text(tokens);
    let first =
        stop.iter().filter_map(|pattern| content.find(pattern.as_str()).map(|at| (at + pattern.len(), at))).min();
    if let Some((_, at)) = first {
        content.truncate(at);
    }
    (text(thought), content)
}

proptest! {
    #[test]
    fn any_grouping_gives_what_the_rules_say(
        tokens in prop::collection::vec(
            prop_oneof![
                8 => 3u32..260,
                3 => prop::sample::select([30594, 46088, 25730, 104, 10759, 225, 271, 223].map(|id| small_id(id).unwrap()).to_vec()),
                1 => prop::sample::select(vec![EOS, 2, DSML, THINK, END_THINK, NO_ROW, u32::MAX]),
            ],
            0..40,
        ),
        groups in prop::collection::vec(1usize..6, 40),
        starts_in_reasoning: bool,
        stop in prop::collection::vec("[a-d!]{1,2}", 0..3),
    ) {
        let tokenizer: Arc<Tokenizer> = small();
        let patterns: Vec<&str> = stop.iter().map(String::as_str).collect();
        let options = options(&patterns, starts_in_reasoning);
        let (reasoning, content) = specification(&tokenizer, &tokens, &options, &stop);

        let mut fold = OutputFold::new(tokenizer, options);
        let mut whole = Delta::default();
        let mut delta = Delta::default();
        let mut rest = &tokens[..];
        for group in groups {
            let (now, later) = rest.split_at(group.min(rest.len()));
            rest = later;
            delta.clear();
            for id in now {
                fold.push(*id, *id == EOS, &mut delta);
                if *id == EOS {
                    rest = &[];
                    break;
                }
            }
            whole.reasoning.push_str(&delta.reasoning);
            whole.content.push_str(&delta.content);
        }
        fold.finish(false, &mut whole);
        prop_assert_eq!(whole.reasoning, reasoning);
        prop_assert_eq!(whole.content, content);
    }
}
