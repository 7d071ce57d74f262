//! The vocabulary of xgrammar's structural tags, as JSON, and a builder for markup made of text and control tokens.

use serde_json::{Value, json};

/// White space between two JSON tokens: as in training, and no endless run of it.
const MAX_JSON_SPACES: u32 = 1;

/// The whole, as it is sent.
pub fn structural_tag(format: Value) -> Value {
    json!({ "type": "structural_tag", "format": format })
}

pub fn text(value: &str) -> Value {
    json!({ "type": "const_string", "value": value })
}

fn token(id: u32) -> Value {
    json!({ "type": "token", "token": id })
}

/// Any text. A list of exclusions, even an empty one, would make it any bytes and with them any control token.
pub fn any_text() -> Value {
    json!({ "type": "any_text" })
}

/// At most so many characters of any text.
pub fn short_text(max_chars: u64) -> Value {
    json!({ "type": "any_text", "max_chars": max_chars })
}

pub fn regex(pattern: &str) -> Value {
    json!({ "type": "regex", "pattern": pattern })
}

pub fn grammar(ebnf: &str) -> Value {
    json!({ "type": "grammar", "grammar": ebnf })
}

/// JSON that a client reads as it is.
pub fn json(schema: Value) -> Value {
    json!({ "type": "json_schema", "json_schema": schema })
}

/// JSON as the model writes it inside a call.
pub fn argument_json(schema: Value) -> Value {
    json!({ "type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_JSON_SPACES })
}

/// One of several; a single one stands for itself.
pub fn either(mut formats: Vec<Value>) -> Value {
    match formats.pop() {
        Some(only) if formats.is_empty() => only,
        last => {
            formats.extend(last);
            json!({ "type": "or", "elements": formats })
        }
    }
}

/// One after the other; a single one stands for itself, and neighbouring texts become one.
pub fn sequence(formats: Vec<Value>) -> Value {
    let mut markup = Markup::default();
    formats.into_iter().for_each(|format| markup.push(format));
    markup.into_format()
}

/// Once or not at all.
pub fn optional(format: Value) -> Value {
    json!({ "type": "optional", "content": format })
}

/// Once or more often.
pub fn repeated(format: Value) -> Value {
    json!({ "type": "plus", "content": format })
}

/// A sequence in the making.
#[derive(Debug, Default)]
pub struct Markup {
    elements: Vec<Value>,
    /// Text that nothing has followed yet.
    pending: String,
}

impl Markup {
    pub fn text(mut self, text: &str) -> Self {
        self.pending.push_str(text);
        self
    }

    pub fn token(mut self, id: u32) -> Self {
        self.push(token(id));
        self
    }

    pub fn format(mut self, format: Value) -> Self {
        self.push(format);
        self
    }

    fn push(&mut self, format: Value) {
        match (format["type"].as_str(), format["value"].as_str()) {
            (Some("const_string"), Some(text)) => self.pending.push_str(text),
            (Some("sequence"), _) => {
                let Value::Object(mut fields) = format else { return };
                if let Some(Value::Array(elements)) = fields.remove("elements") {
                    elements.into_iter().for_each(|element| self.push(element));
                }
            }
            _ => {
                self.flush();
                self.elements.push(format);
            }
        }
    }

    fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.elements.push(text(&std::mem::take(&mut self.pending)));
        }
    }

    pub fn into_format(mut self) -> Value {
        self.flush();
        match self.elements.pop() {
            None => text(""),
            Some(only) if self.elements.is_empty() => only,
            Some(last) => {
                self.elements.push(last);
                json!({ "type": "sequence", "elements": self.elements })
            }
        }
    }
}
