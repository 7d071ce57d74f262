//! A JSON value together with the path it stands at, so that every refusal names its place.
//!
//! For bodies whose items differ by a `type` inside them; bodies of fixed fields use typed structs.

use serde_json::{Map, Value};

use super::error::InvalidRequest;
use super::fields::parse_body;

/// A value in a request.
#[derive(Debug)]
pub(super) struct Node {
    path: String,
    value: Value,
}

/// An object in a request; fields are taken out one by one.
#[derive(Debug)]
pub(super) struct Fields {
    /// Empty for the body itself.
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Parses a body, which must be an object.
    pub(super) fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        Ok(Self { path: String::new(), map: parse_body(body)? })
    }

    /// The path of a field.
    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The path of the object.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Takes a field; null counts as absent.
    pub(super) fn take(&mut self, key: &str) -> Option<Node> {
        let value = self.map.shift_remove(key).filter(|value| !value.is_null())?;
        Some(Node { path: self.path_of(key), value })
    }

    /// Takes a field that must be there.
    pub(super) fn need(&mut self, key: &str) -> Result<Node, InvalidRequest> {
        self.take(key).ok_or_else(|| {
            let path = self.path_of(key);
            let message = format!("'{path}' is required.");
            InvalidRequest::field(path, message)
        })
    }

    /// Looks at a field.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// What has not been taken.
    pub(super) fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses an ability that this server lacks, where the field asks for one.
    pub(super) fn refuse(&mut self, key: &str, why: &str) -> Result<(), InvalidRequest> {
        match self.take(key) {
            Some(node) if node.asks() => Err(node.not_implemented(why)),
            _ => Ok(()),
        }
    }
}

impl Node {
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    pub(super) fn into_value(self) -> Value {
        self.value
    }

    pub(super) fn object(self) -> Result<Fields, InvalidRequest> {
        match self.value {
            Value::Object(map) => Ok(Fields { path: self.path, map }),
            _ => Err(self.wrong("an object")),
        }
    }

    pub(super) fn string(self) -> Result<String, InvalidRequest> {
        match self.value {
            Value::String(text) => Ok(text),
            _ => Err(self.wrong("a string")),
        }
    }

    pub(super) fn bool(self) -> Result<bool, InvalidRequest> {
        self.value.as_bool().ok_or_else(|| self.wrong("true or false"))
    }

    /// The elements with their paths.
    pub(super) fn list(self) -> Result<impl Iterator<Item = Node>, InvalidRequest> {
        match self.value {
            Value::Array(values) => {
                let element = move |(index, value)| Node { path: format!("{}[{index}]", self.path), value };
                Ok(values.into_iter().enumerate().map(element))
            }
            _ => Err(self.wrong("a list")),
        }
    }

    /// One of `words`.
    pub(super) fn word(self, words: &[&str]) -> Result<String, InvalidRequest> {
        match self.value {
            Value::String(word) if words.contains(&word.as_str()) => Ok(word),
            _ => Err(self.wrong(&format!("one of {}", words.join(", ")))),
        }
    }

    /// A refusal that says what the value must be.
    pub(super) fn wrong(&self, expected: &str) -> InvalidRequest {
        self.invalid(&format!("must be {expected}, but it is {}", kind_of(&self.value)))
    }

    /// A refusal by a rule that completes the sentence.
    pub(super) fn invalid(&self, rule: &str) -> InvalidRequest {
        InvalidRequest::field(&self.path, format!("'{}' {rule}.", self.path))
    }

    /// A refusal of an ability that this server lacks.
    pub(super) fn not_implemented(&self, why: &str) -> InvalidRequest {
        let message = format!("'{}' is not implemented by this server: {why}.", self.path);
        InvalidRequest::not_implemented(&self.path, message)
    }

    /// Whether the value asks for anything: null, false and everything empty do not.
    fn asks(&self) -> bool {
        match &self.value {
            Value::Null | Value::Bool(false) => false,
            Value::Bool(true) | Value::Number(_) => true,
            Value::String(text) => !text.is_empty(),
            Value::Array(values) => !values.is_empty(),
            Value::Object(map) => !map.is_empty(),
        }
    }
}

/// What a value is, for a sentence; short strings are quoted.
fn kind_of(value: &Value) -> String {
    const MAX_QUOTED_BYTES: usize = 40;
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(_) => "a number".to_owned(),
        Value::String(text) if text.len() <= MAX_QUOTED_BYTES => format!("{text:?}"),
        Value::String(_) => "another string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
