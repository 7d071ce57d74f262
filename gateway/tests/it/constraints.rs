//! Answers that the worker has to hold to a form: what it is told, and what becomes of a request it cannot take.

use baleen_gateway::worker::wire;
use baleen_gateway::worker::wire::submit::Constraint;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{CHAT, COMPLETIONS, Gateway, config, hello, prompt, say};

/// A worker with these features.
async fn worker_with(features: &[&str]) -> FakeWorker {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    worker.change_info(|info| info.features = features.iter().map(|&feature| feature.to_owned()).collect());
    worker
}

/// Such a worker, and a gateway in front of it.
async fn stack(features: &[&str]) -> (FakeWorker, Gateway) {
    let worker = worker_with(features).await;
    let gateway = Gateway::start(&worker).await;
    (worker, gateway)
}

fn strict_tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": true}}])
}

#[tokio::test]
async fn rules_travel_with_each_choice() {
    let (worker, gateway) = stack(&["json_schema", "regex", "ebnf", "structural_tag"]).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    gateway.ask(CHAT, &hello(&json!({"response_format": format, "n": 2}))).await;
    for _ in 0..2 {
        let submit = worker.next_submit().await;
        assert_eq!(submit.constraint, Some(Constraint::JsonSchema(schema.to_string())));
        assert!(!submit.starts_in_reasoning);
    }
    gateway.ask(CHAT, &hello(&json!({"regex": "a+", "thinking": {"type": "enabled"}}))).await;
    let submit = worker.next_submit().await;
    assert_eq!(submit.constraint, Some(Constraint::Regex("a+".to_owned())));
    assert!(submit.starts_in_reasoning, "the rule is for what follows the reasoning");
    gateway.ask(COMPLETIONS, &prompt(&json!({"guided_grammar": "root ::= \"a\""}))).await;
    assert_eq!(worker.next_submit().await.constraint, Some(Constraint::Ebnf("root ::= \"a\"".to_owned())));
    for choice in [json!("auto"), json!("required")] {
        gateway.ask(CHAT, &hello(&json!({"tools": strict_tools(), "tool_choice": choice}))).await;
        let Some(Constraint::StructuralTag(tag)) = worker.next_submit().await.constraint else { panic!("no tag") };
        let tag: Value = serde_json::from_str(&tag).unwrap();
        assert_eq!(tag["type"], "structural_tag");
        assert!(tag.to_string().contains("get_weather"));
    }
    gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(worker.next_submit().await.constraint, None);
}

#[tokio::test]
async fn what_the_worker_lacks_is_refused_before_it_is_asked() {
    let (worker, gateway) = stack(&["regex"]).await;
    for (path, body, param) in [
        (CHAT, hello(&json!({"response_format": {"type": "json_object"}})), "response_format"),
        (CHAT, hello(&json!({"tools": strict_tools()})), "tools[0].function.strict"),
        (CHAT, hello(&json!({"tools": strict_tools(), "tool_choice": "required"})), "tool_choice"),
        (CHAT, hello(&json!({"guided_choice": ["a"]})), "guided_choice"),
        (COMPLETIONS, prompt(&json!({"ebnf": "root ::= \"a\""})), "ebnf"),
        (COMPLETIONS, prompt(&json!({"presence_penalty": 0.5})), "presence_penalty"),
        (COMPLETIONS, prompt(&json!({"echo": true, "logprobs": 1})), "echo"),
        (CHAT, hello(&json!({"logit_bias": {"5": 1}})), "logit_bias"),
        (CHAT, hello(&json!({"thinking_budget": 1})), "thinking_budget"),
        (CHAT, hello(&json!({"custom_logit_processor": "a"})), "logit_processors"),
    ] {
        let reply = gateway.post(path, &body).await;
        assert_eq!((reply.status, reply.error()["param"].as_str()), (StatusCode::NOT_IMPLEMENTED, Some(param)));
    }
    let neutral = json!({"regex": "a+", "presence_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0});
    gateway.ask(CHAT, &hello(&neutral)).await;
    assert_eq!(worker.next_submit().await.constraint, Some(Constraint::Regex("a+".to_owned())));
    gateway.until_idle().await;
}

#[tokio::test]
async fn a_request_goes_only_to_a_worker_that_can_do_all_it_takes() {
    let workers = [worker_with(&["regex", "min_tokens"]).await, worker_with(&["ebnf", "min_tokens"]).await];
    let addresses = workers.iter().map(|worker| worker.address.to_string()).collect();
    let gateway = Gateway::start_unready(config(addresses)).await;
    gateway.until("both are ready", |app| app.pool.ready().len() == 2).await;
    for _ in 0..3 {
        gateway.ask(CHAT, &hello(&json!({"regex": "a+", "min_tokens": 1}))).await;
        assert_eq!(workers[0].next_submit().await.constraint, Some(Constraint::Regex("a+".to_owned())));
        gateway.ask(CHAT, &hello(&json!({"ebnf": "root ::= \"a\""}))).await;
        assert_eq!(workers[1].next_submit().await.constraint, Some(Constraint::Ebnf("root ::= \"a\"".to_owned())));
    }
    let reply = gateway.post(CHAT, &hello(&json!({"regex": "a+", "logit_bias": {"5": 1}}))).await;
    assert_eq!((reply.status, &reply.error()["param"]), (StatusCode::NOT_IMPLEMENTED, &json!("logit_bias")));
    workers[0].kill();
    gateway.until("one is gone", |app| app.pool.ready().len() == 1).await;
    let reply = gateway.post(CHAT, &hello(&json!({"regex": "a+"}))).await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE, "the one that is gone may come back");
    assert!(reply.error()["message"].as_str().unwrap().contains("'regex'"), "{}", reply.error());
}

#[tokio::test]
async fn a_workers_complaint_names_the_clients_field() {
    let worker = FakeWorker::start(|_| {
        vec![Act::Fail(wire::ErrorCode::InvalidArgument, "json_schema", "json_schema: it is too clever")]
    })
    .await;
    worker.change_info(|info| info.features = vec!["json_schema".to_owned()]);
    let gateway = Gateway::start(&worker).await;
    let reply = gateway.post(CHAT, &hello(&json!({"response_format": {"type": "json_object"}}))).await;
    let error = reply.error();
    assert_eq!((reply.status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("response_format")));
    assert_eq!(error["message"], "'response_format': it is too clever");
}

#[tokio::test]
async fn plugins_and_budgets_travel() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let fields = json!({"custom_logit_processor": "a", "logit_processors": ["b"], "custom_params": {"thinking_budget": 7},
        "logit_bias": {"5": -1.5}, "frequency_penalty": 0.5, "min_tokens": 1});
    gateway.ask(CHAT, &hello(&fields)).await;
    let sampling = worker.next_submit().await.sampling.unwrap();
    assert_eq!((sampling.logit_processors, sampling.thinking_budget), (vec!["a".to_owned(), "b".to_owned()], Some(7)));
    assert_eq!(sampling.logit_bias, [wire::LogitBias { token_id: 5, bias: -1.5 }]);
    assert_eq!((sampling.frequency_penalty, sampling.min_tokens), (Some(0.5), Some(1)));
    let reply = gateway.post(CHAT, &hello(&json!({"custom_logit_processor": "{\"callable\": \"80\"}"}))).await;
    assert_eq!(
        (reply.status, reply.error()["param"].as_str()),
        (StatusCode::BAD_REQUEST, Some("custom_logit_processor"))
    );
}

#[tokio::test]
async fn bodies_with_repeated_keys_or_too_much_in_them_are_refused() {
    let (_worker, gateway) = stack(&[]).await;
    let hello = r#""messages": [{"role": "user", "content": "hi"}]"#;
    for (body, param) in [
        (format!("{{{hello}, \"n\": 1, \"n\": 1}}"), Some("n")),
        (format!("{{{hello}, \"x\": [{{\"y\": 1, \"y\": 2}}]}}"), Some("x[0].y")),
        (format!("{{{hello}, \"x\": [{}]}}", vec!["{}"; 100_001].join(",")), None),
    ] {
        let reply = gateway.collect(gateway.request(Method::POST, CHAT, body)).await;
        assert_eq!((reply.status, reply.error()["param"].as_str()), (StatusCode::BAD_REQUEST, param));
    }
    let deep = format!("{{{hello}, \"x\": {}{}}}", "[".repeat(70), "]".repeat(70));
    let reply = gateway.collect(gateway.request(Method::POST, CHAT, deep)).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.error()["message"].as_str().unwrap().contains("64 levels"));
}

#[tokio::test]
async fn the_models_name_decides_how_it_is_spoken_to() {
    let call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\"}<｜tool▁call▁end｜>\
                <｜tool▁calls▁end｜>";
    let worker = FakeWorker::start(move |_| say(&format!("Sure.{call}"))).await;
    worker.change_info(|info| info.model_id = "DeepSeek-V3.1".to_owned());
    let gateway = Gateway::start(&worker).await;
    let messages = json!([{"role": "user", "content": "Oslo?"}]);
    let mut lax = strict_tools();
    lax[0]["function"]["strict"] = json!(false);
    let answer = gateway.ask(CHAT, &json!({"messages": messages, "tools": lax})).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("Sure."), &json!("tool_calls")));
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Oslo\"}");
    drop(gateway);
    worker.change_info(|info| info.model_id = "DeepSeek-V3.2-Speciale".to_owned());
    let gateway = Gateway::start(&worker).await;
    let reply = gateway.post(CHAT, &json!({"messages": messages, "tools": lax})).await;
    assert_eq!((reply.status, reply.error()["param"].as_str()), (StatusCode::BAD_REQUEST, Some("tools")));
    assert!(reply.error()["message"].as_str().unwrap().contains("Speciale"));
}
