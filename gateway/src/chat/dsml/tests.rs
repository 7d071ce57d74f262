#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::Value;

use crate::chat::calls::CallParser;
use crate::chat::delta::Delta;
use crate::chat::dialect::Dialect;
use crate::chat::markers::{Lexer, Marker, Piece};

use self::client::Client;

#[path = "../../../fuzz/src/client.rs"]
mod client;
mod malformed;
mod properties;

const GOLDEN: &str = include_str!("../../../tests/data/dsml/parse.jsonl");

/// An answer as a client gets it.
#[derive(Debug, PartialEq, Clone)]
struct Answer {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    complete: u32,
}

struct Run {
    dialect: Dialect,
    thinking: bool,
    is_cut: bool,
}

impl Run {
    fn pieces<'a>(&self, pieces: impl IntoIterator<Item = Piece<'a>>) -> Answer {
        let mut parser = CallParser::new(self.dialect, self.thinking, u32::MAX);
        let (mut client, mut delta) = (Client::default(), Delta::default());
        for piece in pieces {
            parser.push(piece, &mut delta);
            client.take(&mut delta);
        }
        parser.finish(self.is_cut, &mut delta);
        client.take(&mut delta);
        let Client { content, reasoning, calls } = client;
        Answer { content, reasoning, calls, complete: parser.num_complete_calls() }
    }

    fn chunks<'a>(&self, chunks: impl IntoIterator<Item = &'a str>) -> Answer {
        let mut parser = CallParser::new(self.dialect, self.thinking, u32::MAX);
        let mut lexer = Lexer::new(self.dialect.markers());
        let (mut client, mut delta) = (Client::default(), Delta::default());
        for chunk in chunks {
            lexer.push(chunk, |piece| parser.push(piece, &mut delta));
            client.take(&mut delta);
        }
        lexer.finish(|piece| parser.push(piece, &mut delta));
        parser.finish(self.is_cut, &mut delta);
        client.take(&mut delta);
        let Client { content, reasoning, calls } = client;
        Answer { content, reasoning, calls, complete: parser.num_complete_calls() }
    }
}

fn chars(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()])
}

fn chat(text: &str) -> Answer {
    Run { dialect: Dialect::V32, thinking: false, is_cut: false }.chunks([text])
}

fn thinking(text: &str) -> Answer {
    Run { dialect: Dialect::V32, thinking: true, is_cut: false }.chunks([text])
}

/// Whether arguments mean the same: as JSON where both are JSON, and as text otherwise.
fn same_arguments(given: &str, expected: &str) -> bool {
    match (serde_json::from_str::<Value>(given), serde_json::from_str::<Value>(expected)) {
        (Ok(given), Ok(expected)) => given == expected,
        _ => given == expected,
    }
}

fn matches(answer: &Answer, expected: &Value) -> bool {
    let calls = expected["tool_calls"].as_array().unwrap();
    let same_calls = answer.calls.len() == calls.len()
        && answer.calls.iter().zip(calls).all(|((name, arguments), call)| {
            call["name"] == name.as_str() && same_arguments(arguments, call["arguments"].as_str().unwrap())
        });
    expected["content"] == answer.content.as_str()
        && expected["reasoning_content"] == answer.reasoning.as_str()
        && same_calls
}

#[test]
fn golden_outputs_are_read_as_expected_however_they_come() {
    let mut rows = 0;
    for line in GOLDEN.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        rows += 1;
        if row["declares_tools"] == false {
            continue;
        }
        let run = Run {
            dialect: match row["format"].as_str().unwrap() {
                "v31" => Dialect::V31,
                "v3" => Dialect::V3,
                _ => Dialect::V32,
            },
            thinking: row["thinking_mode"] == "thinking",
            is_cut: row["ended_by"] == "length",
        };
        let text = row["raw_text"].as_str().unwrap();
        let whole = run.chunks([text]);
        let expected = row["expected"].as_array().unwrap();
        let name = format!("{} {}", row["id"], row["name"]);
        assert!(expected.iter().any(|answer| matches(&whole, answer)), "{name}: {whole:?}, expected {expected:?}");
        let stops = row["finish_reason"] != "length";
        assert_eq!(stops && whole.complete > 0, row["finish_reason"] == "tool_calls", "{name}: {whole:?}");
        assert_eq!(run.chunks(chars(text)), whole, "{name} by characters");
        let marker = |text: &str| run.dialect.markers().iter().copied().find(|marker| marker.text() == text).unwrap();
        let pieces = row["pieces"].as_array().unwrap().iter().map(|piece| match piece {
            Value::String(text) => Piece::Text(text),
            special => Piece::Marker(marker(special[0].as_str().unwrap())),
        });
        assert_eq!(run.pieces(pieces), whole, "{name} by tokens");
    }
    assert_eq!(rows, 67);
}

const OSLO: &str = "<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>";

fn block(body: &str) -> String {
    format!("\n\n<｜DSML｜function_calls>\n{body}\n</｜DSML｜function_calls>")
}

fn oslo() -> Vec<(String, String)> {
    vec![("get_weather".to_owned(), "{\"city\": \"Oslo\"}".to_owned())]
}

#[test]
fn blocks_are_found_without_their_blank_line() {
    let block = block(OSLO);
    let bare = block.trim_start();
    for before in ["\n\n", "\n", "", "\n\n  ", "\n\t"] {
        let answer = chat(&format!("Hi.{before}{bare}"));
        assert_eq!((answer.content.as_str(), answer.calls), ("Hi.", oslo()), "{before:?}");
    }
    let squeezed = block.replace('\n', "");
    assert_eq!(chat(&squeezed).calls, oslo());
    let indented = block.replace('\n', "\n    ");
    assert_eq!(chat(&indented).calls, oslo());
    let next_generation = block.replace("function_calls", "tool_calls");
    assert_eq!(chat(&next_generation).calls, oslo());
}

#[test]
fn prose_about_markup_is_no_call_and_loses_only_the_markup() {
    let answer = chat("A <｜DSML｜function_calls> block, ｜DSML｜ and <｜DSML｜b> or </｜DSML｜invoke> too.");
    assert_eq!((answer.content.as_str(), answer.calls), ("A  block,  and > or  too.", vec![]));
    let talk = "I write <｜DSML｜function_calls> and <｜DSML｜invoke name=\"f\"> then </｜DSML｜invoke>.";
    assert_eq!(thinking(talk).reasoning, talk);
}

#[test]
fn what_is_left_of_content_spells_no_marker() {
    for (text, content) in [
        ("A <｜DSML<｜DSML｜｜.", "A <｜DSML."),
        ("｜DS｜DSML｜ML｜.", "｜DS."),
        ("｜DS</｜DSML｜invoke>ML｜.", "｜DS."),
        ("｜DS<｜DSML｜function_calls>ML｜.", "｜DS."),
        ("｜DS<｜DSML｜x>ML", "｜DS>ML"),
        ("｜DS｜DSML｜M", "｜DSM"),
        ("｜DS｜DSML｜M｜DSML｜L.", "｜DSML."),
    ] {
        let answer = chat(text);
        assert_eq!((answer.content.as_str(), answer.calls), (content, vec![]), "{text}");
        let call = chat(&[text, &block(OSLO)].concat());
        assert_eq!((call.content.as_str(), call.calls), (content, oslo()), "{text}");
        assert_eq!(chat(&[text, "<｜DSML｜inv"].concat()).content, content, "{text}");
    }
}

#[test]
fn a_call_ends_reasoning() {
    for opening in ["Think.\n\n<｜DSML｜function_calls>\n", "Think.\n"] {
        let answer = thinking(&format!("{opening}{OSLO}\n</｜DSML｜function_calls></think>Hi"));
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Think.", ""));
        assert_eq!(answer.calls, oslo());
    }
}

#[test]
fn typed_markers_are_text_where_ids_are_known() {
    let run = Run { dialect: Dialect::V32, thinking: true, is_cut: false };
    let typed = block(OSLO);
    let answer = run.pieces([Piece::Text("</think>"), Piece::Marker(Marker::ThinkClose), Piece::Text(&typed)]);
    assert_eq!((answer.reasoning.as_str(), answer.content), ("</think>", typed));
}

#[test]
fn values_hold_any_text_but_their_own_end() {
    let value = "</｜DSML｜invoke> <｜DSML｜parameter name=\"x\" string=\"true\"> </｜DSML｜x> ｜DSML｜ </think>\n</｜DSML｜invoke>\n";
    let text = block(&OSLO.replace("Oslo", value));
    let arguments: Value = serde_json::from_str(&chat(&text).calls[0].1).unwrap();
    assert_eq!(arguments["city"], value);
}

#[test]
fn an_unclosed_parameter_ends_with_its_invoke() {
    let unclosed = OSLO.replace("</｜DSML｜parameter>", "");
    assert_eq!(chat(&block(&unclosed)).calls, oslo());
    assert_eq!(chat(&unclosed).calls, oslo());
    let both = chat(&block(&format!("{unclosed}\n{OSLO}")));
    assert_eq!((both.calls.len(), both.complete), (2, 2));
}

#[test]
fn an_invoke_without_a_sound_tag_is_dropped_and_its_siblings_stay() {
    let broken = [
        "<｜DSML｜invoke name=\"\">\n</｜DSML｜invoke>",
        "<｜DSML｜invoke>\n</｜DSML｜invoke>",
        "<｜DSML｜invoke name=\"f>\n<｜DSML｜parameter name=\"a\" string=\"true\">b</｜DSML｜parameter>\n</｜DSML｜invoke>",
        "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\">b</｜DSML｜parameter>\n</｜DSML｜invoke>",
        "<｜DSML｜invoke name=\"f\">\n<parameter name=\"a\" string=\"true\">b</parameter>\n</｜DSML｜invoke>",
        "<｜DSML｜invoke name=\"f\">\n[1]\n</｜DSML｜invoke>",
        "<｜DSML｜invoke name=\"f\">\n",
    ];
    for broken in broken {
        assert_eq!(chat(&block(&format!("{broken}\n{OSLO}"))).calls, oslo(), "{broken}");
    }
}

#[test]
fn of_two_parameters_of_one_name_the_first_counts() {
    let parameter = "<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>";
    for second in ["Bergen", ""] {
        let twice = OSLO.replace(parameter, &format!("{parameter}\n{}", parameter.replace("Oslo", second)));
        assert_eq!(chat(&block(&twice)).calls, oslo());
        let json = parameter.replace("true", "false").replace("Oslo", "[1]");
        let mixed = OSLO.replace(parameter, &format!("{parameter}\n{json}"));
        assert_eq!(chat(&block(&mixed)).calls, oslo());
    }
}

#[test]
fn a_call_that_was_cut_stays_as_unfinished_as_it_is() {
    let cut = Run { dialect: Dialect::V32, thinking: false, is_cut: true };
    let body = OSLO.trim_end_matches("</｜DSML｜invoke>");
    for (ending, arguments) in
        [("", "{\"city\": \"Oslo\""), ("</", "{\"city\": \"Oslo\""), ("\n", "{\"city\": \"Oslo\"")]
    {
        let text = format!("{}{ending}", block(body).trim_end_matches("\n</｜DSML｜function_calls>"));
        let answer = cut.chunks([text.as_str()]);
        assert_eq!((answer.calls[0].1.as_str(), answer.complete), (arguments, 0), "{ending:?}");
        // The same, come to its end: the parameter is closed, so the call is whole.
        assert_eq!((chat(&text).calls, chat(&text).complete), (oslo(), 1), "{ending:?}");
    }
}

#[test]
fn strings_stream_and_json_waits_for_its_end() {
    let mut parser = CallParser::new(Dialect::V32, false, u32::MAX);
    let mut lexer = Lexer::new(Marker::DSML_SET);
    let mut delta = Delta::default();
    let mut feed = |text: &str| {
        lexer.push(text, |piece| parser.push(piece, &mut delta));
        let sent: String = delta.calls.iter().map(|call| call.arguments.as_str()).collect();
        let named = delta.calls.iter().any(|call| call.name.is_some());
        delta.clear();
        (named, sent)
    };
    assert_eq!(feed("<｜DSML｜invoke name=\"f\">\n"), (false, String::new()));
    assert_eq!(feed("<｜DSML｜parameter name=\"s\" string=\"true\">a\"b"), (true, "{\"s\": \"a\\\"b".to_owned()));
    assert_eq!(feed("c\n"), (false, "c".to_owned()));
    assert_eq!(feed("d"), (false, "\\nd".to_owned()));
    assert_eq!(
        feed("</｜DSML｜parameter>\n<｜DSML｜parameter name=\"j\" string=\"false\">[1,"),
        (false, "\"".to_owned())
    );
    assert_eq!(feed(" 2]"), (false, String::new()));
    assert_eq!(feed("</｜DSML｜parameter>\n</｜DSML｜invoke>"), (false, ", \"j\": [1, 2]}".to_owned()));
}

#[test]
fn calls_beyond_the_bound_are_discarded() {
    let mut parser = CallParser::new(Dialect::V32, false, 1);
    let mut delta = Delta::default();
    let text = block(&format!("{OSLO}\n{OSLO}"));
    Lexer::new(Marker::DSML_SET).push(&text, |piece| parser.push(piece, &mut delta));
    parser.finish(false, &mut delta);
    assert_eq!((delta.calls.len(), parser.num_complete_calls()), (1, 1));
}
