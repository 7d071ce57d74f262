//! Strings as arguments of a call: written as they are, without quotes, up to a closing tag.
//!
//! Nothing marks where such a string ends but the tag, so its grammar must not hold the tag's control token. A rule
//! that could is written as quoted JSON instead, which means the same to whoever reads the call.

use serde_json::{Map, Value};

use super::format;
use crate::chat::encode::DSML;

/// Formats of JSON Schema without the marker, as regular expressions.
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

/// The grammar of a string with these keywords; `None` where it has to be quoted JSON.
pub fn of_string(keywords: &Map<String, Value>) -> Option<Value> {
    let length = |name: &str| keywords.get(name).and_then(Value::as_u64);
    if let Some(pattern) = keywords.get("pattern").and_then(Value::as_str) {
        return is_closed(pattern).then(|| format::regex(pattern));
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
        (None, None) => format::any_text(DSML),
        (None, Some(max)) => format::short_text(DSML, max),
        (Some(min), max) => {
            let start = format::regex(&format!("[^\u{FF5C}]{{{min}}}"));
            let rest = match max {
                Some(max) => format::short_text(DSML, max.saturating_sub(min)),
                None => format::any_text(DSML),
            };
            format::sequence(vec![start, rest])
        }
    })
}

/// One of several strings.
pub fn one_of(texts: &[&str]) -> Value {
    format::either(texts.iter().map(|text| format::text(text)).collect())
}

/// Whether no match of the pattern can hold the marker: it has no class that is open to all but a few characters.
fn is_closed(pattern: &str) -> bool {
    let mut characters = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(character) = characters.next() {
        let is_open = match character {
            '\\' => matches!(characters.next(), Some('D' | 'S' | 'W' | 'p' | 'P' | 'u' | 'x') | None),
            '[' if !in_class => {
                in_class = true;
                characters.peek() == Some(&'^')
            }
            ']' => {
                in_class = false;
                false
            }
            // A range that ends beyond ASCII may hold it.
            '.' => !in_class,
            other => !other.is_ascii(),
        };
        if is_open {
            return false;
        }
    }
    !pattern.is_empty()
}

#[cfg(test)]
mod tests {
    use super::is_closed;

    #[test]
    fn a_pattern_is_closed_if_it_names_its_characters() {
        for pattern in ["^[a-z]+$", r"\d{4}-\d{2}", r"a\.b", "[.]", "(a|b)*"] {
            assert!(is_closed(pattern), "{pattern}");
        }
        for pattern in [".*", "[^a]", r"\S+", r"\W", r"\p{L}", "日本", r"\uFF5C", "", "[a-\u{FFFF}]"] {
            assert!(!is_closed(pattern), "{pattern}");
        }
    }
}
