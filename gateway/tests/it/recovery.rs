//! Moments in which nobody can take a request and somebody is about to: streams that are connected anew, pairs that are
//! tried, workers that shut down beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baleen_gateway::worker::wire::{self, FinishReason, Role};
use http::StatusCode;
use serde_json::{Value, json};

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{CHAT, Gateway, Reply, config, hello, pairs, say};

fn hand_over() -> Vec<Act> {
    vec![Act::Finish(FinishReason::HandedOver)]
}

/// Of a pair, and its way of pages can be tried.
async fn prefill(script: impl Fn(&wire::Submit) -> Vec<Act> + Send + Sync + 'static) -> FakeWorker {
    let worker = FakeWorker::start_as(Role::Prefill, script).await;
    worker.set_probe(|_| String::new());
    worker
}

async fn decode() -> FakeWorker {
    let worker = FakeWorker::start_as(Role::Decode, |_| say("Yes.")).await;
    worker.set_probe(|_| String::new());
    worker
}

/// A decode worker that no pages come to: one that answered would be heard before its peer's failure, now and then.
fn unserved(_: &wire::Submit) -> Vec<Act> {
    vec![Act::Hang]
}

/// The same, until the request goes elsewhere.
fn unserved_at_first(submit: &wire::Submit) -> Vec<Act> {
    if submit.attempt == 0 { unserved(submit) } else { say("Yes.") }
}

fn assert_answered(reply: &Reply) {
    assert_eq!(reply.status, StatusCode::OK, "{:?}", reply.body);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "Yes.");
}

fn ask() -> Value {
    hello(&json!({}))
}

/// Has the stream to a worker break, and returns when the gateway knows.
async fn cut(gateway: &Gateway, worker: &FakeWorker) {
    let mut changes = gateway.app.pool.changes();
    worker.cut();
    changes.changed().await.expect("the pool lives");
}

/// Lets its pairs be tried, after so long.
async fn release(decode: &FakeWorker, after: Duration) {
    tokio::time::sleep(after).await;
    decode.hold_probes(false);
}

#[tokio::test]
async fn a_request_waits_for_a_worker_that_is_connected_anew() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start_whole(config(vec![worker.address.to_string()])).await;
    for _ in 0..3 {
        cut(&gateway, &worker).await;
        assert_answered(&gateway.post(CHAT, &ask()).await);
    }
}

#[tokio::test]
async fn a_request_waits_for_pairs_that_are_tried() {
    let (prefill, decode) = (prefill(|_| hand_over()).await, decode().await);
    decode.hold_probes(true);
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let body = ask();
    let (reply, ()) = tokio::join!(gateway.post(CHAT, &body), release(&decode, Duration::from_millis(100)));
    assert_answered(&reply);
}

#[tokio::test]
async fn a_trial_that_fails_ends_the_wait_with_its_reason() {
    let (prefill, decode) = (prefill(|_| hand_over()).await, decode().await);
    decode.set_probe(|_| "unreachable".into());
    decode.hold_probes(true);
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    let body = ask();
    let (reply, ()) = tokio::join!(gateway.post(CHAT, &body), release(&decode, Duration::from_millis(100)));
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("no page comes") && message.contains("unreachable"), "{message}");
}

#[tokio::test]
async fn what_a_worker_that_shuts_down_turns_away_waits_for_the_pair_that_is_tried() {
    let turned_away = |_: &wire::Submit| vec![Act::Fail(wire::ErrorCode::Unavailable, "", "Shutting down.")];
    let (old, new, decode) = (prefill(turned_away).await, prefill(|_| hand_over()).await, decode().await);
    let gateway = Gateway::start_whole(pairs(&[&old, &new], &[&decode])).await;
    gateway.until("both pairs are open", |app| app.pool.closed_pairs().is_empty()).await;
    decode.set_script(unserved_at_first);
    decode.hold_probes(true);
    cut(&gateway, &new).await;
    gateway.until("the new one is back", |app| app.pool.ready().len() == 3).await;
    assert_eq!(gateway.app.pool.closed_pairs().len(), 1);
    let body = ask();
    let outcome = async {
        old.next_submit().await;
        release(&decode, Duration::from_millis(100)).await;
    };
    let (reply, ()) = tokio::join!(gateway.post(CHAT, &body), outcome);
    assert_answered(&reply);
    assert_eq!((old.num_submits(), new.num_submits()), (1, 1));
}

#[tokio::test]
async fn a_request_whose_stream_broke_outlasts_the_trial_of_its_pair() {
    let count = Arc::new(AtomicU64::new(0));
    let breaking = move |_: &wire::Submit| match count.fetch_add(1, Ordering::Relaxed) {
        0 => vec![Act::Close],
        _ => hand_over(),
    };
    let prefill = prefill(breaking).await;
    let decode = decode().await;
    decode.set_script(unserved_at_first);
    let gateway = Gateway::start_whole(pairs(&[&prefill], &[&decode])).await;
    gateway.until("the pair is open", |app| app.pool.is_serving()).await;
    decode.hold_probes(true);
    let body = ask();
    let outcome = async {
        prefill.next_submit().await;
        // Longer than the request rests before it looks for a worker.
        release(&decode, Duration::from_millis(1300)).await;
    };
    let (reply, ()) = tokio::join!(gateway.post(CHAT, &body), outcome);
    assert_answered(&reply);
}

#[tokio::test]
async fn a_worker_that_is_set_aside_serves_where_the_others_have_no_open_pair() {
    let fail = |_: &wire::Submit| vec![Act::Fail(wire::ErrorCode::Internal, "", "Something broke.")];
    let (failing, cut_off, decode) = (prefill(fail).await, prefill(|_| hand_over()).await, decode().await);
    let epoch = cut_off.boot_epoch();
    decode
        .set_probe(move |request| if request.peer_boot_epoch == epoch { "unreachable".into() } else { String::new() });
    let gateway = Gateway::start_whole(pairs(&[&failing, &cut_off], &[&decode])).await;
    gateway.until("a page has come", |app| app.pool.is_serving()).await;
    decode.set_script(unserved);
    for _ in 0..5 {
        assert_eq!(gateway.post(CHAT, &ask()).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    failing.set_script(|_| hand_over());
    decode.set_script(|_| say("Yes."));
    assert_answered(&gateway.post(CHAT, &ask()).await);
    assert_eq!(cut_off.num_submits(), 0);
}
