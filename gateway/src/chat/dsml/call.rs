//! The call that is being read, and how its arguments become one JSON object piece by piece.

use std::collections::HashSet;

use serde::de::IgnoredAny;

use crate::chat::delta::Delta;
use crate::chat::pyjson;

/// How a parameter's value is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueKind {
    /// Literal text, sent on as it comes.
    Text,
    /// JSON, sent on when its end is known, as a string if it is not JSON.
    Json,
    /// Not part of the call.
    Ignored,
}

/// One invoke. Nothing is sent before its first parameter is known to be sound, so until then it can be dropped.
#[derive(Debug, Default)]
pub(super) struct Call {
    name: String,
    index: u32,
    pub is_sent: bool,
    keys: HashSet<String>,
    /// Text of the body outside parameters, while nothing has been sent.
    body: String,
    key: String,
    json: String,
}

impl Call {
    pub(super) fn new(name: &str, index: u32) -> Self {
        Self { name: name.to_owned(), index, ..Self::default() }
    }

    pub(super) fn body_text(&mut self, text: &str) {
        if !self.is_sent {
            self.body.push_str(text);
        }
    }

    /// Whether there is text where only parameters belong.
    pub(super) fn has_stray_text(&self) -> bool {
        !self.body.trim().is_empty()
    }

    /// Begins a parameter. The first of two with one name counts: it may be on its way already.
    pub(super) fn open(&mut self, key: &str, kind: ValueKind, out: &mut Delta) -> ValueKind {
        if kind == ValueKind::Ignored || !self.keys.insert(key.to_owned()) {
            return ValueKind::Ignored;
        }
        if kind == ValueKind::Text {
            self.send_key(key, out);
            out.arguments(self.index).push('"');
        } else {
            key.clone_into(&mut self.key);
            self.json.clear();
        }
        kind
    }

    pub(super) fn value(&mut self, kind: ValueKind, text: &str, out: &mut Delta) {
        match kind {
            ValueKind::Text if !text.is_empty() => pyjson::escape(text, out.arguments(self.index)),
            ValueKind::Json => self.json.push_str(text),
            ValueKind::Text | ValueKind::Ignored => {}
        }
    }

    pub(super) fn close(&mut self, kind: ValueKind, out: &mut Delta) {
        match kind {
            ValueKind::Text => out.arguments(self.index).push('"'),
            ValueKind::Json => {
                let (key, json) = (std::mem::take(&mut self.key), std::mem::take(&mut self.json));
                self.send_key(&key, out);
                let arguments = out.arguments(self.index);
                if is_json(&json) {
                    arguments.push_str(json.trim());
                } else {
                    pyjson::write_string(&json, arguments);
                }
            }
            ValueKind::Ignored => {}
        }
    }

    /// Ends the call. Its body may have been one JSON object. A body that is neither that nor empty, or that is
    /// empty and was never closed, is not a call; then the result is false and nothing has been sent.
    pub(super) fn finish(&mut self, is_closed: bool, out: &mut Delta) -> bool {
        if self.is_sent {
            out.arguments(self.index).push('}');
            return true;
        }
        let body = std::mem::take(&mut self.body);
        let object = match body.trim() {
            "" if is_closed => "{}",
            object if object.starts_with('{') && is_json(object) => object,
            _ => return false,
        };
        self.send_name(out);
        out.arguments(self.index).push_str(object);
        true
    }

    fn send_name(&mut self, out: &mut Delta) {
        out.begin_call(self.index, std::mem::take(&mut self.name));
        self.is_sent = true;
        self.body = String::new();
    }

    fn send_key(&mut self, key: &str, out: &mut Delta) {
        let opening = if self.is_sent { ", " } else { "{" };
        if !self.is_sent {
            self.send_name(out);
        }
        let arguments = out.arguments(self.index);
        arguments.push_str(opening);
        pyjson::write_string(key, arguments);
        arguments.push_str(": ");
    }
}

/// Whether a text is one value of JSON. Time is linear, and depth does not matter.
fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}
