#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};

use super::{CompletionRequest, CompletionSpec, PromptSource};
use crate::chat::style::Style;
use crate::openai::error::InvalidRequest;
use crate::openai::facts::ModelFacts;
use crate::openai::limits::Limits;

const MODEL: ModelFacts = ModelFacts { vocab_size: 1000, context_len: 4096, style: Style::V32 };

fn with(body: Value) -> Result<CompletionSpec, InvalidRequest> {
    CompletionRequest::parse(body.to_string().as_bytes())?.validate(&Limits::load().unwrap(), &MODEL)
}

fn prompts(prompt: Value) -> Vec<PromptSource> {
    with(json!({ "prompt": prompt })).unwrap().prompts
}

#[track_caller]
fn refused(body: Value, status: u16, param: &str) {
    let error = with(body).unwrap_err();
    assert_eq!((error.status(), error.param.as_deref()), (status, Some(param)), "{error}");
    assert!(error.message.contains(param), "{error}");
}

#[test]
fn a_prompt_has_four_forms() {
    let text = |text: &str| PromptSource::Text(text.to_owned());
    let ids = |ids: &[u32]| PromptSource::Ids(ids.to_vec());
    assert_eq!(prompts(json!("a")), [text("a")]);
    assert_eq!(prompts(json!(["a", "b"])), [text("a"), text("b")]);
    assert_eq!(prompts(json!([1, 2, 999])), [ids(&[1, 2, 999])]);
    assert_eq!(prompts(json!([[1], [2, 3]])), [ids(&[1]), ids(&[2, 3])]);
}

#[test]
fn other_prompts_are_refused_by_name() {
    for (prompt, param) in [
        (json!(null), "prompt"),
        (json!(""), "prompt"),
        (json!([]), "prompt"),
        (json!(5), "prompt"),
        (json!({}), "prompt"),
        (json!(["a", ""]), "prompt[1]"),
        (json!([[1], []]), "prompt[1]"),
        (json!(["a", 1]), "prompt[1]"),
        (json!([1, "a"]), "prompt[1]"),
        (json!([1, 1.5]), "prompt[1]"),
        (json!([1.5]), "prompt[0]"),
        (json!([true]), "prompt[0]"),
        (json!([1, -1]), "prompt[1]"),
        (json!([-1]), "prompt[0]"),
        (json!([4294967296u64]), "prompt[0]"),
        (json!([[1], "a"]), "prompt[1]"),
        (json!([1, 1000]), "prompt[1]"),
        (json!([[1], [2, 1000]]), "prompt[1][1]"),
    ] {
        refused(json!({ "prompt": prompt }), 400, param);
    }
    refused(json!({}), 400, "prompt");
}

#[test]
fn sixteen_tokens_unless_asked_otherwise() {
    let spec = with(json!({"prompt": "a"})).unwrap();
    assert!(!spec.echo);
    assert_eq!(spec.generation.fit_context(10, "prompt", &MODEL), Ok(16));
    assert_eq!(spec.generation.fit_context(4090, "prompt", &MODEL), Ok(6));
    let spec = with(json!({"prompt": "a", "max_tokens": 0, "echo": true, "logprobs": 1})).unwrap();
    assert_eq!(spec.generation.fit_context(4096, "prompt", &MODEL), Ok(0));
    let spec = with(json!({"prompt": "a", "max_tokens": 100})).unwrap();
    assert!(spec.generation.fit_context(4000, "prompt", &MODEL).is_err());
}

#[test]
fn echo_with_logprobs_scores_the_prompt() {
    let sampling = |body| with(body).unwrap().generation.sampling;
    let scored = sampling(json!({"prompt": "a", "echo": true, "logprobs": 5}));
    assert_eq!((scored.logprobs, scored.prompt_logprobs), (Some(5), Some(5)));
    let plain = sampling(json!({"prompt": "a", "logprobs": 0}));
    assert_eq!((plain.logprobs, plain.prompt_logprobs), (Some(0), None));
    refused(json!({"prompt": "a", "logprobs": 21}), 400, "logprobs");
    refused(json!({"prompt": "a", "logprobs": true}), 400, "logprobs");
}

#[test]
fn choices_are_bounded() {
    assert_eq!(with(json!({"prompt": ["a", "b"], "n": 3, "best_of": 3})).unwrap().generation.n, 3);
    refused(json!({"prompt": "a", "n": 2, "best_of": 3}), 400, "best_of");
    refused(json!({"prompt": "a", "best_of": 2}), 400, "best_of");
    assert!(with(json!({"prompt": vec!["a"; 4096]})).is_ok());
    refused(json!({"prompt": vec!["a"; 4097]}), 400, "prompt");
    refused(json!({"prompt": vec!["a"; 513], "n": 8}), 400, "prompt");
}

#[test]
fn a_suffix_is_not_built() {
    refused(json!({"prompt": "a", "suffix": "b"}), 501, "suffix");
    assert!(with(json!({"prompt": "a", "suffix": null})).is_ok());
    assert!(with(json!({"prompt": "a", "suffix": ""})).is_ok());
}

#[test]
fn shared_fields_are_shared() {
    let spec = with(json!({"prompt": "a", "temperature": 0, "stop": ["x"], "return_token_ids": true, "priority": -5}));
    let generation = spec.unwrap().generation;
    assert_eq!(generation.sampling.temperature, Some(0.0));
    assert!(generation.return_token_ids && !generation.stop.is_empty());
    assert_eq!(generation.priority, -5);
    refused(json!({"prompt": "a", "temperature": "hot"}), 400, "temperature");
}
