//! `POST /v1/responses`, as far as it needs no memory: the request. The answer is in [`response`].
//!
//! Nothing is stored, so `store` is answered with false and whatever would need a store is refused.

mod input;
pub mod response;

use serde_json::{Map, Value, json};

use super::chat::ChatRequest;
use super::error::InvalidRequest;
use super::node::{Fields, Node};
use super::rewrite::{ChatBody, Names, refuse_foreign};

const ENDPOINT: &str = "/v1/responses";

/// Fields of chat requests that would otherwise be taken for what they are there.
const FOREIGN: &[(&str, Option<&str>)] = &[
    ("messages", Some("input")),
    ("max_tokens", Some("max_output_tokens")),
    ("max_completion_tokens", Some("max_output_tokens")),
    ("response_format", Some("text.format")),
    ("logprobs", Some("include")),
    ("continue_final_message", None),
    ("function_call", None),
    ("functions", None),
    ("n", None),
    ("return_token_ids", None),
];

/// What `include` may ask for: log-probabilities, and what the answer holds anyway (reasoning comes in plain text).
const LOGPROBS: &str = "message.output_text.logprobs";
const ENCRYPTED_REASONING: &str = "reasoning.encrypted_content";

/// A request whose own fields are checked; the rest is left to the chat request.
#[derive(Debug)]
pub struct ResponsesRequest {
    pub chat: ChatRequest,
    pub names: Names,
    /// What the response object repeats of the request.
    pub echo: Map<String, Value>,
}

impl ResponsesRequest {
    /// Parses a body.
    ///
    /// # Errors
    /// The first field that is wrong, or that asks for an ability this server lacks.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let mut body = Fields::parse(body)?;
        refuse_foreign(&mut body, ENDPOINT, FOREIGN)?;
        refuse_unbuilt(&mut body)?;
        let echo = echo(&body);
        let mut chat = ChatBody::default();
        chat.names().within("messages", "input");
        if let Some(instructions) = body.take("instructions") {
            let path = instructions.path().to_owned();
            chat.system(instructions.string()?, &path);
            chat.names().whole("messages[0]", path);
        }
        input::read(body.need("input")?, &mut chat)?;
        if let Some(tools) = body.take("tools") {
            for tool in tools.list()? {
                function(tool.object()?, &mut chat)?;
            }
        }
        if let Some(choice) = body.take("tool_choice") {
            tool_choice(choice, &mut chat)?;
        }
        answer_fields(&mut body, &mut chat)?;
        chat.extend(body.rest());
        let (chat, names) = chat.finish()?;
        Ok(Self { chat, names, echo })
    }
}

/// Everything that needs a store, tools that run here, or a second model.
fn refuse_unbuilt(body: &mut Fields) -> Result<(), InvalidRequest> {
    body.refuse("background", "every answer is awaited")?;
    body.refuse("conversation", "nothing is stored; send the whole conversation as 'input'")?;
    body.refuse("previous_response_id", "nothing is stored; send the whole conversation as 'input'")?;
    body.refuse("prompt", "no prompt templates are stored")?;
    body.refuse("context_management", "the conversation is taken as it is")?;
    body.refuse("moderation", "no moderation model runs here")?;
    if let Some(options) = body.take("stream_options") {
        options.object()?.refuse("include_obfuscation", "events are sent without padding")?;
    }
    if let Some(truncation) = body.take("truncation")
        && truncation.value() != "disabled"
    {
        let truncation = truncation.not_implemented("a conversation is never shortened; only \"disabled\" is possible");
        return Err(truncation);
    }
    if let Some(store) = body.take("store") {
        store.bool()?;
    }
    Ok(())
}

/// Fields that say what the answer is like.
fn answer_fields(body: &mut Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if let Some(max_tokens) = body.take("max_output_tokens") {
        chat.set("max_completion_tokens", max_tokens.into_value(), "max_output_tokens");
    }
    let mut with_logprobs = false;
    if let Some(include) = body.take("include") {
        for wanted in include.list()? {
            match wanted.value().as_str() {
                Some(LOGPROBS) => with_logprobs = true,
                Some(ENCRYPTED_REASONING) => {}
                Some(_) => return Err(wanted.not_implemented("answers hold no such thing")),
                None => return Err(wanted.wrong("a string")),
            }
        }
    }
    if let Some(top) = body.take("top_logprobs") {
        with_logprobs |= top.value() != 0;
        chat.set("top_logprobs", top.into_value(), "top_logprobs");
    }
    if with_logprobs {
        chat.set("logprobs", json!(true), "include");
    }
    if let Some(reasoning) = body.take("reasoning") {
        let mut reasoning = reasoning.object()?;
        if let Some(summary) = reasoning.take("summary")
            && summary.value() != "auto"
        {
            return Err(summary.not_implemented("reasoning is not summarised but given in full"));
        }
        chat.set("reasoning", Value::Object(reasoning.rest()), "reasoning");
    }
    if let Some(metadata) = body.take("metadata") {
        metadata.object()?;
    }
    match body.take("text") {
        Some(text) => text_fields(text.object()?, chat),
        None => Ok(()),
    }
}

fn text_fields(mut text: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if let Some(verbosity) = text.take("verbosity")
        && verbosity.value() != "medium"
    {
        return Err(verbosity.not_implemented("the model has no such control; only \"medium\" is possible"));
    }
    let Some(format) = text.take("format") else { return Ok(()) };
    let path = format.path().to_owned();
    let mut format = format.object()?;
    let kind = format.need("type")?.word(&["text", "json_object", "json_schema"])?;
    let mut wire = json!({"type": kind});
    if kind == "json_schema" {
        wire["json_schema"] = Value::Object(format.rest());
        chat.names().within("response_format.json_schema", &*path);
    }
    chat.set("response_format", wire, path);
    Ok(())
}

/// A function, whose fields stand beside its type here. What is null is left out of the prompt.
fn function(mut tool: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    let path = tool.path().to_owned();
    let kind = tool.need("type")?;
    match kind.value().as_str() {
        Some("function") => {}
        Some(_) => return Err(kind.not_implemented("only functions of the client can be called")),
        None => return Err(kind.wrong("a string")),
    }
    let function = tool.rest().into_iter().filter(|(_, value)| !value.is_null()).collect();
    chat.function(function, &path, "parameters");
    Ok(())
}

fn tool_choice(choice: Node, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if choice.value().is_string() {
        let word = choice.word(&["none", "auto", "required"])?;
        chat.set("tool_choice", word.into(), "tool_choice");
        return Ok(());
    }
    let mut choice = choice.object()?;
    let kind = choice.need("type")?;
    match kind.value().as_str() {
        Some("function") => {}
        Some(_) => return Err(kind.not_implemented("only one function can be chosen")),
        None => return Err(kind.wrong("a string")),
    }
    let name = choice.need("name")?.string()?;
    chat.names().within("tool_choice.function", "tool_choice");
    chat.set("tool_choice", json!({"type": "function", "function": {"name": name}}), "tool_choice");
    Ok(())
}

/// Fields that the response repeats, with the values they have when the request does not say.
fn echo(body: &Fields) -> Map<String, Value> {
    let defaults = json!({
        "instructions": null,
        "max_output_tokens": null,
        "max_tool_calls": null,
        "metadata": {},
        "parallel_tool_calls": true,
        "reasoning": {"effort": null, "summary": null},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "user": null,
    });
    let Value::Object(mut echo) = defaults else { return Map::new() };
    for (field, value) in &mut echo {
        if let Some(given) = body.get(field) {
            *value = given.clone();
        }
    }
    echo
}
