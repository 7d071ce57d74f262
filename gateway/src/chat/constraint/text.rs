//! Strings as arguments of a call: written as they are, without quotes, up to a closing tag.
//!
//! Nothing marks where such a string ends but the tag, and no text holds the tag's control token: that is why control
//! tokens stand for no text in a worker's grammars.

use serde_json::{Map, Value};

use super::format;

/// Formats of JSON Schema, as regular expressions.
const FORMATS: &[(&str, &str)] = &[
    ("date", "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
    ("time", "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"),
    (
        "date-time",
        "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?\
         (Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    ),
    ("uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"),
    ("ipv4", "((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"),
    ("email", "[a-zA-Z0-9_+-]{1,32}(\\.[a-zA-Z0-9_+-]{1,32}){0,4}@[a-zA-Z0-9]{1,32}(\\.[a-zA-Z]{2,16}){1,4}"),
];

/// Formats that xgrammar knows and this table lacks.
const QUOTED_FORMATS: &[&str] =
    &["duration", "hostname", "ipv6", "json-pointer", "relative-json-pointer", "uri", "uri-reference", "uri-template"];

/// Any character, for all that a text may hold.
const ANY_CHARACTER: &str = "[^\\uFFFF]";

/// The grammar of a string with these keywords; `None` where it has to be quoted JSON, whose formats are xgrammar's.
pub fn of_string(keywords: &Map<String, Value>) -> Option<Value> {
    let length = |name: &str| keywords.get(name).and_then(Value::as_u64);
    if let Some(pattern) = keywords.get("pattern").and_then(Value::as_str).filter(|pattern| !pattern.is_empty()) {
        return Some(format::regex(pattern));
    }
    if let Some(name) = keywords.get("format").and_then(Value::as_str) {
        if QUOTED_FORMATS.contains(&name) {
            return None;
        }
        if let Some((_, pattern)) = FORMATS.iter().find(|(known, _)| *known == name) {
            return Some(format::regex(pattern));
        }
        // Any other name is a remark.
    }
    Some(match (length("minLength").filter(|min| *min > 0), length("maxLength")) {
        (None, None) => format::any_text(),
        (None, Some(max)) => format::short_text(max),
        (Some(min), max) => {
            let start = format::regex(&format!("{ANY_CHARACTER}{{{min}}}"));
            let rest = match max {
                Some(max) => format::short_text(max.saturating_sub(min)),
                None => format::any_text(),
            };
            format::sequence(vec![start, rest])
        }
    })
}

/// One of several strings.
pub fn one_of(texts: &[&str]) -> Value {
    format::either(texts.iter().map(|text| format::text(text)).collect())
}
