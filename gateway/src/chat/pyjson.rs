//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: what the model saw in training.
//!
//! Separators are `, ` and `: `, keys keep their order, a float is written as Python's `repr` does, an integer of any
//! size stays as it is. Another style changes every tool prompt, and with it how well the model calls tools.

use serde_json::{Map, Number, Value};

/// An exponent below or above which Python writes a float in scientific notation.
const FIXED_EXPONENTS: std::ops::Range<i32> = -4..16;

/// Appends `value` to `out`. Time is linear in the value.
pub fn write(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(number, out),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write(item, out);
            }
            out.push(']');
        }
        Value::Object(fields) => write_object(fields, out),
    }
}

/// Appends an object to `out`.
pub fn write_object(fields: &Map<String, Value>, out: &mut String) {
    out.push('{');
    for (index, (key, value)) in fields.iter().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        write_string(key, out);
        out.push_str(": ");
        write(value, out);
    }
    out.push('}');
}

/// Appends a quoted string to `out`.
pub fn write_string(text: &str, out: &mut String) {
    out.push('"');
    escape(text, out);
    out.push('"');
}

/// Appends what stands between the quotes of a JSON string. Escaping a text in pieces gives the same as in one piece.
pub fn escape(text: &str, out: &mut String) {
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[plain..at]);
        plain = at + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            0x08 => out.push_str("\\b"),
            0x0c => out.push_str("\\f"),
            _ => {
                out.push_str("\\u00");
                for nibble in [byte >> 4, byte & 15] {
                    out.push(char::from_digit(nibble.into(), 16).unwrap_or('0'));
                }
            }
        }
    }
    out.push_str(&text[plain..]);
}

/// A number without point and exponent is an integer and keeps its digits; any other is a double.
fn write_number(number: &Number, out: &mut String) {
    let text = number.as_str();
    if text == "-0" {
        out.push('0');
    } else if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
        out.push_str(text);
    } else {
        // The text is a number of JSON, so it is one of Rust; a double that is too large is infinite in both.
        write_float(text.parse().unwrap_or(f64::NAN), out);
    }
}

/// Python's `repr` of a float: the shortest digits that give it back.
fn write_float(value: f64, out: &mut String) {
    if !value.is_finite() {
        out.push_str(match (value.is_nan(), value < 0.0) {
            (true, _) => "NaN",
            (false, true) => "-Infinity",
            (false, false) => "Infinity",
        });
        return;
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || FIXED_EXPONENTS.contains(&exponent) {
        let fixed = format!("{value}");
        out.push_str(&fixed);
        if !fixed.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    out.push_str(mantissa);
    out.push_str(if exponent < 0 { "e-" } else { "e+" });
    if exponent.abs() < 10 {
        out.push('0');
    }
    out.push_str(&exponent.abs().to_string());
}

#[cfg(test)]
mod tests;
