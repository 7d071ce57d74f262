//! Tool calls through `/v1/chat/completions`: tools in, markup out of the worker, calls to the client.

use serde_json::{Value, json};

use crate::fake_worker::FakeWorker;
use crate::gateway::{CHAT, Gateway, block, content, deltas, finish_reasons, hello, ids, invoke, say, tokenizer};

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}])
}

/// What a client adds up from a stream, as the message of an answer in one piece.
fn collect(chunks: &[Value]) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    let mut reasoning = String::new();
    for delta in deltas(chunks, 0) {
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for piece in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
            if piece.get("id").is_some() {
                assert_eq!((index, &piece["type"]), (calls.len(), &json!("function")));
                assert_eq!(piece["function"]["arguments"], "");
                calls.push(piece.clone());
            } else {
                assert_eq!(index + 1, calls.len());
                assert!(piece["function"].get("name").is_none());
                let more = piece["function"]["arguments"].as_str().unwrap();
                let arguments = calls[index]["function"]["arguments"].as_str().unwrap().to_owned() + more;
                calls[index]["function"]["arguments"] = json!(arguments);
            }
        }
    }
    json!({"content": content(chunks, 0), "reasoning": reasoning, "calls": calls})
}

/// Asks for one answer in one piece and as a stream, and checks that they agree. Returns content, reasoning, calls as
/// (name, arguments), and the finish reason.
async fn ask(text: &str, more: &Value) -> (Value, String, Vec<(String, Value)>, String) {
    let text = text.to_owned();
    let worker = FakeWorker::start(move |_| say(&text)).await;
    let gateway = Gateway::start(&worker).await;
    let mut body = hello(more);
    let choice = gateway.ask(CHAT, &body).await["choices"][0].clone();
    body["stream"] = json!(true);
    let chunks = gateway.stream(CHAT, &body).await.chunks().await;
    let streamed = collect(&chunks);
    let message = &choice["message"];
    assert_eq!(message["content"].as_str().unwrap_or_default(), streamed["content"]);
    assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), streamed["reasoning"]);
    assert_eq!(json!(finish_reasons(&chunks)), json!([choice["finish_reason"]]));
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let streamed = streamed["calls"].as_array().unwrap().clone();
    assert_eq!(calls.len(), streamed.len());
    let mut ids: Vec<&str> = calls.iter().map(|call| call["id"].as_str().unwrap()).collect();
    assert!(ids.iter().all(|id| id.len() == 29 && id.starts_with("call_")));
    ids.dedup();
    assert_eq!(ids.len(), calls.len(), "ids differ");
    for (whole, streamed) in calls.iter().zip(&streamed) {
        assert_eq!((&whole["function"], &whole["index"]), (&streamed["function"], &streamed["index"]));
    }
    let calls = calls.iter().map(|call| {
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        (call["function"]["name"].as_str().unwrap().to_owned(), arguments)
    });
    let reasoning = message["reasoning_content"].as_str().unwrap_or_default().to_owned();
    let reason = choice["finish_reason"].as_str().unwrap().to_owned();
    (message["content"].clone(), reasoning, calls.collect(), reason)
}

fn weather(city: &str) -> (String, Value) {
    ("get_weather".to_owned(), json!({"city": city, "days": 2}))
}

#[tokio::test]
async fn one_call_after_text() {
    let answer = ask(&format!("Let me see.{}", block(&[invoke("Oslo")])), &json!({"tools": tools()})).await;
    assert_eq!(answer, (json!("Let me see."), String::new(), vec![weather("Oslo")], "tool_calls".to_owned()));
}

#[tokio::test]
async fn two_parallel_calls_without_text() {
    let text = block(&[invoke("Oslo"), invoke("Rome \"北\"")]);
    let (content, _, calls, reason) = ask(&text, &json!({"tools": tools()})).await;
    assert_eq!(
        (content, calls, reason.as_str()),
        (Value::Null, vec![weather("Oslo"), weather("Rome \"北\"")], "tool_calls")
    );
    let (_, _, calls, _) = ask(&text, &json!({"tools": tools(), "parallel_tool_calls": false})).await;
    assert_eq!(calls, [weather("Oslo")]);
}

#[tokio::test]
async fn reasoning_then_a_call() {
    let thinking = json!({"tools": tools(), "thinking": {"type": "enabled"}});
    let call = block(&[invoke("Oslo")]);
    for text in [format!("I look.</think>{call}"), format!("I look.{call}")] {
        let (content, reasoning, calls, reason) = ask(&text, &thinking).await;
        assert_eq!((content, reasoning.as_str()), (Value::Null, "I look."));
        assert_eq!((calls, reason.as_str()), (vec![weather("Oslo")], "tool_calls"));
    }
}

#[tokio::test]
async fn malformed_markup_is_neither_shown_nor_called() {
    let broken =
        "Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo";
    let (content, _, calls, reason) = ask(broken, &json!({"tools": tools()})).await;
    assert_eq!((content, calls, reason.as_str()), (json!("Hm."), vec![], "stop"));
}

#[tokio::test]
async fn without_tools_markup_is_text() {
    let text = format!("Hm.{}", block(&[invoke("Oslo")]));
    for more in [json!({}), json!({"tools": tools(), "tool_choice": "none"})] {
        let (content, _, calls, reason) = ask(&text, &more).await;
        assert_eq!((content, calls, reason.as_str()), (json!(text), vec![], "stop"));
    }
}

#[tokio::test]
async fn a_stop_string_counts_in_content_and_not_in_arguments() {
    let text = format!("Let me see.{}", block(&[invoke("Oslo")]));
    let (content, _, calls, reason) = ask(&text, &json!({"tools": tools(), "stop": "Oslo"})).await;
    assert_eq!((content, calls.len(), reason.as_str()), (json!("Let me see."), 1, "tool_calls"));
    let (content, _, calls, reason) = ask(&text, &json!({"tools": tools(), "stop": " me"})).await;
    assert_eq!((content, calls.len(), reason.as_str()), (json!("Let"), 0, "stop"));
}

#[tokio::test]
async fn tools_and_results_are_in_the_prompt() {
    let worker = FakeWorker::start(|_| say("Rain.")).await;
    let gateway = Gateway::start(&worker).await;
    let call = |id| json!({"id": id, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": null, "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]);
    gateway.ask(CHAT, &json!({"messages": messages, "tools": tools()})).await;
    let prompt = worker.next_submit().await.prompt_token_ids;
    let text: Vec<u8> = prompt.iter().flat_map(|id| tokenizer().token_bytes(*id).to_vec()).collect();
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("<｜begin▁of▁sentence｜>\n\n## Tools\n\nYou have access"), "{text}");
    assert!(
        text.contains("{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\"}}\n</functions>\n<｜User｜>")
    );
    let results =
        "<function_results>\n<result>first</result>\n<result>second</result>\n</function_results>\n\n</think>";
    assert!(text.ends_with(results), "{text}");
    assert_eq!(prompt, ids(&text), "markup is made of control tokens");
}
