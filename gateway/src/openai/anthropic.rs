//! Anthropic's Messages API, `POST /v1/messages` and `/v1/messages/count_tokens`: the request. The answer is in
//! [`response`].

mod content;
pub mod response;

use serde_json::{Map, json};

use super::chat::ChatRequest;
use super::error::InvalidRequest;
use super::node::{Fields, Node};
use super::rewrite::{ChatBody, Names, refuse_foreign};

/// Fields of chat requests that would otherwise be taken for what they are there.
const FOREIGN: &[(&str, Option<&str>)] = &[
    ("input", Some("messages")),
    ("max_completion_tokens", Some("max_tokens")),
    ("parallel_tool_calls", Some("tool_choice.disable_parallel_tool_use")),
    ("response_format", Some("output_config.format")),
    ("stop", Some("stop_sequences")),
    ("continue_final_message", None),
    ("function_call", None),
    ("functions", None),
    ("logprobs", None),
    ("n", None),
    ("return_token_ids", None),
    ("stream_options", None),
    ("top_logprobs", None),
];

/// The model thinks at one depth only, so an effort is checked and makes no difference.
const EFFORTS: &[&str] = &["low", "medium", "high", "xhigh", "max"];

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Answer,
    /// Its tokens are counted; nothing is generated.
    Count,
}

/// A request whose own fields are checked; the rest is left to the chat request.
#[derive(Debug)]
pub struct MessagesRequest {
    pub chat: ChatRequest,
    pub names: Names,
}

impl MessagesRequest {
    /// Parses a body.
    ///
    /// # Errors
    /// The first field that is wrong, or that asks for an ability this server lacks.
    pub fn parse(body: &[u8], purpose: Purpose) -> Result<Self, InvalidRequest> {
        let mut body = Fields::parse(body)?;
        refuse_foreign(&mut body, "/v1/messages", FOREIGN)?;
        body.refuse("container", "nothing runs here")?;
        body.refuse("context_management", "the conversation is taken as it is")?;
        body.refuse("mcp_servers", "only functions of the client can be called")?;
        let mut chat = ChatBody::default();
        if let Some(system) = body.take("system") {
            let path = system.path().to_owned();
            for text in content::texts(system)? {
                chat.system(text, &path);
            }
        }
        content::read(body.need("messages")?, &mut chat)?;
        if let Some(tools) = body.take("tools") {
            for tool in tools.list()? {
                function(tool.object()?, &mut chat)?;
            }
        }
        if let Some(choice) = body.take("tool_choice") {
            tool_choice(choice.object()?, &mut chat)?;
        }
        match purpose {
            Purpose::Answer => {
                chat.set("max_tokens", body.need("max_tokens")?.into_value(), "max_tokens");
            }
            Purpose::Count => drop(body.take("max_tokens")),
        }
        if let Some(stop) = body.take("stop_sequences") {
            let strings = stop.value().is_array().then(|| stop.value().clone()).ok_or_else(|| stop.wrong("a list"))?;
            chat.set("stop", strings, "stop_sequences");
        }
        if let Some(thinking) = body.take("thinking") {
            self::thinking(thinking.object()?, &mut chat)?;
        }
        if let Some(config) = body.take("output_config") {
            output_config(config.object()?, &mut chat)?;
        }
        if let Some(metadata) = body.take("metadata")
            && let Some(user) = metadata.object()?.take("user_id")
        {
            chat.set("user", user.into_value(), "metadata.user_id");
        }
        chat.extend(body.rest());
        let (chat, names) = chat.finish()?;
        Ok(Self { chat, names })
    }
}

/// A function of the client. Its fields go into the prompt under the names they have in chat requests.
fn function(mut tool: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    let path = tool.path().to_owned();
    if let Some(kind) = tool.take("type") {
        match kind.value().as_str() {
            Some("custom") => {}
            Some(_) => return Err(kind.not_implemented("only functions of the client can be called")),
            None => return Err(kind.wrong("a string")),
        }
    }
    let mut function = Map::new();
    function.insert("name".to_owned(), tool.need("name")?.into_value());
    if let Some(description) = tool.take("description") {
        function.insert("description".to_owned(), description.into_value());
    }
    function.insert("parameters".to_owned(), tool.need("input_schema")?.into_value());
    if let Some(strict) = tool.take("strict") {
        function.insert("strict".to_owned(), strict.into_value());
    }
    chat.function(function, &path, "input_schema");
    Ok(())
}

fn tool_choice(mut choice: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    let kind = choice.need("type")?.word(&["auto", "any", "tool", "none"])?;
    let value = match kind.as_str() {
        "tool" => {
            chat.names().within("tool_choice.function", "tool_choice");
            json!({"type": "function", "function": {"name": choice.need("name")?.string()?}})
        }
        other => {
            choice.take("name").map(Node::string).transpose()?;
            json!(if other == "any" { "required" } else { other })
        }
    };
    chat.set("tool_choice", value, "tool_choice");
    if let Some(disable) = choice.take("disable_parallel_tool_use")
        && disable.bool()?
    {
        chat.set("parallel_tool_calls", json!(false), "tool_choice.disable_parallel_tool_use");
    }
    Ok(())
}

/// How long to think is the model's choice anyway, so "adaptive" enables.
fn thinking(mut thinking: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    let kind = thinking.need("type")?.word(&["enabled", "adaptive", "disabled"])?;
    let mut wire = json!({"type": if kind == "adaptive" { "enabled" } else { kind.as_str() }});
    if let Some(budget) = thinking.take("budget_tokens") {
        if kind == "disabled" {
            return Err(budget.invalid("is only allowed where thinking is enabled"));
        }
        wire["budget_tokens"] = budget.into_value();
    }
    if let Some(display) = thinking.take("display")
        && kind != "disabled"
    {
        return Err(display.not_implemented("thinking is always given in full"));
    }
    chat.set("thinking", wire, "thinking");
    Ok(())
}

fn output_config(mut config: Fields, chat: &mut ChatBody) -> Result<(), InvalidRequest> {
    if let Some(effort) = config.take("effort") {
        effort.word(EFFORTS)?;
    }
    let Some(format) = config.take("format") else { return Ok(()) };
    let path = format.path().to_owned();
    let mut format = format.object()?;
    format.need("type")?.word(&["json_schema"])?;
    let schema: Node = format.need("schema")?;
    let wire =
        json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.value(), "strict": true}});
    chat.names().within("response_format.json_schema", &*path);
    chat.set("response_format", wire, path);
    Ok(())
}
