//! Requests of the other dialects as chat requests: one set of rules, and refusals in the caller's own field names.
//!
//! A dialect takes its fields out of the body, adds messages and tools here, and leaves the rest: sampling fields and
//! extensions mean the same in every dialect, and [`ChatRequest`] checks them.

use serde_json::{Map, Value, json};

use super::chat::ChatRequest;
use super::error::InvalidRequest;
use super::node::Fields;

/// A chat request under construction.
#[derive(Debug, Default)]
pub(super) struct ChatBody {
    fields: Map<String, Value>,
    messages: Vec<Value>,
    tools: Vec<Value>,
    names: Names,
}

impl ChatBody {
    /// Sets a field; `path` is where the request says it.
    pub(super) fn set(&mut self, field: &str, value: Value, path: impl Into<String>) {
        self.fields.insert(field.to_owned(), value);
        self.names.within(field, path);
    }

    /// Adds what the dialect does not define, without overwriting what it set.
    pub(super) fn extend(&mut self, rest: Map<String, Value>) {
        for (field, value) in rest {
            self.fields.entry(field).or_insert(value);
        }
    }

    /// Appends a message that stands at `path`.
    pub(super) fn message(&mut self, message: Value, path: impl Into<String>) {
        self.names.within(format!("messages[{}]", self.messages.len()), path);
        self.messages.push(message);
    }

    /// Appends text to the conversation's leading system message, as a part of its own.
    pub(super) fn system(&mut self, text: String, path: &str) {
        if self.messages.last().is_none_or(|last| last["role"] != "system") {
            self.message(json!({"role": "system", "content": []}), path);
        }
        if let Some(Value::Array(parts)) = self.messages.last_mut().map(|last| &mut last["content"]) {
            parts.push(json!({"type": "text", "text": text}));
        }
    }

    /// The message appended last, and its name in a chat request.
    pub(super) fn last(&mut self) -> Option<(String, &mut Value)> {
        let name = format!("messages[{}]", self.messages.len().checked_sub(1)?);
        self.messages.last_mut().map(|message| (name, message))
    }

    /// Appends a function that stands at `path`, its schema at `path.schema`.
    pub(super) fn function(&mut self, function: Map<String, Value>, path: &str, schema: &str) {
        let name = format!("tools[{}]", self.tools.len());
        self.names.within(format!("{name}.function.parameters"), format!("{path}.{schema}"));
        self.names.within(format!("{name}.function"), path);
        self.names.within(name, path);
        self.tools.push(json!({"type": "function", "function": function}));
    }

    pub(super) fn names(&mut self) -> &mut Names {
        &mut self.names
    }

    /// The chat request, and what its fields are called in the request it came from.
    ///
    /// # Errors
    /// A field that both dialects share is of a wrong type.
    pub(super) fn finish(mut self) -> Result<(ChatRequest, Names), InvalidRequest> {
        self.fields.insert("messages".to_owned(), Value::Array(self.messages));
        if !self.tools.is_empty() {
            self.fields.insert("tools".to_owned(), Value::Array(self.tools));
        }
        let body = serde_json::to_vec(&self.fields).unwrap_or_default();
        match ChatRequest::parse(&body) {
            Ok(request) => Ok((request, self.names)),
            Err(refusal) => Err(self.names.rename(refusal)),
        }
    }
}

/// Refuses fields of chat requests that another dialect spells differently (second) or does not have.
pub(super) fn refuse_foreign(
    body: &mut Fields,
    endpoint: &str,
    foreign: &[(&str, Option<&str>)],
) -> Result<(), InvalidRequest> {
    for (field, instead) in foreign {
        let Some(node) = body.take(field) else { continue };
        let rule = match instead {
            Some(own) => format!("is no field of {endpoint}; there it is '{own}'"),
            None => format!("is no field of {endpoint}"),
        };
        return Err(node.invalid(&rule));
    }
    Ok(())
}

/// What the fields of a chat request are called in the request it was made from.
#[derive(Debug, Default)]
pub struct Names(Vec<Name>);

#[derive(Debug)]
struct Name {
    chat: String,
    own: String,
    /// Whether what lies inside is called the same in both.
    keeps_inside: bool,
}

impl Names {
    /// `chat` is called `own`, and what lies inside it is called alike.
    pub(super) fn within(&mut self, chat: impl Into<String>, own: impl Into<String>) {
        self.0.push(Name { chat: chat.into(), own: own.into(), keeps_inside: true });
    }

    /// `chat` and everything inside it come from `own`.
    pub(super) fn whole(&mut self, chat: impl Into<String>, own: impl Into<String>) {
        self.0.push(Name { chat: chat.into(), own: own.into(), keeps_inside: false });
    }

    /// The refusal in the caller's words.
    #[must_use]
    pub fn rename(&self, refusal: InvalidRequest) -> InvalidRequest {
        let Some(param) = refusal.param.as_deref() else { return refusal };
        let Some(own) = self.own(param) else { return refusal };
        let message = refusal.message.replace(&format!("'{param}'"), &format!("'{own}'"));
        InvalidRequest { param: Some(own), message, ..refusal }
    }

    /// By the name that covers most of `param`.
    fn own(&self, param: &str) -> Option<String> {
        let inside = |name: &&Name| {
            param.strip_prefix(&name.chat).is_some_and(|inside| inside.is_empty() || inside.starts_with(['.', '[']))
        };
        let name = self.0.iter().filter(inside).max_by_key(|name| name.chat.len())?;
        let inside = if name.keeps_inside { &param[name.chat.len()..] } else { "" };
        Some(format!("{}{inside}", name.own))
    }
}

#[cfg(test)]
mod tests {
    use super::{InvalidRequest, Names};

    #[test]
    fn a_refusal_speaks_of_the_longest_name_that_covers_its_field() {
        let mut names = Names::default();
        names.within("messages", "input");
        names.within("messages[1]", "input[4]");
        names.whole("messages[1].tool_calls[0].function", "input[5].arguments");
        let rename = |param: &str| {
            let refusal = InvalidRequest::field(param, format!("'{param}' is required."));
            let renamed = names.rename(refusal);
            assert_eq!(renamed.message, format!("'{}' is required.", renamed.param.clone().unwrap_or_default()));
            renamed.param.unwrap_or_default()
        };
        assert_eq!(rename("messages"), "input");
        assert_eq!(rename("messages[1].content[2].text"), "input[4].content[2].text");
        assert_eq!(rename("messages[1].tool_calls[0].function.name"), "input[5].arguments");
        assert_eq!(rename("messages[10]"), "input[10]");
        assert_eq!(rename("messages_of_mine"), "messages_of_mine");
        assert_eq!(names.rename(InvalidRequest::body("No.")).param, None);
    }
}
