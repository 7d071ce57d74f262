#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::Value;

use super::{escape, write, write_string};

fn dump(json: &str) -> String {
    let value: Value = serde_json::from_str(json).unwrap();
    let mut out = String::new();
    write(&value, &mut out);
    out
}

/// The right sides are what CPython 3.12 prints.
#[test]
fn floats_are_written_as_python_does() {
    let cases = [
        ("1e16", "1e+16"),
        ("9999999999999998.0", "9999999999999998.0"),
        ("1e15", "1000000000000000.0"),
        ("1e-7", "1e-07"),
        ("0.0001", "0.0001"),
        ("0.00001", "1e-05"),
        ("0.1", "0.1"),
        ("1.0", "1.0"),
        ("-0.0", "-0.0"),
        ("0e5", "0.0"),
        ("1.5E300", "1.5e+300"),
        ("123456.789e3", "123456789.0"),
        ("1e5", "100000.0"),
        ("1E+2", "100.0"),
        ("0.30000000000000004", "0.30000000000000004"),
        ("1e22", "1e+22"),
        ("5e-324", "5e-324"),
        ("1.7976931348623157e308", "1.7976931348623157e+308"),
        ("2.2250738585072014e-308", "2.2250738585072014e-308"),
        ("9007199254740993.0", "9007199254740992.0"),
        ("-1.25e-9", "-1.25e-09"),
        ("1e400", "Infinity"),
        ("-1e400", "-Infinity"),
        ("1e-400", "0.0"),
        ("100.50", "100.5"),
    ];
    for (json, expected) in cases {
        assert_eq!(dump(json), expected, "{json}");
    }
}

#[test]
fn integers_of_any_size_keep_their_digits() {
    for json in ["0", "-1", "18446744073709551616", "-123456789012345678901234567890", "9007199254740993"] {
        assert_eq!(dump(json), json);
    }
    assert_eq!(dump("-0"), "0");
}

#[test]
fn separators_have_a_space_and_keys_keep_their_order() {
    let json = r#"{"b":[1,2,{"c":null}],"a":{"z":true,"y":false},"":[],"e":{}}"#;
    let expected = r#"{"b": [1, 2, {"c": null}], "a": {"z": true, "y": false}, "": [], "e": {}}"#;
    assert_eq!(dump(json), expected);
}

#[test]
fn of_a_repeated_key_the_last_value_stands_in_the_first_place() {
    assert_eq!(dump(r#"{"k": 1, "z": 2, "k": "last"}"#), r#"{"k": "last", "z": 2}"#);
}

#[test]
fn only_quotes_backslashes_and_controls_are_escaped() {
    let json = r#""\u6771 \ud83d\udc0b / \/ \" \\ \b\f\n\r\t \u0000\u001f \u007f\u0085\u2028""#;
    let expected = "\"東 🐋 / / \\\" \\\\ \\b\\f\\n\\r\\t \\u0000\\u001f \u{7f}\u{85}\u{2028}\"";
    assert_eq!(dump(json), expected);
}

proptest! {
    #[test]
    fn strings_come_back(text: String) {
        let mut out = String::new();
        write_string(&text, &mut out);
        prop_assert_eq!(serde_json::from_str::<String>(&out).unwrap(), text);
    }

    #[test]
    fn escaping_in_pieces_is_escaping_in_one(pieces in prop::collection::vec(".{0,5}", 0..8)) {
        let (mut whole, mut joined) = (String::new(), String::new());
        escape(&pieces.concat(), &mut whole);
        for piece in &pieces {
            escape(piece, &mut joined);
        }
        prop_assert_eq!(whole, joined);
    }

    #[test]
    fn doubles_come_back(value in prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL | prop::num::f64::ZERO) {
        let dumped = dump(&format!("{value:e}"));
        prop_assert_eq!(dumped.parse::<f64>().unwrap(), value);
        prop_assert!(dumped.contains('.') || dumped.contains('e'), "{} is no float", dumped);
    }
}
