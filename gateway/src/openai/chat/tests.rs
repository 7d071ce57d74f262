#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};

use super::{ChatRequest, ChatSpec};
use crate::chat::encode::Ending;
use crate::chat::style::Style;
use crate::openai::error::InvalidRequest;
use crate::openai::facts::ModelFacts;
use crate::openai::generation::StreamSpec;
use crate::openai::limits::Limits;

const MODEL: ModelFacts = ModelFacts { vocab_size: 1000, context_len: 4096, style: Style::V32 };

fn submit(body: &str) -> Result<ChatSpec, InvalidRequest> {
    ChatRequest::parse(body.as_bytes())?.validate(&Limits::load().unwrap(), &MODEL)
}

/// A sound request with these fields added or replaced.
fn with(fields: Value) -> Result<ChatSpec, InvalidRequest> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    submit(&body.to_string())
}

fn messages(messages: Value) -> Result<ChatSpec, InvalidRequest> {
    with(json!({ "messages": messages }))
}

#[track_caller]
fn refused(result: Result<ChatSpec, InvalidRequest>, status: u16, param: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.status(), status, "{error}");
    assert_eq!(error.param.as_deref(), Some(param), "{error}");
    if status == 400 || status == 501 {
        assert!(error.message.contains(param), "the message names the field: {error}");
    }
}

fn history(calls: &Value, results: &[(&str, &str)]) -> Result<ChatSpec, InvalidRequest> {
    let mut list = vec![json!({"role": "user", "content": "x"}), json!({"role": "assistant", "tool_calls": calls})];
    list.extend(results.iter().map(|(id, text)| json!({"role": "tool", "tool_call_id": id, "content": text})));
    messages(json!(list))
}

fn call(id: &str, arguments: &Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}})
}

#[test]
fn a_bare_request_takes_every_default() {
    let request = ChatRequest::parse(br#"{"messages": [{"role": "user", "content": "hi"}]}"#).unwrap();
    assert_eq!(request.model(), None);
    let spec = with(json!({})).unwrap();
    assert_eq!(spec.messages[0].content, "hi");
    assert!(!spec.encode.thinking);
    assert_eq!(spec.encode.ending, Ending::OpenTurn);
    let generation = spec.generation;
    assert_eq!(generation.sampling, crate::openai::SamplingSpec::default());
    assert_eq!((generation.n, generation.stream, generation.default_max_tokens), (1, None, None));
    assert!(generation.skip_special_tokens && !generation.include_stop && !generation.return_token_ids);
    assert!(generation.stop.is_empty());
}

#[test]
fn null_is_absent_and_unknown_fields_are_ignored() {
    let spec = with(json!({
        "temperature": null, "max_tokens": null, "stop": null, "stream": null, "stream_options": null, "n": null,
        "logprobs": null, "top_logprobs": null, "tools": null, "tool_choice": null, "response_format": null,
        "logit_bias": null, "seed": null, "thinking": null, "chat_template_kwargs": null, "reasoning_effort": null,
        "custom_logit_processor": null, "regex": null,
        "user": "u", "metadata": {"a": [1.5, {}]}, "store": true, "service_tier": "auto", "nonsense": [[1e300]],
    }));
    assert_eq!(spec.unwrap().generation.sampling, crate::openai::SamplingSpec::default());
}

#[test]
fn every_sampling_field_arrives() {
    let spec = with(json!({
        "max_tokens": 5, "max_completion_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": -1,
        "min_p": 0.125, "repetition_penalty": 1.5, "frequency_penalty": -2, "presence_penalty": 2,
        "logit_bias": {"7": -100, "999": 0.5}, "seed": -1, "stop_token_ids": [3, 999], "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20, "thinking_budget": 9, "logit_processors": ["d", "a.b-c_1"],
        "custom_logit_processor": "a.b-c_1",
    }));
    let sampling = spec.unwrap().generation.sampling;
    let expected = crate::openai::SamplingSpec {
        max_tokens: Some(7),
        min_tokens: Some(2),
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(0),
        min_p: Some(0.125),
        repetition_penalty: Some(1.5),
        frequency_penalty: Some(-2.0),
        presence_penalty: Some(2.0),
        logit_bias: vec![(7, -100.0), (999, 0.5)],
        seed: Some(u64::MAX),
        stop_token_ids: vec![3, 999],
        ignore_eos: Some(true),
        logprobs: Some(20),
        prompt_logprobs: None,
        thinking_budget: Some(9),
        logit_processors: vec!["a.b-c_1".to_owned(), "d".to_owned()],
    };
    assert_eq!(sampling, expected);
}

#[test]
fn wrong_types_are_refused_by_name() {
    for (field, value) in [
        ("model", json!(3)),
        ("messages", json!("hi")),
        ("messages", json!({})),
        ("max_tokens", json!("5")),
        ("max_tokens", json!(5.0)),
        ("temperature", json!("hot")),
        ("top_k", json!(1.5)),
        ("n", json!("2")),
        ("seed", json!([1])),
        ("stream", json!("yes")),
        ("stop", json!(5)),
        ("stop", json!({"a": 1})),
        ("logit_bias", json!([1])),
        ("stop_token_ids", json!(7)),
        ("ignore_eos", json!(1)),
        ("logprobs", json!(5)),
        ("top_logprobs", json!(true)),
        ("tools", json!({})),
        ("tool_choice", json!("maybe")),
        ("tool_choice", json!(3)),
        ("response_format", json!("text")),
        ("stream_options", json!(true)),
        ("thinking", json!("enabled")),
        ("reasoning_effort", json!(3)),
        ("cache_salt", json!(3)),
        ("prompt_cache_key", json!(["a"])),
        ("user", json!({"id": 1})),
    ] {
        refused(with(json!({ field: value })), 400, field);
    }
    // A list is no object, even one of its fields' values in order.
    for (field, value) in [
        ("messages[0]", json!(["user", "hi", null, null, null, null, null, null])),
        ("messages[0].content[0]", json!([{"role": "user", "content": [["text", "hi"]]}])),
        ("messages[0].tool_calls[0]", json!([{"role": "assistant", "tool_calls": [["c", "function", {"name": "f"}]]}])),
        ("tools[0]", json!([["function", {"name": "f"}]])),
        ("tool_choice.function", json!({"type": "function", "function": ["f"]})),
        ("thinking", json!(["enabled", null])),
        ("chat_template_kwargs", json!([true, true])),
        ("reasoning", json!([true, "high"])),
        ("stream_options", json!([true, true])),
        ("structured_outputs", json!([null, "a", null, null, null, null])),
    ] {
        let name = field.split(['[', '.']).next().unwrap();
        let value = if field == "messages[0]" { json!([value]) } else { value };
        refused(with(json!({ name: value })), 400, field);
    }
    refused(with(json!({"stop": ["a", 5]})), 400, "stop[1]");
    refused(with(json!({"stop_token_ids": [1, "x"]})), 400, "stop_token_ids[1]");
    refused(
        with(json!({"stream": true, "stream_options": {"include_usage": "yes"}})),
        400,
        "stream_options.include_usage",
    );
    refused(with(json!({"logit_bias": {"7": "x"}})), 400, "logit_bias.7");
    refused(with(json!({"logit_bias": {"seven": 1}})), 400, "logit_bias");
    refused(with(json!({"chat_template_kwargs": {"thinking": "on"}})), 400, "chat_template_kwargs.thinking");
    refused(with(json!({"response_format": {}})), 400, "response_format.type");
    refused(with(json!({"response_format": {"type": "yaml"}})), 400, "response_format.type");
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    for bad in ["", "{", "{\"messages\": [", "nul", "[]", "3", "\"x\"", "{} {}", "{\"messages\" []}", "\u{feff}{}"] {
        let error = submit(bad).unwrap_err();
        assert_eq!((error.status(), error.param.as_deref()), (400, None), "{bad}: {error}");
    }
    let deep = format!("{{\"messages\": {}", "[".repeat(100_000));
    assert_eq!(submit(&deep).unwrap_err().status(), 400);
    assert_eq!(ChatRequest::parse(b"{\"model\": \"\xff\"}").unwrap_err().status(), 400);
}

#[test]
fn a_quoted_value_is_cut_short() {
    let error = with(json!({"temperature": "x".repeat(100_000)})).unwrap_err();
    assert!(error.message.len() < 500, "{}", error.message.len());
}

#[test]
fn stop_is_a_string_or_a_list() {
    assert!(!with(json!({"stop": "x"})).unwrap().generation.stop.is_empty());
    assert!(with(json!({"stop": []})).unwrap().generation.stop.is_empty());
    assert!(with(json!({"stop": vec!["x"; 16]})).is_ok());
    refused(with(json!({"stop": vec!["x"; 17]})), 400, "stop");
    refused(with(json!({"stop": ["x", "y".repeat(257)]})), 400, "stop");
    refused(with(json!({"stop": ["x", ""]})), 400, "stop");
    refused(with(json!({"stop": ""})), 400, "stop");
    for (fields, includes) in [
        (json!({"include_stop_str_in_output": true}), true),
        (json!({"no_stop_trim": true}), true),
        (json!({"include_stop_str_in_output": false, "no_stop_trim": true}), true),
        (json!({"include_stop_str_in_output": false, "no_stop_trim": false}), false),
        (json!({"no_stop_trim": null}), false),
    ] {
        assert_eq!(with(fields.clone()).unwrap().generation.include_stop, includes, "{fields}");
    }
    refused(with(json!({"no_stop_trim": "yes"})), 400, "no_stop_trim");
}

#[test]
fn stream_options_need_a_stream() {
    refused(with(json!({"stream_options": {"include_usage": true}})), 400, "stream_options");
    refused(with(json!({"stream": false, "stream_options": {}})), 400, "stream_options");
    let stream = |fields| with(fields).unwrap().generation.stream;
    assert_eq!(stream(json!({"stream": true})), Some(StreamSpec::default()));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let both = StreamSpec { include_usage: true, continuous_usage: true };
    assert_eq!(stream(json!({"stream": true, "stream_options": options})), Some(both));
}

#[test]
fn top_logprobs_need_logprobs() {
    let logprobs = |fields| with(fields).unwrap().generation.sampling.logprobs;
    assert_eq!(logprobs(json!({"logprobs": true})), Some(0));
    assert_eq!(logprobs(json!({"logprobs": true, "top_logprobs": 3})), Some(3));
    assert_eq!(logprobs(json!({"logprobs": false})), None);
    assert_eq!(logprobs(json!({"top_logprobs": 0})), None);
    refused(with(json!({"top_logprobs": 3})), 400, "top_logprobs");
    refused(with(json!({"logprobs": false, "top_logprobs": 3})), 400, "top_logprobs");
    refused(with(json!({"logprobs": true, "top_logprobs": 21})), 400, "top_logprobs");
    refused(with(json!({"logprobs": true, "top_logprobs": -1})), 400, "top_logprobs");
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    refused(with(json!({"functions": [{"name": "f"}]})), 501, "functions");
    refused(with(json!({"function_call": "auto"})), 501, "function_call");
    refused(with(json!({"use_beam_search": true})), 501, "use_beam_search");
    refused(with(json!({"stop_regex": "a+"})), 501, "stop_regex");
    assert!(with(json!({"tools": [], "response_format": {"type": "text"}, "use_beam_search": false})).is_ok());
}

#[test]
fn plugins_are_asked_for_by_name_and_code_is_refused() {
    for code in [
        json!("import os"),
        json!("{\"callable\": \"80049500\"}"),
        json!({"callable": "8004"}),
        json!("x".repeat(65)),
        json!("a/b"),
        json!(3),
    ] {
        refused(with(json!({"custom_logit_processor": code})), 400, "custom_logit_processor");
        refused(with(json!({"logit_processors": ["ok", code]})), 400, "logit_processors[1]");
    }
    refused(with(json!({"logit_processors": "ok"})), 400, "logit_processors");
    let many: Vec<String> = (0..9).map(|number| format!("p{number}")).collect();
    refused(with(json!({"logit_processors": many})), 400, "logit_processors");
    refused(with(json!({"custom_params": {"temperature": 1}})), 501, "custom_params.temperature");
    refused(with(json!({"custom_params": {"thinking_budget": "9"}})), 400, "custom_params.thinking_budget");
    refused(with(json!({"custom_params": {"thinking_budget": 1.5}})), 400, "custom_params.thinking_budget");
    refused(with(json!({"custom_params": {"thinking_budget": -1}})), 400, "custom_params.thinking_budget");
    let budget = |fields: Value| with(fields).unwrap().generation.sampling.thinking_budget;
    assert_eq!(budget(json!({"custom_params": {"thinking_budget": 9}})), Some(9));
    assert_eq!(budget(json!({"custom_params": {"thinking_budget": 9}, "thinking_budget": 8})), Some(8));
    assert_eq!(budget(json!({"custom_params": {}, "custom_logit_processor": "", "logit_processors": []})), None);
}

#[test]
fn a_switch_wins_over_an_effort_and_an_effort_over_the_default() {
    let thinks = |fields: Value| with(fields).unwrap().encode.thinking;
    for on in [
        json!({"thinking": {"type": "enabled"}}),
        json!({"chat_template_kwargs": {"thinking": true, "other": [1.5]}}),
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"reasoning_effort": "low"}),
        json!({"reasoning": {"enabled": true, "effort": "none"}}),
        json!({"reasoning": {"effort": "high"}}),
        json!({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": false}, "reasoning_effort": "none"}),
    ] {
        assert!(thinks(on.clone()), "{on}");
    }
    for off in [
        json!({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}),
        json!({"chat_template_kwargs": {"thinking": false}, "reasoning_effort": "high"}),
        json!({"reasoning_effort": "none"}),
        json!({"thinking": {}}),
    ] {
        assert!(!thinks(off.clone()), "{off}");
    }
    refused(with(json!({"thinking": {"type": "auto"}})), 400, "thinking.type");
    refused(with(json!({"reasoning_effort": "huge"})), 400, "reasoning_effort");
    for switch in ["separate_reasoning", "stream_reasoning", "include_reasoning"] {
        let (thinks, off) = (json!({"type": "enabled"}), json!(false));
        refused(with(json!({"thinking": thinks, switch: off})), 501, switch);
        refused(with(json!({"thinking": thinks, switch: "no"})), 400, switch);
        assert!(with(json!({"thinking": thinks, switch: true})).unwrap().encode.thinking);
        assert!(!with(json!({ switch: off })).unwrap().encode.thinking, "there is no reasoning to treat otherwise");
    }
    let by_default = ModelFacts { style: Style { thinks_by_default: true, ..Style::V32 }, ..MODEL };
    let limits = Limits::load().unwrap();
    let parse = |body: &[u8]| ChatRequest::parse(body).unwrap().validate(&limits, &by_default).unwrap();
    assert!(parse(br#"{"messages": [{"role": "user", "content": "q"}]}"#).encode.thinking);
    let off = br#"{"messages": [{"role": "user", "content": "q"}], "thinking": {"type": "disabled"}}"#;
    assert!(!parse(off).encode.thinking);
}

#[test]
fn a_thinking_budget_comes_from_either_field() {
    let budget = |fields: Value| with(fields).unwrap().generation.sampling.thinking_budget;
    assert_eq!(budget(json!({"thinking": {"type": "enabled", "budget_tokens": 12}})), Some(12));
    assert_eq!(budget(json!({"thinking": {"type": "enabled", "budget_tokens": 12}, "thinking_budget": 5})), Some(5));
    refused(with(json!({"thinking": {"type": "enabled", "budget_tokens": -1}})), 400, "thinking.budget_tokens");
}

#[test]
fn a_repeated_key_is_refused_wherever_it_stands() {
    let body = |rest: &str| format!(r#"{{"messages": [{{"role": "user", "content": "q"}}], {rest}}}"#);
    for (rest, param) in [
        (r#""n": 2, "n": 2"#, "n"),
        (r#""nonsense": {"a": [1, {"b": 1, "b": 1}]}"#, "nonsense.a[1].b"),
        (r#""tools": [{"function": {"name": "f", "parameters": {"x": 1, "x": 2}}}]"#, "tools[0].function.parameters.x"),
        (r#""logit_bias": {"5": 1, "5": 1}"#, "logit_bias.5"),
    ] {
        refused(submit(&body(rest)), 400, param);
    }
    // What a model once wrote is history: there the last one counts.
    let call = json!([call("a", &json!("{\"k\": 1, \"k\": 3}"))]);
    assert_eq!(history(&call, &[("a", "1")]).unwrap().messages[1].tool_calls[0].arguments["k"], json!(3));
}

#[test]
fn prompt_and_answer_share_the_context() {
    let fit = |fields: Value, prompt_len| with(fields).unwrap().generation.fit_context(prompt_len, "messages", &MODEL);
    assert_eq!(fit(json!({}), 96), Ok(4000));
    assert_eq!(fit(json!({"max_tokens": 4000}), 96), Ok(4000));
    for (fields, prompt_len) in [(json!({"max_tokens": 4000}), 97), (json!({}), 4096), (json!({}), 1 << 40)] {
        let error = fit(fields, prompt_len).unwrap_err();
        assert_eq!(error.code, Some("context_length_exceeded"), "{error}");
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
    assert_eq!(fit(json!({}), 0).unwrap_err().status(), 400);
}

#[test]
fn lists_have_an_end() {
    let user = json!({"role": "user", "content": "x"});
    assert!(messages(json!(vec![user.clone(); 2048])).is_ok());
    refused(messages(json!(vec![user; 2049])), 400, "messages");
    let parts = |number: usize| {
        messages(json!([{"role": "user", "content": vec![json!({"type": "text", "text": ""}); number]}]))
    };
    assert!(parts(1024).is_ok());
    refused(parts(1025), 400, "messages[0].content");
    let tools = |number: usize| {
        let tools: Vec<Value> = (0..number).map(|place| json!({"function": {"name": format!("f{place}")}})).collect();
        with(json!({ "tools": tools }))
    };
    assert!(tools(128).is_ok());
    refused(tools(129), 400, "tools");
    let large = json!({"type": "object", "description": "x".repeat(65_536)});
    refused(
        with(json!({"tools": [{"function": {"name": "f", "parameters": large}}]})),
        400,
        "tools[0].function.parameters",
    );
    let calls: Vec<Value> = (0..129).map(|place| call(&place.to_string(), &json!(""))).collect();
    refused(history(&json!(calls), &[]), 400, "messages[1].tool_calls");
    let deep = format!(r#"{{"messages": [], "x": {}{}}}"#, "[".repeat(64), "]".repeat(64));
    assert!(submit(&deep).unwrap_err().param.unwrap().starts_with("x[0]"));
}

mod conversation;
mod enforced;
mod numbers;
