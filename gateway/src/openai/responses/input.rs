//! The items of `input` as messages: neighbouring reasoning, text and calls of the assistant form one message.

use serde_json::{Value, json};

use crate::openai::error::InvalidRequest;
use crate::openai::node::{Fields, Node};
use crate::openai::rewrite::ChatBody;

/// Reads `input`, a text or a list of items.
pub(super) fn read(input: Node, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if input.value().is_string() {
        chat.message(json!({"role": "user", "content": input.value()}), input.path());
        return Ok(());
    }
    if !input.value().is_array() {
        return Err(input.wrong("a string or a list of items"));
    }
    if input.value().as_array().is_some_and(Vec::is_empty) {
        return Err(input.invalid("must hold at least one item"));
    }
    let mut items = Items { chat, answer: None };
    for item in input.list()? {
        items.read(item.object()?)?;
    }
    Ok(())
}

struct Items<'a> {
    chat: &'a mut ChatBody,
    /// What the assistant's message at the end holds so far, while it may still grow.
    answer: Option<Answer>,
}

#[derive(Default)]
struct Answer {
    has_content: bool,
    num_calls: usize,
}

impl Items<'_> {
    fn read(&mut self, mut item: Fields) -> Result<(), InvalidRequest> {
        let kind = item.take("type");
        let Some(kind) = kind else { return self.message(item) };
        match kind.value().as_str() {
            Some("message") => self.message(item),
            Some("reasoning") => self.reasoning(item),
            Some("function_call") => self.call(item),
            Some("function_call_output") => self.output(item),
            Some("item_reference") => Err(kind.not_implemented("nothing is stored; send the item itself")),
            Some(_) => Err(kind.not_implemented(
                "items are of type \"message\", \"reasoning\", \"function_call\" or \"function_call_output\"",
            )),
            None => Err(kind.wrong("a string")),
        }
    }

    fn message(&mut self, mut item: Fields) -> Result<(), InvalidRequest> {
        let path = item.path().to_owned();
        let role = item.need("role")?.word(&["user", "assistant", "system", "developer"])?;
        let content = content(item.need("content")?)?;
        match role.as_str() {
            "assistant" => {
                let is_open = self.answer.as_ref().is_some_and(|answer| !answer.has_content && answer.num_calls == 0);
                if !is_open {
                    self.answer = None;
                }
                self.answer(&path).has_content = true;
                if let Some((name, message)) = self.chat.last() {
                    message["content"] = content;
                    self.chat.names().within(format!("{name}.content"), format!("{path}.content"));
                }
            }
            "user" => self.append(json!({"role": "user", "content": content}), &path),
            // Both instruct; the model's own developer role is a user's message with tools, which is not meant here.
            _ => self.append(json!({"role": "system", "content": content}), &path),
        }
        Ok(())
    }

    /// Reasoning that came before a message or a call. A summary stands in where the text was not sent.
    fn reasoning(&mut self, mut item: Fields) -> Result<(), InvalidRequest> {
        let path = item.path().to_owned();
        let mut text = joined(item.take("content"))?;
        if text.is_empty() {
            text = joined(item.take("summary"))?;
        }
        if let Some(sealed) = item.take("encrypted_content").filter(|_| text.is_empty()) {
            return Err(sealed.not_implemented("sealed reasoning cannot be read; send its 'content'"));
        }
        if self.answer.as_ref().is_some_and(|answer| answer.has_content || answer.num_calls > 0) {
            self.answer = None;
        }
        self.answer(&path);
        if let Some((_, message)) = self.chat.last() {
            let before = message["reasoning_content"].as_str().unwrap_or_default();
            message["reasoning_content"] = Value::String(format!("{before}{text}"));
        }
        Ok(())
    }

    fn call(&mut self, mut item: Fields) -> Result<(), InvalidRequest> {
        let path = item.path().to_owned();
        let id = item.need("call_id")?.string()?;
        let function = json!({"name": item.need("name")?.string()?, "arguments": item.need("arguments")?.string()?});
        let answer = self.answer(&path);
        let place = answer.num_calls;
        answer.num_calls += 1;
        if let Some((name, message)) = self.chat.last() {
            let call = json!({"id": id, "type": "function", "function": function});
            match &mut message["tool_calls"] {
                Value::Array(calls) => calls.push(call),
                none => *none = json!([call]),
            }
            let names = self.chat.names();
            if place == 0 {
                names.whole(format!("{name}.tool_calls"), &*path);
            }
            names.whole(format!("{name}.tool_calls[{place}].id"), format!("{path}.call_id"));
            names.within(format!("{name}.tool_calls[{place}].function"), path);
        }
        Ok(())
    }

    fn output(&mut self, mut item: Fields) -> Result<(), InvalidRequest> {
        let path = item.path().to_owned();
        let id = item.need("call_id")?.string()?;
        let content = content(item.need("output")?)?;
        self.append(json!({"role": "tool", "tool_call_id": id, "content": content}), &path);
        if let Some((name, _)) = self.chat.last() {
            self.chat.names().whole(format!("{name}.tool_call_id"), format!("{path}.call_id"));
            self.chat.names().whole(format!("{name}.role"), path);
        }
        Ok(())
    }

    fn append(&mut self, message: Value, path: &str) {
        self.answer = None;
        self.chat.message(message, path);
    }

    /// The assistant's message at the end, or a new one.
    fn answer(&mut self, path: &str) -> &mut Answer {
        self.answer.get_or_insert_with(|| {
            self.chat.message(json!({"role": "assistant", "content": null}), path);
            Answer::default()
        })
    }
}

/// A text, or parts of text, as a chat message's content.
fn content(node: Node) -> Result<Value, InvalidRequest> {
    if node.value().is_string() {
        return Ok(node.into_value());
    }
    if !node.value().is_array() {
        return Err(node.wrong("a string or a list of content parts"));
    }
    let parts = node.list()?.map(|part| Ok(json!({"type": "text", "text": part_text(part)?})));
    parts.collect::<Result<Vec<_>, _>>().map(Value::Array)
}

/// The texts of a list of parts, one after the other.
fn joined(node: Option<Node>) -> Result<String, InvalidRequest> {
    let Some(node) = node else { return Ok(String::new()) };
    node.list()?.map(part_text).collect()
}

fn part_text(part: Node) -> Result<String, InvalidRequest> {
    let mut part = part.object()?;
    let kind = part.need("type")?;
    match kind.value().as_str() {
        Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text") => part.need("text")?.string(),
        Some("refusal") => part.need("refusal")?.string(),
        Some(_) => Err(kind.not_implemented("the model reads text only")),
        None => Err(kind.wrong("a string")),
    }
}
