//! `/v1/responses`: items in, items and events out.

use std::time::Duration;

use serde_json::{Value, json};

use baleen_gateway::worker::wire;

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{Gateway, RESPONSES, babble, block, ids, invoke, say, tokenizer, types, with};

fn input(more: &Value) -> Value {
    with(json!({"input": "hello"}), more)
}

fn tools() -> Value {
    json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": null}])
}

/// Asks in one piece and as a stream, and checks that both give the same response. Returns it with the events.
async fn ask(acts: Vec<Act>, more: &Value) -> (Value, Vec<Value>) {
    let worker = FakeWorker::start(move |_| acts.clone()).await;
    let gateway = Gateway::start(&worker).await;
    let whole = gateway.ask(RESPONSES, &input(more)).await;
    let events = gateway.stream(RESPONSES, &with(input(more), &json!({"stream": true}))).await.typed().await;
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    let last = events.last().unwrap()["response"].clone();
    let comparable = |response: &Value| {
        let mut response = response.clone();
        response["id"] = json!(null);
        response["created_at"] = json!(null);
        for item in response["output"].as_array_mut().unwrap() {
            assert!(item["id"].as_str().unwrap().len() > 24, "{item}");
            item["id"] = json!(null);
            item["call_id"] = json!(null);
        }
        response
    };
    assert_eq!(comparable(&whole), comparable(&last));
    // What was announced item by item is what the response holds.
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let done: Vec<&Value> = done.map(|event| &event["item"]).collect();
    assert_eq!(json!(done), last["output"]);
    (whole, events)
}

/// Deltas of one item, joined.
fn joined(events: &[Value], index: usize) -> String {
    let deltas = events.iter().filter(|event| event["output_index"] == index && event.get("delta").is_some());
    deltas.map(|event| event["delta"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_text_is_one_item_and_its_events_come_in_order() {
    let (response, events) = ask(say("Yes, sea."), &json!({"metadata": {"k": "v"}})).await;
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!(response["output"][0]["content"][0]["text"], "Yes, sea.");
    assert_eq!(response["output"][0]["role"], "assistant");
    assert_eq!((&response["store"], &response["metadata"]), (&json!(false), &json!({"k": "v"})));
    assert_eq!((&response["error"], &response["incomplete_details"]), (&Value::Null, &Value::Null));
    let num_tokens = ids("Yes, sea.").len() + 1;
    assert_eq!(response["usage"]["output_tokens"], num_tokens);
    assert_eq!(joined(&events, 0), "Yes, sea.");
    let mut kinds = types(&events);
    kinds.dedup();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(kinds, expected);
    assert_eq!(events[2]["item"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
}

#[tokio::test]
async fn reasoning_text_and_parallel_calls_are_items_in_order() {
    let text = format!("I look.</think>Let me see.{}", block(&[invoke("Oslo"), invoke("Rome")]));
    let (response, events) = ask(say(&text), &json!({"tools": tools(), "reasoning": {"effort": "high"}})).await;
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "I look."}]));
    assert_eq!(output[0]["summary"], json!([]));
    for (item, city) in output[2..].iter().zip(["Oslo", "Rome"]) {
        assert_eq!(item["name"], "get_weather");
        let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": city, "days": 2}));
        assert!(item["call_id"].as_str().unwrap().starts_with("call_"));
    }
    assert_ne!(output[2]["call_id"], output[3]["call_id"]);
    assert_eq!((joined(&events, 0).as_str(), joined(&events, 1).as_str()), ("I look.", "Let me see."));
    assert_eq!(joined(&events, 3), output[3]["arguments"].as_str().unwrap());
    let reasoning = ["response.reasoning_text.delta", "response.reasoning_text.done"];
    assert!(reasoning.iter().all(|kind| types(&events).contains(kind)));
    assert_eq!(response["tools"], tools());
}

#[tokio::test]
async fn a_cut_answer_is_incomplete() {
    let acts = vec![Act::Tokens(ids("Yes")), Act::Last(ids(" sea")[0], wire::FinishReason::Length)];
    let (response, events) = ask(acts, &json!({"max_output_tokens": 2})).await;
    assert_eq!((&response["status"], &response["max_output_tokens"]), (&json!("incomplete"), &json!(2)));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(types(&events).last(), Some(&"response.incomplete"));
}

#[tokio::test]
async fn log_probabilities_come_with_the_text() {
    let tokens = ids("Yes, sea.");
    let acts = tokens.iter().map(|id| Act::Scored(vec![(*id, -0.5, vec![(*id, -0.5), (7, -2.0)])]));
    let acts: Vec<Act> = acts.chain([Act::Finish(wire::FinishReason::Length)]).collect();
    let wanted = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let (response, events) = ask(acts, &wanted).await;
    let scores = response["output"][0]["content"][0]["logprobs"].as_array().unwrap().clone();
    assert_eq!((scores.len(), &scores[0]["logprob"]), (tokens.len(), &json!(-0.5)));
    assert_eq!(scores[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let streamed: Vec<Value> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(streamed, scores);
}

#[tokio::test]
async fn a_failure_after_the_first_event_is_an_event() {
    let broke = Act::Fail(wire::ErrorCode::Internal, "", "it broke");
    let acts = vec![Act::Tokens(ids("Yes")), Act::Wait(Duration::from_millis(50)), broke];
    let worker = FakeWorker::start(move |_| acts.clone()).await;
    let gateway = Gateway::start(&worker).await;
    let events = gateway.stream(RESPONSES, &input(&json!({"stream": true}))).await.typed().await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("it broke"));
    assert!(types(&events).contains(&"response.created"));
    gateway.until_idle().await;
}

#[tokio::test]
async fn an_operator_can_abort_a_response_by_its_id() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let mut events = gateway.stream(RESPONSES, &input(&json!({"stream": true}))).await;
    let id = events.next_json().await["response"]["id"].clone();
    assert_eq!(gateway.ask("/abort_request", &json!({"rid": id})).await["aborted"], 1);
    let events = events.typed().await;
    assert_eq!(events.last().unwrap()["response"]["incomplete_details"], json!({"reason": "abort"}));
}

#[tokio::test]
async fn items_become_the_models_prompt() {
    let worker = FakeWorker::start(|_| say("Rain.")).await;
    let gateway = Gateway::start(&worker).await;
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"});
    let output = |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
    let items = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        call("a"), call("b"), output("b", "second"), output("a", "first"),
    ]);
    let body = json!({"input": items, "instructions": "You know.", "tools": tools(), "thinking": {"type": "enabled"}});
    gateway.ask(RESPONSES, &body).await;
    let prompt = worker.next_submit().await.prompt_token_ids;
    let text: Vec<u8> = prompt.iter().flat_map(|id| tokenizer().token_bytes(*id).to_vec()).collect();
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("<｜begin▁of▁sentence｜>You know."), "{text}");
    assert!(
        text.contains("Be brief.") && text.contains("<think>I look.</think>Hm.\n\n<｜DSML｜function_calls>"),
        "{text}"
    );
    assert!(
        text.contains("{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\"}}\n</functions>"),
        "{text}"
    );
    assert!(text.contains("<result>first</result>\n<result>second</result>"), "{text}");
}

#[tokio::test]
async fn refusals_name_the_fields_of_this_endpoint() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let result = json!({"type": "function_call_output", "call_id": "x", "output": "y"});
    let call = json!({"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"});
    let cases = [
        (json!({"input": null}), 400, "input"),
        (json!({"input": 5}), 400, "input"),
        (json!({"input": []}), 400, "input"),
        (json!({"input": [5]}), 400, "input[0]"),
        (json!({"input": [{"role": "wizard", "content": "x"}]}), 400, "input[0].role"),
        (json!({"input": [{"role": "user"}]}), 400, "input[0].content"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), 501, "input[0].content[0].type"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), 501, "input[0].type"),
        (json!({"input": [{"type": "reasoning", "encrypted_content": "x"}]}), 501, "input[0].encrypted_content"),
        (json!({"input": [{"role": "user", "content": "x"}, result]}), 400, "input[1]"),
        (json!({"input": [{"role": "user", "content": "x"}, call]}), 400, "input[1].arguments"),
        (json!({"max_output_tokens": 0}), 400, "max_output_tokens"),
        (json!({"max_output_tokens": "many"}), 400, "max_output_tokens"),
        (json!({"max_tokens": 5}), 400, "max_tokens"),
        (json!({"n": 2}), 400, "n"),
        (json!({"temperature": 3}), 400, "temperature"),
        (json!({"temperature": "hot"}), 400, "temperature"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), 400, "tools[0].name"),
        (json!({"tools": [{"type": "web_search"}]}), 501, "tools[0].type"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), 400, "tool_choice"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "name": "f"}}), 400, "tool_choice.name"),
        (json!({"tool_choice": "maybe"}), 400, "tool_choice"),
        (json!({"text": {"format": {"type": "grammar"}}}), 400, "text.format.type"),
        (json!({"text": {"verbosity": "low"}}), 501, "text.verbosity"),
        (json!({"reasoning": {"effort": "enormous"}}), 400, "reasoning.effort"),
        (json!({"reasoning": {"summary": "detailed"}}), 501, "reasoning.summary"),
        (json!({"background": true}), 501, "background"),
        (json!({"previous_response_id": "resp_1"}), 501, "previous_response_id"),
        (json!({"conversation": "conv_1"}), 501, "conversation"),
        (json!({"truncation": "auto"}), 501, "truncation"),
        (json!({"include": ["file_search_call.results"]}), 501, "include[0]"),
        (json!({"store": "yes"}), 400, "store"),
        (json!({"top_logprobs": 1, "tools": tools()}), 501, "include"),
        (json!({"model": "gpt"}), 404, "model"),
    ];
    for (more, status, param) in cases {
        let reply = gateway.post(RESPONSES, &input(&more)).await;
        let error = reply.error();
        assert_eq!((reply.status.as_u16(), &error["param"]), (status, &json!(param)), "{more}: {error}");
        let message = error["message"].as_str().unwrap();
        let is_named = message.contains(&format!("'{param}'")) || status == 404;
        assert!(is_named && message.ends_with('.'), "{message}");
    }
    // What clients send by default is taken.
    let defaults = json!({"store": true, "background": false, "truncation": "disabled", "previous_response_id": null,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "service_tier": "auto",
        "parallel_tool_calls": true, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "user": "u"});
    assert_eq!(gateway.ask(RESPONSES, &input(&defaults)).await["store"], false);
    gateway.until_idle().await;
}
