//! Messages made of content blocks as chat messages: tool results become messages of their own.

use serde_json::{Value, json};

use crate::openai::error::InvalidRequest;
use crate::openai::node::{Fields, Node};
use crate::openai::rewrite::ChatBody;

/// Reads `messages`. A final message of the assistant is the start of the answer.
pub(super) fn read(messages: Node, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if messages.value().as_array().is_some_and(Vec::is_empty) {
        return Err(messages.invalid("must hold at least one message"));
    }
    let mut is_answer = false;
    for message in messages.list()? {
        let mut message = message.object()?;
        let path = message.path().to_owned();
        let role = message.need("role")?.word(&["user", "assistant"])?;
        let content = message.need("content")?;
        is_answer = role == "assistant" && !holds_calls(content.value());
        if role == "user" { user(content, &path, chat)? } else { assistant(content, &path, chat)? }
    }
    if is_answer && let Some((_, last)) = chat.last() {
        last["prefix"] = json!(true);
    }
    Ok(())
}

fn holds_calls(content: &Value) -> bool {
    content.as_array().is_some_and(|blocks| blocks.iter().any(|block| block["type"] == "tool_use"))
}

/// The texts of a string or of a list of text blocks.
pub(super) fn texts(content: Node) -> Result<Vec<String>, InvalidRequest> {
    if content.value().is_string() {
        return Ok(vec![content.string()?]);
    }
    if !content.value().is_array() {
        return Err(content.wrong("a string or a list of content blocks"));
    }
    let text = |block: Node| {
        let mut block = block.object()?;
        match kind(&mut block)?.as_str() {
            "text" => block.need("text")?.string(),
            _ => Err(unreadable(&block)),
        }
    };
    content.list()?.map(text).collect()
}

/// Tool results first, then one message of the texts.
fn user(content: Node, path: &str, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if content.value().is_string() {
        chat.message(json!({"role": "user", "content": content.value()}), path);
        return Ok(());
    }
    if !content.value().is_array() {
        return Err(content.wrong("a string or a list of content blocks"));
    }
    let (mut parts, mut has_results) = (Vec::new(), false);
    for block in content.list()? {
        let mut block = block.object()?;
        match kind(&mut block)?.as_str() {
            "text" => parts.push(json!({"type": "text", "text": block.need("text")?.string()?})),
            "tool_result" if parts.is_empty() => {
                has_results = true;
                result(block, chat)?;
            }
            "tool_result" => {
                let message = format!("'{}' must stand before the message's text.", block.path());
                return Err(InvalidRequest::field(block.path(), message));
            }
            _ => return Err(unreadable(&block)),
        }
    }
    if !parts.is_empty() || !has_results {
        chat.message(json!({"role": "user", "content": parts}), path);
    }
    Ok(())
}

/// The result of a call. The model's own format has no mark for failure, so the text says it.
fn result(mut block: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    let path = block.path().to_owned();
    let id = block.need("tool_use_id")?.string()?;
    let mut text = match block.take("content") {
        Some(content) => texts(content)?.join("\n\n"),
        None => String::new(),
    };
    if let Some(is_error) = block.take("is_error")
        && is_error.bool()?
    {
        text.insert_str(0, "Error: ");
    }
    chat.message(json!({"role": "tool", "tool_call_id": id, "content": text}), &*path);
    if let Some((name, _)) = chat.last() {
        chat.names().whole(format!("{name}.tool_call_id"), format!("{path}.tool_use_id"));
        chat.names().whole(format!("{name}.role"), path);
    }
    Ok(())
}

fn assistant(content: Node, path: &str, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if content.value().is_string() {
        chat.message(json!({"role": "assistant", "content": content.value()}), path);
        return Ok(());
    }
    if !content.value().is_array() {
        return Err(content.wrong("a string or a list of content blocks"));
    }
    let (mut parts, mut reasoning, mut calls) = (Vec::new(), String::new(), Vec::new());
    let mut call_paths = Vec::new();
    for block in content.list()? {
        let mut block = block.object()?;
        match kind(&mut block)?.as_str() {
            "text" => parts.push(json!({"type": "text", "text": block.need("text")?.string()?})),
            "thinking" => reasoning.push_str(&block.need("thinking")?.string()?),
            "tool_use" => {
                let input = block.need("input")?;
                if !input.value().is_object() {
                    return Err(input.wrong("an object"));
                }
                let function = json!({"name": block.need("name")?.string()?, "arguments": input.into_value()});
                calls.push(json!({"id": block.need("id")?.string()?, "type": "function", "function": function}));
                call_paths.push(block.path().to_owned());
            }
            "redacted_thinking" => {
                let param = block.path_of("type");
                let message = format!("'{param}' is not implemented by this server: sealed thinking cannot be read.");
                return Err(InvalidRequest::not_implemented(param, message));
            }
            _ => return Err(unreadable(&block)),
        }
    }
    let mut message = json!({"role": "assistant", "content": parts});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    chat.message(message, path);
    if let Some((name, _)) = chat.last() {
        chat.names().whole(format!("{name}.tool_calls"), path);
        for (place, path) in call_paths.into_iter().enumerate() {
            chat.names().whole(format!("{name}.tool_calls[{place}].id"), format!("{path}.id"));
            chat.names().whole(format!("{name}.tool_calls[{place}].function.arguments"), format!("{path}.input"));
            chat.names().within(format!("{name}.tool_calls[{place}].function"), path);
        }
    }
    Ok(())
}

fn kind(block: &mut Fields) -> Result<String, InvalidRequest> {
    block.need("type")?.string()
}

fn unreadable(block: &Fields) -> InvalidRequest {
    let param = block.path_of("type");
    let message = format!("'{param}' is not implemented by this server: there is no reading such a block here.");
    InvalidRequest::not_implemented(param, message)
}
