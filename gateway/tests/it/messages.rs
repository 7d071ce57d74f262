//! `/v1/messages`: content blocks in, content blocks and events out, errors in Anthropic's shape.

use std::time::Duration;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use baleen_gateway::config;
use baleen_gateway::worker::wire;

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{Gateway, MESSAGES, Reply, block, ids, invoke, say, tokenizer, types, with};

const COUNT: &str = "/v1/messages/count_tokens";

fn message(more: &Value) -> Value {
    with(json!({"max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}), more)
}

fn tools() -> Value {
    json!([{"name": "get_weather", "description": "d", "input_schema": {"type": "object"}}])
}

/// What Anthropic's client adds up from a stream.
fn accumulate(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut inputs: Vec<String> = Vec::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().unwrap();
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let index = usize::try_from(event["index"].as_u64().unwrap()).unwrap();
                let delta = event["delta"].as_object().unwrap();
                let (field, text) = delta.iter().find(|(name, _)| *name != "type").unwrap();
                if field == "partial_json" {
                    inputs[index].push_str(text.as_str().unwrap());
                } else {
                    let before = message["content"][index][field].as_str().unwrap();
                    message["content"][index][field] = json!(format!("{before}{}", text.as_str().unwrap()));
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    for (index, input) in inputs.iter().enumerate().filter(|(_, input)| !input.is_empty()) {
        message["content"][index]["input"] = serde_json::from_str(input).unwrap_or_else(|_| json!({}));
    }
    message
}

/// Asks in one piece and as a stream, and checks that both give the same message. Returns it with the events.
async fn ask(acts: Vec<Act>, more: &Value) -> (Value, Vec<Value>) {
    let worker = FakeWorker::start(move |_| acts.clone()).await;
    let gateway = Gateway::start(&worker).await;
    let whole = gateway.ask(MESSAGES, &message(more)).await;
    let events = gateway.stream(MESSAGES, &with(message(more), &json!({"stream": true}))).await.typed().await;
    let comparable = |mut message: Value| {
        message["id"] = json!(null);
        for block in message["content"].as_array_mut().unwrap() {
            for name in ["id", "signature"] {
                if block.get(name).is_some() {
                    assert!(block[name].as_str().unwrap().len() > 20, "{block}");
                    block[name] = json!(null);
                }
            }
        }
        message
    };
    assert_eq!(comparable(whole.clone()), comparable(accumulate(&events)));
    (whole, events)
}

#[tokio::test]
async fn a_text_is_one_block_and_its_events_come_in_order() {
    let (message, events) = ask(say("Yes, sea."), &json!({})).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": "Yes, sea."}]));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    assert_eq!(message["usage"]["output_tokens"], ids("Yes, sea.").len() + 1);
    let mut kinds = types(&events);
    kinds.dedup();
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expected);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], message["usage"]["input_tokens"]);
}

#[tokio::test]
async fn thinking_text_and_parallel_calls_are_blocks_in_order() {
    let text = format!("I look.</think>Let me see.{}", block(&[invoke("Oslo"), invoke("Rome")]));
    let more = json!({"tools": tools(), "thinking": {"type": "adaptive"}});
    let (message, _) = ask(say(&text), &more).await;
    let blocks = message["content"].as_array().unwrap();
    let kinds: Vec<&str> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    assert_eq!((&blocks[0]["thinking"], &blocks[1]["text"]), (&json!("I look."), &json!("Let me see.")));
    assert_eq!(blocks[2]["input"], json!({"city": "Oslo", "days": 2}));
    assert_eq!(blocks[3]["input"], json!({"city": "Rome", "days": 2}));
    assert!(blocks[2]["id"].as_str().unwrap().starts_with("toolu_") && blocks[2]["id"] != blocks[3]["id"]);
    assert_eq!(message["stop_reason"], "tool_use");
    let single = json!({"type": "auto", "disable_parallel_tool_use": true});
    let (message, _) =
        ask(say(&block(&[invoke("Oslo"), invoke("Rome")])), &json!({"tools": tools(), "tool_choice": single})).await;
    assert_eq!(message["content"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn every_end_has_its_stop_reason() {
    let (message, _) = ask(say("Yes, sea."), &json!({"stop_sequences": [", s"]})).await;
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!(", s")));
    assert_eq!(message["content"][0]["text"], "Yes");
    let cut = vec![Act::Tokens(ids("Yes")), Act::Finish(wire::FinishReason::Length)];
    assert_eq!(ask(cut, &json!({})).await.0["stop_reason"], "max_tokens");
    let markup = block(&[invoke("Oslo")]);
    let half = &markup[..markup.find("Oslo").unwrap() + 2];
    let mut cut: Vec<Act> = ids(half).into_iter().map(|id| Act::Tokens(vec![id])).collect();
    cut.push(Act::Finish(wire::FinishReason::Length));
    let (message, _) = ask(cut, &json!({"tools": tools()})).await;
    assert_eq!((&message["stop_reason"], &message["content"][0]["input"]), (&json!("max_tokens"), &json!({})));
    let stopped = vec![Act::Tokens(ids("Yes")), Act::Finish(wire::FinishReason::Abort)];
    assert_eq!(ask(stopped, &json!({})).await.0["stop_reason"], "abort");
    assert_eq!(ask(vec![Act::Finish(wire::FinishReason::Length)], &json!({})).await.0["content"], json!([]));
}

#[tokio::test]
async fn blocks_become_the_models_prompt_and_are_counted() {
    let worker = FakeWorker::start(|_| say("Rain.")).await;
    let gateway = Gateway::start(&worker).await;
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "get_weather", "input": {"city": "Oslo"}});
    let result = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
    let mut failed = result("b", json!("second"));
    failed["is_error"] = json!(true);
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "s"}, {"type": "text", "text": "Hm."}, call("a"), call("b")]},
        {"role": "user", "content": [failed, result("a", json!([{"type": "text", "text": "first"}]))]},
    ]);
    let body = json!({"messages": messages, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        "tools": tools(), "thinking": {"type": "enabled"}});
    let count = gateway.ask(COUNT, &body).await;
    gateway.ask(MESSAGES, &with(body, &json!({"max_tokens": 64}))).await;
    let prompt = worker.next_submit().await.prompt_token_ids;
    assert_eq!(count, json!({"input_tokens": prompt.len()}));
    let text: Vec<u8> = prompt.iter().flat_map(|id| tokenizer().token_bytes(*id).to_vec()).collect();
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("<｜begin▁of▁sentence｜>Be\n\nbrief.\n\n## Tools"), "{text}");
    assert!(text.contains("<think>I look.</think>Hm.\n\n<｜DSML｜function_calls>"), "{text}");
    assert!(text.contains("<result>first</result>\n<result>Error: second</result>"), "{text}");
    assert!(text.contains("\"description\": \"d\", \"parameters\": {\"type\": \"object\"}"), "{text}");
}

#[tokio::test]
async fn a_final_message_of_the_assistant_is_gone_on_with() {
    let worker = FakeWorker::start(|_| say(" sea.")).await;
    let gateway = Gateway::start(&worker).await;
    let messages = json!([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes,"}]);
    gateway.ask(MESSAGES, &message(&json!({"messages": messages}))).await;
    let prompt = worker.next_submit().await.prompt_token_ids;
    assert!(prompt.ends_with(&ids("Yes,")));
}

/// The error of an answer that must be one, in Anthropic's shape.
fn error(reply: &Reply) -> Value {
    let body = reply.json();
    assert_eq!(body["type"], "error", "{body}");
    assert!(reply.headers.contains_key("request-id"));
    body["error"].clone()
}

#[tokio::test]
async fn refusals_name_the_fields_of_this_endpoint() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let says = |role: &str, content: Value| json!({"messages": [{"role": role, "content": content}]});
    let result = json!({"type": "tool_result", "tool_use_id": "x", "content": "y"});
    let text = json!({"type": "text", "text": "x"});
    let cases = [
        (json!({"max_tokens": null}), 400, "max_tokens"),
        (json!({"max_tokens": 0}), 400, "max_tokens"),
        (json!({"messages": []}), 400, "messages"),
        (json!({"messages": {}}), 400, "messages"),
        (says("system", json!("x")), 400, "messages[0].role"),
        (says("user", json!(5)), 400, "messages[0].content"),
        (says("user", json!([{"type": "image"}])), 501, "messages[0].content[0].type"),
        (says("user", json!([{"text": "x"}])), 400, "messages[0].content[0].type"),
        (says("user", json!([text, result])), 400, "messages[0].content[1]"),
        (says("user", json!([result])), 400, "messages[0].content[0]"),
        (says("assistant", json!([{"type": "redacted_thinking", "data": "x"}])), 501, "messages[0].content[0].type"),
        (
            says("assistant", json!([{"type": "tool_use", "id": "x", "name": "f", "input": "{}"}])),
            400,
            "messages[0].content[0].input",
        ),
        (says("assistant", json!([{"type": "tool_use", "id": "x", "name": "f", "input": {}}])), 400, "messages[0]"),
        (json!({"system": 5}), 400, "system"),
        (json!({"temperature": -1}), 400, "temperature"),
        (json!({"stop_sequences": "x"}), 400, "stop_sequences"),
        (json!({"stop_sequences": [""]}), 400, "stop_sequences"),
        (json!({"stop": "x"}), 400, "stop"),
        (json!({"tools": [{"name": "f"}]}), 400, "tools[0].input_schema"),
        (json!({"tools": [{"name": "f", "input_schema": 5}]}), 400, "tools[0].input_schema"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), 400, "tools[0].name"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), 501, "tools[0].type"),
        (json!({"tool_choice": {"type": "any"}}), 400, "tool_choice"),
        (json!({"tool_choice": {"type": "auto", "name": 5}}), 400, "tool_choice.name"),
        (json!({"tools": tools(), "tool_choice": {"type": "tool", "name": "f"}}), 400, "tool_choice.name"),
        (json!({"thinking": {"type": "maybe"}}), 400, "thinking.type"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": -1}}), 400, "thinking.budget_tokens"),
        (json!({"output_config": {"effort": "enormous"}}), 400, "output_config.effort"),
        (json!({"mcp_servers": [{}]}), 501, "mcp_servers"),
    ];
    for (more, status, param) in cases {
        let reply = gateway.post(MESSAGES, &message(&more)).await;
        let error = error(&reply);
        assert_eq!((reply.status.as_u16(), &error["param"]), (status, &json!(param)), "{more}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        let text = error["message"].as_str().unwrap();
        assert!(text.contains(&format!("'{param}'")) && text.ends_with('.'), "{text}");
    }
    gateway.until_idle().await;
}

#[tokio::test]
async fn every_error_of_these_paths_has_their_shape() {
    let acts = vec![
        Act::Tokens(ids("Yes")),
        Act::Wait(Duration::from_millis(50)),
        Act::Fail(wire::ErrorCode::Internal, "", "it broke"),
    ];
    let worker = FakeWorker::start(move |_| acts.clone()).await;
    let gateway = Gateway::start_with(&worker, |config| config.api_key_digest = Some(config::digest("key"))).await;
    let keyed = |method, path: &str, body: String| {
        let mut request = gateway.request(method, path, body);
        request.headers_mut().insert("x-api-key", "key".parse().unwrap());
        request
    };
    let reply = gateway.post(MESSAGES, &message(&json!({}))).await;
    assert_eq!(
        (reply.status, error(&reply)["type"].as_str()),
        (StatusCode::UNAUTHORIZED, Some("authentication_error"))
    );
    let reply = gateway.collect(keyed(Method::GET, MESSAGES, String::new())).await;
    assert_eq!(
        (reply.status, error(&reply)["type"].as_str()),
        (StatusCode::METHOD_NOT_ALLOWED, Some("invalid_request_error"))
    );
    assert_eq!(reply.headers["allow"], "POST");
    let reply = gateway.collect(keyed(Method::POST, "/v1/messages/batches", String::new())).await;
    assert_eq!((reply.status, error(&reply)["type"].as_str()), (StatusCode::NOT_FOUND, Some("not_found_error")));
    let reply = gateway.collect(keyed(Method::POST, COUNT, "{".into())).await;
    assert_eq!(
        (reply.status, error(&reply)["type"].as_str()),
        (StatusCode::BAD_REQUEST, Some("invalid_request_error"))
    );
    let reply = gateway.collect(keyed(Method::POST, MESSAGES, message(&json!({})).to_string())).await;
    assert_eq!((reply.status, error(&reply)["type"].as_str()), (StatusCode::INTERNAL_SERVER_ERROR, Some("api_error")));
    let body = message(&json!({"stream": true})).to_string();
    let reply = gateway.collect(keyed(Method::POST, MESSAGES, body)).await;
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let last = text.trim_end().rsplit("\n\n").next().unwrap().to_owned();
    assert!(last.starts_with("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\""), "{text}");
}
