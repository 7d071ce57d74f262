//! Workers that die, hang or fail under requests, and what clients see of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baleen_gateway::worker::wire::{self, Role};
use http::StatusCode;
use serde_json::{Value, json};

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{
    CHAT, COMPLETIONS, Gateway, babble, config, content, finish_reasons, hello, ids, prompt, say, say_slowly,
};

const STORY: &str = "Once upon a time a whale sang to the moon, and the moon sang back.";

async fn storyteller() -> FakeWorker {
    FakeWorker::start_as(Role::Unified, |submit| say_slowly(STORY, submit)).await
}

async fn in_front_of(workers: &[&FakeWorker]) -> Gateway {
    Gateway::start_whole(config(workers.iter().map(|worker| worker.address.to_string()).collect())).await
}

#[tokio::test]
async fn an_answer_goes_on_where_its_worker_died() {
    let workers = [storyteller().await, storyteller().await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    let body = json!({"stream": true, "max_tokens": 200, "seed": 5, "stop": ["sang back"], "priority": 3});
    let mut events = gateway.stream(CHAT, &hello(&body)).await;
    let mut chunks = Vec::new();
    while content(&chunks, 0).len() < 20 {
        chunks.push(events.next_json().await);
    }
    let dead = usize::from(workers[0].num_running() == 0);
    workers[dead].kill();
    chunks.extend(events.chunks().await);
    // The stop string is matched across the two workers' tokens.
    assert_eq!(content(&chunks, 0), STORY.replace("sang back.", ""));
    assert_eq!(finish_reasons(&chunks), ["stop"]);
    let (first, again) = (workers[dead].next_submit().await, workers[1 - dead].next_submit().await);
    assert_eq!((first.attempt, again.attempt), (0, 1));
    assert_eq!(first.request_id, again.request_id);
    assert_eq!((&first.sampling, first.priority), (&again.sampling, again.priority));
    assert_eq!(ids(STORY)[..again.resumed_token_ids.len()], again.resumed_token_ids);
    assert_eq!(gateway.metric("baleen_request_replays_total").await, 1.0);
    gateway.until_idle().await;
}

#[tokio::test]
async fn log_probabilities_of_both_workers_make_one_answer() {
    let scored = |submit: &wire::Submit| -> Vec<Act> {
        let rest = ids(STORY).into_iter().skip(submit.resumed_token_ids.len());
        let mut acts: Vec<Act> = rest
            .flat_map(|id| [Act::Scored(vec![(id, -0.25, vec![(id, -0.25)])]), Act::Wait(Duration::from_millis(20))])
            .collect();
        acts.push(Act::Finish(wire::FinishReason::Length));
        acts
    };
    let workers =
        [FakeWorker::start_as(Role::Unified, scored).await, FakeWorker::start_as(Role::Unified, scored).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    let body = prompt(&json!({"logprobs": 1, "max_tokens": 100}));
    let killing = async {
        gateway.until("one works", |_| workers.iter().any(|worker| worker.num_running() == 1)).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        workers.iter().find(|worker| worker.num_running() == 1).unwrap().kill();
    };
    let (answer, ()) = tokio::join!(gateway.ask(COMPLETIONS, &body), killing);
    assert_eq!(answer["choices"][0]["text"], STORY);
    let scores = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
    assert_eq!(scores, vec![json!(-0.25); ids(STORY).len()]);
    assert_eq!(answer["usage"]["completion_tokens"], ids(STORY).len());
}

#[tokio::test]
async fn every_choice_of_a_dead_worker_goes_on() {
    let workers = [storyteller().await, storyteller().await, storyteller().await];
    let gateway = in_front_of(&[&workers[0], &workers[1], &workers[2]]).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true, "n": 4}))).await;
    let mut chunks = Vec::new();
    while (0..4).any(|index| content(&chunks, index).is_empty()) {
        chunks.push(events.next_json().await);
    }
    workers.iter().find(|worker| worker.num_running() > 0).unwrap().kill();
    chunks.extend(events.chunks().await);
    for index in 0..4 {
        assert_eq!(content(&chunks, index), STORY, "choice {index}");
    }
}

#[tokio::test]
async fn nothing_is_lost_on_a_worker_that_dies_before_the_first_token() {
    // Without the ability to resume: the request simply begins anew.
    let workers = [FakeWorker::start(|_| vec![Act::Hang]).await, FakeWorker::start(|_| say("Yes.")).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    let asked: Vec<_> = (0..2).map(|_| hello(&json!({}))).collect();
    let killing = async {
        workers[0].next_submit().await;
        workers[0].kill();
    };
    let (one, two, ()) = tokio::join!(gateway.ask(CHAT, &asked[0]), gateway.ask(CHAT, &asked[1]), killing);
    for answer in [one, two] {
        assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    }
    assert_eq!(gateway.metric("baleen_request_retries_total").await, 1.0);
}

#[tokio::test]
async fn a_worker_that_shuts_down_sends_a_request_on_and_keeps_its_good_name() {
    let refusing = |_: &wire::Submit| vec![Act::Fail(wire::ErrorCode::Unavailable, "", "Shutting down.")];
    let workers = [FakeWorker::start(refusing).await, FakeWorker::start(|_| say("Yes.")).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    for _ in 0..8 {
        let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    }
}

#[tokio::test]
async fn a_full_queue_is_an_answer_and_is_not_tried_elsewhere() {
    let count = Arc::new(AtomicUsize::new(0));
    let full = |count: Arc<AtomicUsize>| {
        move |_: &wire::Submit| {
            count.fetch_add(1, Ordering::Relaxed);
            vec![Act::Fail(wire::ErrorCode::ResourceExhausted, "", "The queue is full.")]
        }
    };
    let workers = [FakeWorker::start(full(count.clone())).await, FakeWorker::start(full(count.clone())).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    for tried in 1..=12 {
        let reply = gateway.post(CHAT, &hello(&json!({}))).await;
        assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(count.load(Ordering::Relaxed), tried);
    }
}

#[tokio::test]
async fn a_request_that_kills_its_workers_is_refused_after_the_second() {
    let deadly = |submit: &wire::Submit| match submit.prompt_token_ids == ids("poison") {
        true => vec![Act::Wait(Duration::from_millis(10)), Act::Die],
        false => say("Yes."),
    };
    let workers = [
        FakeWorker::start_as(Role::Unified, deadly).await,
        FakeWorker::start_as(Role::Unified, deadly).await,
        FakeWorker::start_as(Role::Unified, deadly).await,
    ];
    let gateway = in_front_of(&[&workers[0], &workers[1], &workers[2]]).await;
    for _ in 0..5 {
        let reply = gateway.post(COMPLETIONS, &json!({"prompt": "poison"})).await;
        assert_eq!(reply.status, StatusCode::UNPROCESSABLE_ENTITY, "{:?}", reply.body);
        assert!(reply.error()["message"].as_str().unwrap().contains("may be the cause"));
    }
    let num_submits = |worker: &FakeWorker| worker.num_submits();
    assert_eq!(workers.iter().map(num_submits).sum::<usize>(), 2);
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
}

#[tokio::test]
async fn a_request_whose_streams_break_is_not_called_the_cause() {
    let count = Arc::new(AtomicUsize::new(0));
    let breaking = |count: Arc<AtomicUsize>| {
        move |_: &wire::Submit| match count.fetch_add(1, Ordering::Relaxed) {
            0..3 => vec![Act::Close],
            _ => say("Yes."),
        }
    };
    let workers = [FakeWorker::start(breaking(count.clone())).await, FakeWorker::start(breaking(count)).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "Yes.");
    assert_eq!(workers.iter().map(FakeWorker::num_submits).sum::<usize>(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn suspects_are_tried_one_after_the_other_however_many_threads_there_are() {
    const TRIAL: Duration = Duration::from_millis(5);
    const NUM_SUSPECTS: usize = 60;
    let dead = FakeWorker::start_as(Role::Unified, |_| say("Yes.")).await;
    let gateway = Arc::new(in_front_of(&[&dead]).await);
    // A fifth of the requests may be tried again.
    for _ in 0..5 * NUM_SUSPECTS {
        gateway.ask(CHAT, &hello(&json!({}))).await;
    }
    dead.set_script(|_| vec![Act::Hang]);
    let asked: Vec<_> = (0..NUM_SUSPECTS)
        .map(|_| {
            let gateway = gateway.clone();
            tokio::spawn(async move { gateway.ask(CHAT, &hello(&json!({}))).await })
        })
        .collect();
    let begun = Arc::new(std::sync::Mutex::new(Vec::new()));
    let trying = |begun: Arc<std::sync::Mutex<Vec<std::time::Instant>>>| {
        move |_: &wire::Submit| {
            begun.lock().unwrap().push(std::time::Instant::now());
            [vec![Act::Wait(TRIAL)], say("Yes.")].concat()
        }
    };
    let heirs = [
        FakeWorker::start_as(Role::Unified, trying(begun.clone())).await,
        FakeWorker::start_as(Role::Unified, trying(begun.clone())).await,
    ];
    gateway.until("all run", |_| dead.num_running() == asked.len()).await;
    for heir in &heirs {
        let spec = baleen_gateway::worker::pool::WorkerSpec::at(
            heir.address.to_string(),
            baleen_gateway::worker::Role::Unified,
        );
        gateway.app.pool.add(spec).unwrap();
    }
    gateway.until("all are ready", |app| app.pool.ready().len() == 3).await;
    dead.kill();
    for answer in asked {
        assert_eq!(answer.await.unwrap()["choices"][0]["message"]["content"], "Yes.");
    }
    // A trial lasts until its first token, so none begins before that of the last one.
    let begun = begun.lock().unwrap();
    let gaps: Vec<Duration> = begun.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() == NUM_SUSPECTS - 1 && gaps.iter().all(|gap| *gap >= TRIAL), "{gaps:?}");
}

#[tokio::test]
async fn a_worker_that_fails_everything_is_set_aside() {
    let failing = |_: &wire::Submit| vec![Act::Fail(wire::ErrorCode::Internal, "", "Something broke.")];
    let workers = [FakeWorker::start(failing).await, FakeWorker::start(|_| say("Yes.")).await];
    let gateway = in_front_of(&[&workers[0], &workers[1]]).await;
    let mut failures = 0;
    for _ in 0..30 {
        let reply = gateway.post(CHAT, &hello(&json!({}))).await;
        failures += usize::from(reply.status == StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(failures, 5);
    // Alone it is asked all the same: somebody has to be.
    workers[1].kill();
    gateway.until("one is gone", |app| app.pool.ready().len() == 1).await;
    assert_eq!(gateway.post(CHAT, &hello(&json!({}))).await.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn a_worker_that_hangs_loses_its_requests_to_another() {
    let hanging = FakeWorker::start_as(Role::Unified, |_| vec![Act::Tokens(vec![ids(STORY)[0]]), Act::Hang]).await;
    let gateway = in_front_of(&[&hanging]).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let first: Value = events.next_json().await;
    let heir = storyteller().await;
    let spec =
        baleen_gateway::worker::pool::WorkerSpec::at(heir.address.to_string(), baleen_gateway::worker::Role::Unified);
    gateway.app.pool.add(spec).unwrap();
    let chunks: Vec<Value> = std::iter::once(first).chain(events.chunks().await).collect();
    assert_eq!(content(&chunks, 0), STORY);
    assert_eq!(heir.next_submit().await.resumed_token_ids, ids(STORY)[..1]);
}

#[tokio::test]
async fn an_operator_takes_workers_in_and_out() {
    let (old, new) = (FakeWorker::start_as(Role::Unified, |_| babble()).await, storyteller().await);
    let gateway = in_front_of(&[&old]).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    let spec = |worker: &FakeWorker| {
        baleen_gateway::worker::pool::WorkerSpec::at(worker.address.to_string(), baleen_gateway::worker::Role::Unified)
    };
    gateway.app.pool.add(spec(&new)).unwrap();
    assert!(gateway.app.pool.add(spec(&new)).is_err());
    gateway.until("the new one is ready", |app| app.pool.ready().len() == 2).await;
    assert!(gateway.app.pool.set_aside(&old.address.to_string(), true));
    gateway.until("the old one is set aside", |app| app.pool.ready().len() == 1).await;
    for _ in 0..2 {
        let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], STORY);
    }
    // What it has goes on there, until it is taken out.
    events.next().await.unwrap();
    assert!(gateway.app.pool.remove(&old.address.to_string()));
    assert!(!gateway.app.pool.remove(&old.address.to_string()));
    let rest = events.rest().await;
    assert_eq!(rest.last().map(String::as_str), Some("[DONE]"));
    assert!(!new.next_submit().await.prompt_token_ids.is_empty());
}

#[tokio::test]
async fn the_operators_verbs_list_add_drain_and_remove() {
    let (old, new) = (storyteller().await, storyteller().await);
    let gateway = in_front_of(&[&old]).await;
    let body = |worker: &FakeWorker| json!({"url": format!("grpc://{}", worker.address)});
    let reply = gateway.post("/workers", &body(&new)).await;
    assert_eq!((reply.status, &reply.json()["name"]), (StatusCode::CREATED, &json!(new.address.to_string())));
    assert_eq!(gateway.post("/workers", &body(&new)).await.status, StatusCode::CONFLICT);
    let decode = json!({"url": "127.0.0.1:1", "role": "decode"});
    assert_eq!(gateway.post("/workers", &decode).await.status, StatusCode::CONFLICT);
    gateway.until("the new one is ready", |app| app.pool.ready().len() == 2).await;
    gateway.ask("/workers/drain", &body(&old)).await;
    gateway.until("the old one is set aside", |app| app.pool.ready().len() == 1).await;
    let listed = gateway.get("/workers").await.json();
    let states: Vec<_> = listed["workers"].as_array().unwrap().iter().map(|worker| worker["state"].clone()).collect();
    assert_eq!(states, ["draining", "ready"]);
    gateway.ask("/workers/remove", &body(&old)).await;
    let unknown = gateway.post("/workers/remove", &body(&old)).await;
    assert_eq!((unknown.status, unknown.error()["param"].as_str()), (StatusCode::NOT_FOUND, Some("url")));
    assert_eq!(gateway.get("/workers").await.json()["workers"].as_array().unwrap().len(), 1);
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn a_file_of_workers_is_followed_when_it_changes() {
    let (old, new) = (storyteller().await, FakeWorker::start_as(Role::Unified, |_| say("New.")).await);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workers");
    let write = |text: String| std::fs::write(&path, text).unwrap();
    write(format!("unified {}\n", old.address));
    let mut config = config(Vec::new());
    config.workers_file = Some(path.clone());
    let gateway = Gateway::start_unready(config).await;
    gateway.until("the first is ready", |app| app.pool.ready().len() == 1).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    write(format!("unified {} # instead\n", new.address));
    let is_new = |name: &str| name == new.address.to_string();
    gateway
        .until("the second has its place", |app| {
            let ready = app.pool.ready();
            ready.len() == 1 && is_new(&ready[0].name)
        })
        .await;
    // What the first one has ends there, and then it is gone.
    assert_eq!(events.rest().await.last().map(String::as_str), Some("[DONE]"));
    assert_eq!(new.num_submits(), 0);
    gateway.until("the first is gone", |app| app.pool.slots().len() == 1).await;
    write("nonsense".into());
    let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "New.");
}
