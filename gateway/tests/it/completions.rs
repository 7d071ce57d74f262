//! `/v1/completions` from body to answer.

use baleen_gateway::worker::wire;
use serde_json::{Value, json};

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{COMPLETIONS, Gateway, finish_reasons, ids, prompt, say};

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    assert!(choices.iter().enumerate().all(|(place, choice)| choice["index"] == place));
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn prompts_are_taken_as_given_and_answered_in_order() {
    let worker = FakeWorker::start(|submit| {
        let sample = submit.sample_group.as_ref().map_or(0, |group| group.index);
        say(&format!("{} tokens, sample {sample}", submit.prompt_token_ids.len()))
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let body = json!({"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 9});
    let answer = gateway.ask(COMPLETIONS, &body).await;
    assert_eq!(answer["object"], "text_completion");
    let expected = ["3 tokens, sample 0", "3 tokens, sample 1", "1 tokens, sample 0", "1 tokens, sample 1"];
    assert_eq!(texts(&answer), expected);
    assert_eq!(answer["usage"]["prompt_tokens"], 4);
    let first = worker.next_submit().await;
    assert_eq!(first.prompt_token_ids, [5, 6, 7]);
    assert_eq!(first.sampling.unwrap().max_tokens, Some(9));
    let groups = [worker.next_submit().await, worker.next_submit().await, worker.next_submit().await];
    let group_ids: Vec<_> = groups.iter().map(|submit| submit.sample_group.clone().unwrap().group_id).collect();
    assert_eq!(group_ids[0], first.request_id);
    assert!(group_ids[1] == group_ids[2] && group_ids[1] != group_ids[0]);
    gateway.ask(COMPLETIONS, &json!({"prompt": "A whale"})).await;
    let submit = worker.next_submit().await;
    assert_eq!((submit.prompt_token_ids, submit.sampling.unwrap().max_tokens), (ids("A whale"), Some(16)));
}

#[tokio::test]
async fn echo_repeats_the_prompt() {
    let worker = FakeWorker::start(|_| say(" sings.")).await;
    let gateway = Gateway::start(&worker).await;
    for given in [json!("A whale"), json!(ids("A whale"))] {
        let answer = gateway.ask(COMPLETIONS, &json!({"prompt": given, "echo": true})).await;
        assert_eq!(texts(&answer), ["A whale sings."]);
        let body = json!({"prompt": given, "echo": true, "stream": true});
        let chunks = gateway.stream(COMPLETIONS, &body).await.chunks().await;
        let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, "A whale sings.");
        assert_eq!(finish_reasons(&chunks), ["stop"]);
    }
}

#[tokio::test]
async fn a_prompt_is_scored_without_generating() {
    let given = ids("A whale sings.");
    assert!(given.len() >= 3);
    let scored = given.clone();
    let worker = FakeWorker::start(move |_| {
        // Scores come chunk by chunk, beginning at the second token.
        let score = |&id: &u32| (id, -0.5, vec![(id, -0.5)]);
        vec![
            Act::PromptScores(scored[1..2].iter().map(score).collect()),
            Act::PromptScores(scored[2..].iter().map(score).collect()),
            Act::Finish(wire::FinishReason::Length),
        ]
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let body = json!({"prompt": given, "echo": true, "max_tokens": 0, "logprobs": 1});
    let whole = gateway.ask(COMPLETIONS, &body).await["choices"][0].clone();
    assert_eq!((&whole["text"], &whole["finish_reason"]), (&json!("A whale sings."), &json!("length")));
    let scores = &whole["logprobs"];
    assert_eq!(scores["token_logprobs"].as_array().unwrap().len(), given.len());
    assert_eq!((&scores["token_logprobs"][0], &scores["token_logprobs"][1]), (&json!(null), &json!(-0.5)));
    let tokens: String = scores["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens, "A whale sings.");
    assert_eq!(scores["text_offset"][0], 0);
    let sampling = worker.next_submit().await.sampling.unwrap();
    assert_eq!((sampling.prompt_logprobs, sampling.max_tokens), (Some(1), Some(0)));
    let mut body = body;
    body["stream"] = json!(true);
    let chunks = gateway.stream(COMPLETIONS, &body).await.chunks().await;
    assert_eq!(chunks.len(), 1, "{chunks:?}");
    assert_eq!(chunks[0]["choices"][0]["logprobs"], whole["logprobs"]);
}

#[tokio::test]
async fn usage_can_come_with_every_chunk() {
    let worker = FakeWorker::start(|_| say("One two three")).await;
    let gateway = Gateway::start(&worker).await;
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = prompt(&json!({"stream": true, "stream_options": options}));
    let chunks = gateway.stream(COMPLETIONS, &body).await.chunks().await;
    let counts: Vec<u64> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] >= 1, "{counts:?}");
    assert_eq!(*counts.last().unwrap(), ids("One two three").len() as u64 + 1);
}
