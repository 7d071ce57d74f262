//! Several workers, and workers that do not fit.

use std::time::Duration;

use baleen_gateway::worker::key::WorkerKey;
use baleen_gateway::worker::pool::Condition;
use baleen_gateway::worker::wire;
use serde_json::json;

use crate::fake_worker::{FakeWorker, Seen};
use crate::gateway::{CHAT, Gateway, babble, config, hello, say};

fn refusal(gateway: &Gateway, slot: usize) -> Option<String> {
    match gateway.app.pool.slots()[slot].condition() {
        Condition::Refused(reason) => Some(reason),
        _ => None,
    }
}

#[tokio::test]
async fn the_hello_names_the_gateway_and_the_protocol() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let Seen::Hello(hello) = worker.next_matching(|seen| matches!(seen, Seen::Hello(_))).await else { unreachable!() };
    assert_eq!(hello.protocol_version, 1);
    assert!(hello.gateway_epoch != 0 && !hello.gateway_id.is_empty());
    gateway.stop().await;
}

#[tokio::test]
async fn requests_are_spread_over_workers() {
    let workers = [FakeWorker::start(|_| babble()).await, FakeWorker::start(|_| babble()).await];
    let gateway =
        Gateway::start_unready(config(workers.iter().map(|worker| worker.address.to_string()).collect())).await;
    gateway.until("both are ready", |app| app.pool.ready().len() == 2).await;
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
        events.next().await.unwrap();
        streams.push(events);
    }
    assert_eq!([workers[0].num_running(), workers[1].num_running()], [3, 3]);
}

#[tokio::test]
async fn the_loss_of_one_worker_leaves_the_other() {
    let workers = [FakeWorker::start(|_| say("Yes.")).await, FakeWorker::start(|_| say("Yes.")).await];
    let gateway =
        Gateway::start_unready(config(workers.iter().map(|worker| worker.address.to_string()).collect())).await;
    gateway.until("both are ready", |app| app.pool.ready().len() == 2).await;
    workers[0].kill();
    gateway.until("one is gone", |app| app.pool.ready().len() == 1).await;
    for _ in 0..4 {
        gateway.ask(CHAT, &hello(&json!({}))).await;
    }
}

#[tokio::test]
async fn a_worker_that_reports_but_no_longer_hears_is_given_up() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    worker.set_deaf(true);
    let report = wire::WorkerFrame { load: Some(wire::LoadReport::default()), ..Default::default() };
    let reports = async {
        loop {
            worker.broadcast(&report);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = reports => unreachable!(),
        _ = worker.next_matching(|seen| *seen == Seen::StreamEnded) => {}
    }
    worker.set_deaf(false);
    gateway.until("it is back", |app| app.pool.ready().len() == 1).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn a_worker_with_another_model_is_refused() {
    let (first, second) = (FakeWorker::start(|_| say("Yes.")).await, FakeWorker::start(|_| say("No.")).await);
    second.change_info(|info| info.config_digest = "another".into());
    let gateway = Gateway::start(&first).await;
    gateway.stop().await;
    let gateway = Gateway::start_unready(config(vec![first.address.to_string(), second.address.to_string()])).await;
    let served = |text: &str| text.to_owned();
    gateway
        .until("one of the two is refused", |app| {
            app.pool.slots().iter().any(|slot| matches!(slot.condition(), Condition::Refused(_)))
                && app.pool.ready().len() == 1
        })
        .await;
    let reason = refusal(&gateway, 0).or_else(|| refusal(&gateway, 1)).unwrap();
    assert!(reason.contains("config digest"), "{}", served(&reason));
}

#[tokio::test]
async fn a_worker_that_cannot_be_spoken_with_is_refused_with_its_reason() {
    type Change = fn(&mut wire::GetInfoResponse);
    let cases: [(Change, &str); 4] = [
        (|info| info.protocol_version = 2, "version 2"),
        (|info| info.role = wire::Role::Prefill.into(), "give it by --prefill"),
        (|info| info.topology.as_mut().unwrap().dp_size = 8, "8 data-parallel ranks"),
        (|info| info.tokenizer_sha256 = "0000".into(), "digest"),
    ];
    for (change, expected) in cases {
        let worker = FakeWorker::start(|_| say("Yes.")).await;
        worker.change_info(change);
        let gateway = Gateway::start_unready(config(vec![worker.address.to_string()])).await;
        gateway.until(expected, |app| matches!(app.pool.slots()[0].condition(), Condition::Refused(_))).await;
        let reason = refusal(&gateway, 0).unwrap();
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn a_worker_that_still_loads_is_waited_for() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    worker.set_loading(true);
    let gateway = Gateway::start_unready(config(vec![worker.address.to_string()])).await;
    gateway
        .until(
            "its loading is noticed",
            |app| matches!(app.pool.slots()[0].condition(), Condition::NotReady(reason) if reason.contains("loading")),
        )
        .await;
    worker.set_loading(false);
    gateway.until("it is ready", |app| !app.pool.ready().is_empty()).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn every_call_shows_the_key_and_a_wrong_one_leaves_the_other_workers_alone() {
    let (worker, stranger) = (FakeWorker::start(|_| say("Yes.")).await, FakeWorker::start(|_| say("No.")).await);
    worker.set_shown_key("Bearer 027d4abafe19615f57df2a3c883c14dbe16b40326026778ec99e97096c6e6ca1");
    stranger.set_shown_key("Bearer of another key");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    let mut config = config(vec![worker.address.to_string(), stranger.address.to_string()]);
    config.worker_key = Some(WorkerKey::read(&path).unwrap());
    let gateway = Gateway::start_unready(config).await;
    gateway.until("one is ready", |app| app.pool.ready().len() == 1).await;
    gateway.until("the other refuses", |_| refusal(&gateway, 1).is_some()).await;
    assert_eq!(refusal(&gateway, 1).unwrap(), "it wants the key");
    for _ in 0..3 {
        gateway.ask(CHAT, &hello(&json!({}))).await;
    }
    assert_eq!(stranger.num_submits(), 0);
}

#[tokio::test]
async fn without_a_key_a_worker_that_asks_for_one_is_refused() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    worker.set_shown_key("Bearer 027d4abafe19615f57df2a3c883c14dbe16b40326026778ec99e97096c6e6ca1");
    let gateway = Gateway::start_unready(config(vec![worker.address.to_string()])).await;
    gateway.until("it refuses", |_| refusal(&gateway, 0).is_some()).await;
}
