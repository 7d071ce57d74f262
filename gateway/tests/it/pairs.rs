//! Requests that two workers serve: one computes the prompt, the other one answers.

use std::time::Duration;

use baleen_gateway::config::Source;
use baleen_gateway::worker::pool::Condition;
use baleen_gateway::worker::wire::{self, FinishReason, Role};
use http::StatusCode;
use serde_json::json;

use crate::fake_worker::{Act, FakeWorker, PAGES};
use crate::gateway::{CHAT, COMPLETIONS, Gateway, babble, content, hello, ids, pairs, say, say_slowly};

const STORY: &str = "Once upon a time a whale sang to the moon, and the moon sang back.";

/// A prefill worker that hands over.
async fn prefill() -> FakeWorker {
    FakeWorker::start_as(Role::Prefill, |_| vec![Act::Finish(FinishReason::HandedOver)]).await
}

async fn decode(text: &'static str) -> FakeWorker {
    FakeWorker::start_as(Role::Decode, move |submit| say_slowly(text, submit)).await
}

#[tokio::test]
async fn both_legs_are_one_request_and_tokens_come_from_the_decode_leg() {
    let (prefill, decode) = (prefill().await, decode("Yes.").await);
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let answer = gateway.ask(CHAT, &hello(&json!({"temperature": 0.5}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    let (first, second) = (prefill.next_submit().await, decode.next_submit().await);
    assert_eq!(first.request_id, second.request_id);
    assert_eq!((first.attempt, second.attempt), (0, 0));
    assert_eq!((&first.prompt_token_ids, &first.sampling), (&second.prompt_token_ids, &second.sampling));
    assert!(first.sampling.unwrap().seed.is_some());
    let (first, second) = (first.disaggregation.unwrap(), second.disaggregation.unwrap());
    assert_eq!((first.role(), first.peer), (Role::Prefill, None));
    assert_eq!((second.role(), second.peer_boot_epoch), (Role::Decode, prefill.boot_epoch()));
    assert_eq!(second.peer.unwrap().address, PAGES);
}

#[tokio::test]
async fn a_prompt_that_is_only_scored_is_no_matter_of_two() {
    let prefill = FakeWorker::start_as(Role::Prefill, |_| {
        vec![Act::PromptScores(vec![(1, -1.0, vec![])]), Act::Finish(FinishReason::Length)]
    })
    .await;
    let decode = decode("No.").await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let body = json!({"prompt": [1, 2], "echo": true, "logprobs": 1, "max_tokens": 0});
    gateway.ask(COMPLETIONS, &body).await;
    assert_eq!(prefill.next_submit().await.disaggregation, None);
    assert_eq!(decode.num_submits(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_aborts_both_legs() {
    let prefill = FakeWorker::start_as(Role::Prefill, |_| vec![Act::Hang]).await;
    let decode = FakeWorker::start_as(Role::Decode, |_| babble()).await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true, "n": 2}))).await;
    events.next().await.unwrap();
    drop(events);
    for worker in [&prefill, &decode] {
        let mut keys = [worker.next_abort().await, worker.next_abort().await];
        keys.sort_unstable();
        assert_eq!(keys, [1, 2]);
    }
    gateway.until_idle().await;
}

#[tokio::test]
async fn what_the_prefill_leg_says_of_the_prompt_is_the_answer() {
    let prefill = FakeWorker::start_as(Role::Prefill, |_| {
        vec![Act::Fail(wire::ErrorCode::InvalidArgument, "prompt_token_ids", "The prompt is too long.")]
    })
    .await;
    let decode = FakeWorker::start_as(Role::Decode, |_| vec![Act::Hang]).await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let reply = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert_eq!(reply.error()["message"], "The prompt is too long.");
    assert_eq!(decode.next_abort().await, 1);
}

#[tokio::test]
async fn a_prefill_leg_that_fails_takes_the_decode_leg_with_it_and_another_pair_begins_anew() {
    let failing = |submit: &wire::Submit| match submit.attempt {
        0 => vec![Act::Fail(wire::ErrorCode::Unavailable, "", "This worker is shutting down.")],
        _ => vec![Act::Finish(FinishReason::HandedOver)],
    };
    let prefills =
        [FakeWorker::start_as(Role::Prefill, failing).await, FakeWorker::start_as(Role::Prefill, failing).await];
    let decode = FakeWorker::start_as(Role::Decode, |submit| match submit.attempt {
        0 => vec![Act::Hang],
        _ => say("Yes."),
    })
    .await;
    let gateway = Gateway::start_whole(pairs(&[&prefills[0], &prefills[1]], &[&decode])).await;
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    let (first, second) = (decode.next_submit().await, decode.next_submit().await);
    assert_eq!((first.attempt, second.attempt), (0, 1));
    assert_eq!((&first.request_id, &first.sampling), (&second.request_id, &second.sampling));
    let epoch = |submit: &wire::Submit| submit.disaggregation.as_ref().unwrap().peer_boot_epoch;
    assert_ne!(epoch(&first), epoch(&second));
    assert_eq!(gateway.metric("baleen_request_retries_total").await, 1.0);
}

#[tokio::test]
async fn a_decode_worker_that_cannot_reach_its_peer_is_given_another_one() {
    let prefills = [prefill().await, prefill().await];
    let decode = FakeWorker::start_as(Role::Decode, |submit| match submit.attempt {
        0 => vec![Act::Fail(wire::ErrorCode::PeerFailed, "", "The peer makes no progress.")],
        _ => say("Yes."),
    })
    .await;
    let gateway = Gateway::start_whole(pairs(&[&prefills[0], &prefills[1]], &[&decode])).await;
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    assert_eq!([prefills[0].next_submit().await.attempt + prefills[1].next_submit().await.attempt], [1]);
}

#[tokio::test]
async fn a_request_whose_peer_lives_is_no_suspect_and_waits_for_nobody_else() {
    let prefills = [prefill().await, prefill().await];
    let decode = FakeWorker::start_as(Role::Decode, |submit| match submit.attempt {
        _ if submit.prompt_token_ids == [1, 2, 3] => vec![Act::Hang],
        0 => vec![Act::Fail(wire::ErrorCode::PeerFailed, "", "The peer makes no progress.")],
        _ => say("Yes."),
    })
    .await;
    let gateway = Gateway::start_whole(pairs(&[&prefills[0], &prefills[1]], &[&decode])).await;
    let stuck = json!({"prompt": [1, 2, 3]});
    let asked = async {
        assert_eq!(decode.next_submit().await.prompt_token_ids, [1, 2, 3]);
        // A trial would wait ten seconds for the one that is stuck there.
        tokio::time::timeout(Duration::from_secs(8), gateway.ask(CHAT, &hello(&json!({})))).await.expect("no trial")
    };
    tokio::select! {
        reply = gateway.post(COMPLETIONS, &stuck) => panic!("the one that hangs is answered with {}", reply.status),
        answer = asked => assert_eq!(answer["choices"][0]["message"]["content"], "Yes."),
    }
}

#[tokio::test]
async fn a_decode_worker_that_dies_is_a_pause_to_its_clients() {
    let prefill = prefill().await;
    let decodes = [decode(STORY).await, decode(STORY).await];
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decodes[0], &decodes[1]])).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let mut chunks = Vec::new();
    while content(&chunks, 0).len() < 20 {
        chunks.push(events.next_json().await);
    }
    let (dead, heir) = match decodes[0].num_running() {
        1 => (&decodes[0], &decodes[1]),
        _ => (&decodes[1], &decodes[0]),
    };
    dead.kill();
    chunks.extend(events.chunks().await);
    assert_eq!(content(&chunks, 0), STORY);
    let (first, again) = (dead.next_submit().await, heir.next_submit().await);
    assert_eq!(first.request_id, again.request_id);
    assert_eq!((first.attempt, again.attempt), (0, 1));
    assert!(!again.resumed_token_ids.is_empty());
    assert_eq!(ids(STORY)[..again.resumed_token_ids.len()], again.resumed_token_ids);
    assert_eq!(prefill.next_submit().await.resumed_token_ids, Vec::<u32>::new());
    assert_eq!(prefill.next_submit().await.resumed_token_ids, again.resumed_token_ids);
}

#[tokio::test]
async fn a_prefill_worker_that_dies_after_the_first_token_is_not_missed() {
    let prefill = FakeWorker::start_as(Role::Prefill, |_| vec![Act::Hang]).await;
    let decode = decode(STORY).await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let mut chunks = Vec::new();
    while content(&chunks, 0).is_empty() {
        chunks.push(events.next_json().await);
    }
    prefill.kill();
    chunks.extend(events.chunks().await);
    assert_eq!(content(&chunks, 0), STORY);
    assert_eq!(decode.next_submit().await.attempt, 0);
    assert_eq!(gateway.metric("baleen_request_replays_total").await, 0.0);
}

#[tokio::test]
async fn a_worker_of_another_kind_or_port_is_refused_with_a_sentence() {
    let (prefill, decode) = (prefill().await, decode("Yes.").await);
    let mut swapped = pairs(&[&decode], &[&prefill]);
    let Source::Remote(specs) = &mut swapped.source else { unreachable!() };
    specs.push(pairs(&[&prefill], &[]).source.specs().remove(0));
    specs[2].name = "third".into();
    specs[2].transfer_port = Some(9_000);
    let gateway = Gateway::start_unready(swapped).await;
    let all_refused = "all are refused";
    gateway
        .until(all_refused, |app| app.pool.slots().iter().all(|slot| matches!(slot.condition(), Condition::Refused(_))))
        .await;
    let sentences: Vec<String> = gateway
        .app
        .pool
        .slots()
        .iter()
        .map(|slot| match slot.condition() {
            Condition::Refused(reason) => reason,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(sentences[0].contains("a decode worker and was given by --prefill"), "{}", sentences[0]);
    assert!(sentences[1].contains("a prefill worker and was given by --decode"), "{}", sentences[1]);
    assert!(sentences[2].contains("9000") && sentences[2].contains("8998"), "{}", sentences[2]);
}

#[tokio::test]
async fn workers_whose_pages_differ_make_no_pair() {
    let (prefill, decode, other) = (prefill().await, decode("Yes.").await, decode("No.").await);
    decode.change_info(|info| info.layout_id = "fp8".into());
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let reply = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("layout fp8") && message.contains("plain"), "{message}");
    assert_eq!(gateway.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    gateway.stop().await;
    // One that fits makes the gateway ready, and takes everything.
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode, &other])).await;
    for _ in 0..3 {
        assert_eq!(gateway.ask(CHAT, &hello(&json!({}))).await["choices"][0]["message"]["content"], "No.");
    }
    assert_eq!(gateway.app.pool.unpaired().len(), 1);
}

#[tokio::test]
async fn an_end_of_the_gateway_ends_both_legs_at_once() {
    let prefill = FakeWorker::start_as(Role::Prefill, |_| vec![Act::Hang]).await;
    let decode = FakeWorker::start_as(Role::Decode, |_| babble()).await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), gateway.stop()).await.expect("it ends");
    let events = events.rest().await;
    assert!(events.last().is_some_and(|event| event.contains("\"error\"")), "{events:?}");
}

/// A pair whose decode worker tries whether pages come.
async fn trying(probe: impl Fn(&wire::ProbeTransferRequest) -> String + Send + Sync + 'static) -> [FakeWorker; 2] {
    let (prefill, decode) = (prefill().await, decode("Yes.").await);
    prefill.set_probe(|_| String::new());
    decode.set_probe(probe);
    [prefill, decode]
}

#[tokio::test]
async fn a_pair_serves_once_a_page_has_come_through_it() {
    let blocked = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let looks = blocked.clone();
    let [prefill, decode] = trying(move |_| match looks.load(std::sync::atomic::Ordering::Relaxed) {
        true => "the connection is refused".into(),
        false => String::new(),
    })
    .await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    gateway.until("a page was tried", |_| decode.num_probes() > 0).await;
    gateway.until("the failure is known", |app| app.pool.unpaired().concat().contains("no page comes")).await;
    assert!(!gateway.app.pool.is_serving());
    let refusal = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(refusal.status, StatusCode::SERVICE_UNAVAILABLE);
    let listed = gateway.get("/workers").await.json()["unpaired"].to_string();
    assert!(listed.contains("no page comes from") && listed.contains("the connection is refused"), "{listed}");
    blocked.store(false, std::sync::atomic::Ordering::Relaxed);
    gateway.until("a page has come", |app| app.pool.is_serving()).await;
    assert_eq!(gateway.ask(CHAT, &hello(&json!({}))).await["choices"][0]["message"]["content"], "Yes.");
    assert_eq!(gateway.app.pool.unpaired(), [""; 0]);
}

#[tokio::test]
async fn a_page_is_tried_again_after_either_is_connected_anew() {
    let [prefill, decode] = trying(|_| String::new()).await;
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    gateway.until("a page has come", |app| app.pool.is_serving()).await;
    assert_eq!(decode.num_probes(), 1);
    for (number, worker) in [(2, &prefill), (3, &decode)] {
        worker.cut();
        gateway.until("a page has come again", |app| decode.num_probes() == number && app.pool.is_serving()).await;
    }
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn only_the_pair_through_which_no_page_comes_is_left_out() {
    let (cut_off, well) = (prefill().await, prefill().await);
    let decode = decode("Yes.").await;
    for prefill in [&cut_off, &well] {
        prefill.set_probe(|_| String::new());
    }
    let epoch = cut_off.boot_epoch();
    decode
        .set_probe(move |request| if request.peer_boot_epoch == epoch { "unreachable".into() } else { String::new() });
    let gateway = Gateway::start_whole(pairs(&[&cut_off, &well], &[&decode])).await;
    gateway.until("a page has come", |app| app.pool.is_serving()).await;
    for _ in 0..6 {
        gateway.ask(CHAT, &hello(&json!({}))).await;
    }
    assert_eq!((cut_off.num_submits(), well.num_submits()), (0, 6));
}
