//! `/v1/chat/completions` from body to answer.

use std::time::Duration;

use baleen_gateway::worker::wire;
use serde_json::json;

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{CHAT, Gateway, content, deltas, finish_reasons, hello, ids, say, tokenizer};

#[tokio::test]
async fn a_stream_is_a_role_then_text_then_a_reason_then_done() {
    let worker = FakeWorker::start(|_| say("The whale sings.")).await;
    let gateway = Gateway::start(&worker).await;
    let chunks = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await.chunks().await;
    assert_eq!(deltas(&chunks, 0).next().unwrap()["role"], "assistant");
    assert_eq!(content(&chunks, 0), "The whale sings.");
    assert_eq!(finish_reasons(&chunks), ["stop"]);
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["model"] == "micro"));
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk.get("usage").is_none()));
    let submit = worker.next_submit().await;
    assert_eq!(chunks[0]["id"], format!("chatcmpl-{}", hex(&submit.request_id)));
    assert_eq!(submit.sampling.unwrap().max_tokens, Some(4096 - u32::try_from(submit.prompt_token_ids.len()).unwrap()));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn an_answer_in_one_piece_is_the_stream_collected() {
    let worker = FakeWorker::start(|_| say("The whale sings.")).await;
    let gateway = Gateway::start(&worker).await;
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": "The whale sings."}));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let num_tokens = ids("The whale sings.").len() + 1;
    assert_eq!(answer["usage"]["completion_tokens"], num_tokens);
    let chunks =
        gateway.stream(CHAT, &hello(&json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    let chunks = chunks.chunks().await;
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &answer["usage"]));
    assert!(before.iter().all(|chunk| chunk["usage"].is_null() && chunk.as_object().unwrap().contains_key("usage")));
}

#[tokio::test]
async fn tokens_that_wait_leave_in_one_event() {
    let token_ids = ids("one two three four five");
    let num_tokens = token_ids.len();
    assert!(num_tokens > 4);
    let worker = FakeWorker::start(move |_| {
        let mut acts = vec![Act::Tokens(token_ids.clone())];
        acts.push(Act::Finish(wire::FinishReason::Length));
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let chunks = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await.chunks().await;
    assert_eq!(content(&chunks, 0), "one two three four five");
    assert!(chunks.len() <= 4, "{} chunks for {num_tokens} tokens of one frame", chunks.len());
    assert_eq!(finish_reasons(&chunks), ["length"]);
}

#[tokio::test]
async fn samples_are_fanned_out_with_seeds_of_their_own() {
    let worker = FakeWorker::start(|submit| {
        let index = submit.sample_group.as_ref().map_or(0, |group| group.index);
        say(&format!("Answer {index}."))
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let answer = gateway.ask(CHAT, &hello(&json!({"n": 3, "seed": 7}))).await;
    let texts: Vec<_> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["message"]["content"].clone()).collect();
    assert_eq!(texts, ["Answer 0.", "Answer 1.", "Answer 2."]);
    let submits = [worker.next_submit().await, worker.next_submit().await, worker.next_submit().await];
    let seeds: Vec<_> = submits.iter().map(|submit| submit.sampling.as_ref().unwrap().seed.unwrap()).collect();
    assert_eq!(seeds[0], 7);
    assert!(seeds[1] != 7 && seeds[2] != 7 && seeds[1] != seeds[2]);
    for submit in &submits {
        let group = submit.sample_group.as_ref().unwrap();
        assert_eq!((group.size, &group.group_id), (3, &submits[0].request_id));
        assert_eq!(submit.prompt_token_ids, submits[0].prompt_token_ids);
    }
    // The prompt counts once.
    assert_eq!(answer["usage"]["prompt_tokens"], submits[0].prompt_token_ids.len());
    let chunks = gateway.stream(CHAT, &hello(&json!({"n": 2, "stream": true}))).await.chunks().await;
    assert_eq!([content(&chunks, 0), content(&chunks, 1)], ["Answer 0.", "Answer 1."]);
    assert_eq!(finish_reasons(&chunks), ["stop", "stop"]);
    let drawn = [worker.next_submit().await, worker.next_submit().await].map(|submit| submit.sampling.unwrap().seed);
    assert!(drawn[0].is_some() && drawn[0] != drawn[1]);
}

#[tokio::test]
async fn a_stop_string_ends_the_choice_and_the_worker() {
    for stream in [false, true] {
        let worker = FakeWorker::start(|_| {
            let mut acts = say("One, two, three, four");
            acts.pop();
            acts.push(Act::Hang);
            acts
        })
        .await;
        let gateway = Gateway::start(&worker).await;
        let body = hello(&json!({"stop": ["never", ", three"], "stream": stream}));
        let (text, reason) = if stream {
            let chunks = gateway.stream(CHAT, &body).await.chunks().await;
            (content(&chunks, 0), finish_reasons(&chunks).concat())
        } else {
            let answer = gateway.ask(CHAT, &body).await;
            let choice = &answer["choices"][0];
            let text = choice["message"]["content"].as_str().unwrap().to_owned();
            (text, choice["finish_reason"].as_str().unwrap().to_owned())
        };
        assert_eq!((text.as_str(), reason.as_str()), ("One, two", "stop"));
        assert_eq!(worker.next_abort().await, 1);
    }
}

#[tokio::test]
async fn thinking_is_split_from_content() {
    let close = tokenizer().control_id("</think>").unwrap();
    let worker = FakeWorker::start(move |_| {
        let mut acts = say("Let me see.");
        acts.pop();
        acts.push(Act::Tokens(vec![close]));
        acts.extend(say("Krill."));
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let body = hello(&json!({"thinking": {"type": "enabled"}}));
    let message = gateway.ask(CHAT, &body).await["choices"][0]["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Let me see."), &json!("Krill.")));
    let mut body = body;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = gateway.stream(CHAT, &body).await.chunks().await;
    let reasoning: String =
        deltas(&chunks, 0).filter_map(|delta| delta["reasoning_content"].as_str().map(str::to_owned)).collect();
    assert_eq!((reasoning.as_str(), content(&chunks, 0).as_str()), ("Let me see.", "Krill."));
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], ids("Let me see.").len());
}

#[tokio::test]
async fn logprobs_go_with_their_tokens() {
    let [first, second] = [ids(" sea")[0], ids(" whale")[0]];
    let shown = |id| String::from_utf8_lossy(tokenizer().token_bytes(id)).into_owned();
    assert_ne!(first, second);
    let worker = FakeWorker::start(move |_| {
        vec![
            Act::Scored(vec![(first, -0.25, vec![(first, -0.25), (second, -1.5)])]),
            Act::Scored(vec![(second, -0.5, vec![(second, -0.5), (first, -2.0)])]),
            Act::Finish(wire::FinishReason::Length),
        ]
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let body = hello(&json!({"logprobs": true, "top_logprobs": 2}));
    let whole = gateway.ask(CHAT, &body).await["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(whole.as_array().unwrap().len(), 2);
    assert_eq!((&whole[0]["token"], &whole[0]["logprob"]), (&json!(shown(first)), &json!(-0.25)));
    assert_eq!(whole[1]["top_logprobs"][1]["token"], shown(first));
    let mut body = body;
    body["stream"] = json!(true);
    let chunks = gateway.stream(CHAT, &body).await.chunks().await;
    let streamed: Vec<_> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), whole);
    assert_eq!(worker.next_submit().await.sampling.unwrap().logprobs, Some(2));
}

#[tokio::test]
async fn half_a_character_is_never_sent() {
    let whale = ids("🐋");
    assert!(whale.len() > 1, "the character is spread over tokens");
    let worker = FakeWorker::start(move |_| {
        let mut acts = Vec::new();
        for &id in &whale {
            acts.extend([Act::Tokens(vec![id]), Act::Wait(Duration::from_millis(20))]);
        }
        acts.push(Act::Last(1, wire::FinishReason::Stop));
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let chunks = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await.chunks().await;
    let texts: Vec<String> = deltas(&chunks, 0)
        .filter_map(|delta| delta["content"].as_str().filter(|text| !text.is_empty()).map(str::to_owned))
        .collect();
    assert_eq!(texts, ["🐋"]);
}
