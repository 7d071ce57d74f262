//! Bodies that no client means: whatever they hold, the answer is a request or a refusal in one sentence.

#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::chat::ChatRequest;
use super::completions::CompletionRequest;
use super::{InvalidRequest, Limits, ModelFacts};
use crate::chat::style::Style;

const FIELDS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "temperature",
    "top_k",
    "n",
    "best_of",
    "stop",
    "seed",
    "logit_bias",
    "stop_token_ids",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "thinking",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "response_format",
    "custom_logit_processor",
    "regex",
    "priority",
    "cache_salt",
    "prompt_cache_key",
    "user",
    "unknown",
];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..5).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec!["", "user", "text", "none", "enabled", "low", "7"]).prop_map(Value::from),
        "\\PC{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let keys = prop::sample::select(vec!["role", "content", "type", "text", "include_usage", "thinking", "7", "x"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4)
                .prop_map(|entries| Value::from_iter(entries.into_iter().map(|(key, value)| (key.to_owned(), value)))),
        ]
    })
}

/// Some sound fields, some fields with any value.
fn body() -> impl Strategy<Value = Map<String, Value>> {
    let wild = prop::collection::vec((prop::sample::select(FIELDS), any_json()), 0..4);
    wild.prop_map(|wild| {
        let mut body = Map::new();
        body.insert("messages".to_owned(), json!([{"role": "user", "content": "q"}]));
        body.insert("prompt".to_owned(), json!("q"));
        body.extend(wild.into_iter().map(|(name, value)| (name.to_owned(), value)));
        body
    })
}

fn check(refusal: Option<InvalidRequest>) -> Result<(), TestCaseError> {
    if let Some(refusal) = refusal {
        prop_assert!([400, 501].contains(&refusal.status()));
        prop_assert!(refusal.message.ends_with('.') && refusal.message.len() < 2000, "{}", refusal.message);
        prop_assert!(refusal.param.is_some(), "{}", refusal.message);
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_fields_give_a_request_or_a_refusal_that_names_one(body in body()) {
        let limits = Limits::load().unwrap();
        let model = ModelFacts { vocab_size: 1000, context_len: 4096, style: Style::V32 };
        let body = serde_json::to_vec(&body).unwrap();
        check(ChatRequest::parse(&body).and_then(|request| request.validate(&limits, &model)).err())?;
        check(CompletionRequest::parse(&body).and_then(|request| request.validate(&limits, &model)).err())?;
    }

    #[test]
    fn a_cut_or_changed_body_never_panics(body in body(), cut: prop::sample::Index, byte: u8, at: prop::sample::Index) {
        let mut body = serde_json::to_vec(&body).unwrap();
        let place = at.index(body.len());
        body[place] = byte;
        let _ = ChatRequest::parse(&body);
        body.truncate(cut.index(body.len()));
        prop_assert_eq!(ChatRequest::parse(&body).unwrap_err().status(), 400);
        prop_assert_eq!(CompletionRequest::parse(&body).unwrap_err().status(), 400);
    }
}
