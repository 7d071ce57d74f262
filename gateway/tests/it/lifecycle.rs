//! Requests that do not simply finish: clients that leave or dawdle, streams that break, workers that come back, and
//! the end of the gateway itself.

use std::time::Duration;

use baleen_gateway::worker::wire;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::fake_worker::{Act, FakeWorker, Seen};
use crate::gateway::{CHAT, COMPLETIONS, Gateway, PATIENCE, babble, content, finish_reasons, hello, ids, prompt, say};

/// A stream that ended without `[DONE]`, its last event an error object.
fn assert_ends_in_error(events: &[String]) -> Value {
    assert!(!events.iter().any(|event| event == "[DONE]"), "{events:?}");
    let (last, before) = events.split_last().expect("an event");
    let last: Value = serde_json::from_str(last).unwrap();
    assert!(last["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{last}");
    assert!(before.iter().all(|event| !event.contains("\"error\"")), "{before:?}");
    last["error"].clone()
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_aborts_every_choice() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true, "n": 3}))).await;
    events.next().await.unwrap();
    assert_eq!(gateway.app.admission.active(), 1);
    let mut keys = [worker.next_submit().await.key, worker.next_submit().await.key, worker.next_submit().await.key];
    drop(events);
    let mut aborted = [worker.next_abort().await, worker.next_abort().await, worker.next_abort().await];
    keys.sort_unstable();
    aborted.sort_unstable();
    assert_eq!(keys, aborted);
    gateway.until_idle().await;
    assert!(gateway.metric("baleen_requests_total").await >= 1.0);
}

#[tokio::test]
async fn a_client_that_leaves_before_its_answer_aborts_it() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let request = gateway.request(Method::POST, COMPLETIONS, prompt(&json!({})).to_string());
    let answer = gateway.send(request);
    tokio::select! {
        _ = answer => panic!("the script does not end"),
        submit = worker.next_submit() => {
            // Leaving the block drops the request, and with it the connection.
            assert_eq!(submit.key, 1);
        }
    }
    assert_eq!(worker.next_abort().await, 1);
    gateway.until_idle().await;
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_and_its_neighbour_is_not() {
    let flood = ids(" sea")[0];
    let worker = FakeWorker::start(move |submit| {
        if submit.prompt_token_ids == ids("neighbour") {
            return say("All is well.");
        }
        // Far more than the buffers of gateway and sockets hold: 6 MB of text alone.
        let mut acts: Vec<Act> = (0..400).map(|_| Act::Tokens(vec![flood; 4096])).collect();
        acts.push(Act::Hang);
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let body = prompt(&json!({"stream": true})).to_string();
    let mut socket = TcpStream::connect(gateway.address).await.unwrap();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    let key = worker.next_submit().await.key;
    assert_eq!(worker.next_abort().await, key);
    let answer = gateway.ask(COMPLETIONS, &json!({"prompt": "neighbour"})).await;
    assert_eq!(answer["choices"][0]["text"], "All is well.");
    // Once it reads again, the client learns that it was cut.
    let mut all = Vec::new();
    tokio::time::timeout(PATIENCE, socket.read_to_end(&mut all)).await.expect("the connection ends").unwrap();
    let text = String::from_utf8_lossy(&all);
    assert!(text.contains("did not read its answer fast enough"), "{}", &text[text.len().saturating_sub(400)..]);
    assert!(!text.contains("[DONE]"));
    gateway.until_idle().await;
}

#[tokio::test]
async fn a_stream_that_breaks_ends_in_an_error_event() {
    for act in [Act::Close, Act::Gap, Act::Malformed] {
        let breaking = act.clone();
        let worker = FakeWorker::start(move |_| {
            vec![
                Act::Tokens(ids("Once")),
                Act::Wait(Duration::from_millis(100)),
                breaking.clone(),
                Act::Tokens(ids("x")),
            ]
        })
        .await;
        let gateway = Gateway::start(&worker).await;
        let events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await.rest().await;
        let error = assert_ends_in_error(&events);
        assert_eq!(error["type"], "server_error", "{act:?}");
        gateway.until_idle().await;
        // The stream is opened anew, and the next request is served on it.
        gateway.until("the worker is ready again", |app| !app.pool.ready().is_empty()).await;
        worker.set_script(|_| say("Back."));
        let answer = gateway.ask(CHAT, &hello(&json!({}))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "Back.", "{act:?}");
    }
}

#[tokio::test]
async fn an_answer_that_is_collected_fails_with_a_status_when_the_worker_dies() {
    let worker = FakeWorker::start(|_| vec![Act::Tokens(ids("Once")), Act::Hang]).await;
    let gateway = Gateway::start(&worker).await;
    let body = hello(&json!({}));
    let asking = gateway.post(CHAT, &body);
    let killing = async {
        worker.next_submit().await;
        worker.kill();
    };
    let (reply, ()) = tokio::join!(asking, killing);
    assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(reply.headers.contains_key("retry-after"));
    assert!(reply.error()["message"].as_str().unwrap().contains("lost"));
    let refused = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(gateway.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(gateway.get("/livez").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_worker_that_restarts_on_its_port_is_used_again() {
    let worker = FakeWorker::start(|_| say("First.")).await;
    let address = worker.address;
    let gateway = Gateway::start(&worker).await;
    assert_eq!(gateway.ask(CHAT, &hello(&json!({}))).await["choices"][0]["message"]["content"], "First.");
    worker.kill();
    gateway.until("the loss is noticed", |app| app.pool.ready().is_empty()).await;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let _again = FakeWorker::start_on(listener, |_| say("Second.")).await;
    gateway.until("the worker is found again", |app| !app.pool.ready().is_empty()).await;
    assert_eq!(gateway.ask(CHAT, &hello(&json!({}))).await["choices"][0]["message"]["content"], "Second.");
}

#[tokio::test]
async fn an_error_of_the_worker_ends_one_request_with_its_status() {
    let cases = [
        (wire::ErrorCode::InvalidArgument, "top_k", 400),
        (wire::ErrorCode::Unimplemented, "min_tokens", 501),
        (wire::ErrorCode::Internal, "", 500),
        (wire::ErrorCode::Unavailable, "", 503),
        (wire::ErrorCode::ResourceExhausted, "", 429),
        (wire::ErrorCode::DeadlineExceeded, "", 504),
    ];
    for (code, field, status) in cases {
        let worker = FakeWorker::start(move |_| vec![Act::Fail(code, field, "The worker says no.")]).await;
        let gateway = Gateway::start(&worker).await;
        for stream in [false, true] {
            let reply = gateway.post(CHAT, &hello(&json!({"stream": stream}))).await;
            assert_eq!(reply.status.as_u16(), status, "{:?}", reply.body);
            let error = reply.error();
            assert_eq!(error["message"], "The worker says no.");
            assert_eq!(error["param"].as_str().unwrap_or(""), field);
        }
    }
}

#[tokio::test]
async fn an_error_after_the_first_token_is_an_event() {
    let worker = FakeWorker::start(|_| {
        let error = Act::Fail(wire::ErrorCode::Internal, "", "The rank died.");
        vec![Act::Tokens(ids("Once")), Act::Wait(Duration::from_millis(50)), error]
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let events = gateway.stream(COMPLETIONS, &prompt(&json!({"stream": true}))).await.rest().await;
    assert_eq!(assert_ends_in_error(&events)["message"], "The rank died.");
}

#[tokio::test]
async fn draining_finishes_streams_and_turns_new_requests_away() {
    let worker = FakeWorker::start(|_| {
        let mut acts = vec![Act::Tokens(ids("Long")), Act::Wait(Duration::from_millis(400))];
        acts.extend(say(" story."));
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let first = events.next_json().await;
    let rest = async {
        gateway.until("draining has begun", |app| app.refusal().is_some()).await;
        let refused = gateway.post(CHAT, &hello(&json!({}))).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.error()["code"], "draining");
        assert_eq!(gateway.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
        events.chunks().await
    };
    let ((), rest) = tokio::join!(gateway.drain(), rest);
    let chunks: Vec<Value> = std::iter::once(first).chain(rest).collect();
    assert_eq!(content(&chunks, 0), "Long story.");
    assert_eq!(finish_reasons(&chunks), ["stop"]);
    let address = gateway.address;
    gateway.stop().await;
    assert!(TcpStream::connect(address).await.is_err());
    worker.next_matching(|seen| *seen == Seen::StreamEnded).await;
}

#[tokio::test]
async fn draining_gives_up_at_its_time_limit() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, |config| config.drain_timeout = Duration::from_millis(200)).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    tokio::time::timeout(PATIENCE, gateway.drain()).await.expect("draining ends");
    assert_eq!(gateway.app.admission.active(), 1);
}

#[tokio::test]
async fn a_draining_worker_gets_no_new_requests_and_finishes_its_own() {
    let worker = FakeWorker::start(|_| {
        let mut acts = vec![Act::Tokens(ids("Long")), Act::Wait(Duration::from_millis(300))];
        acts.extend(say(" story."));
        acts
    })
    .await;
    let gateway = Gateway::start(&worker).await;
    let events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    worker.broadcast(&wire::WorkerFrame { draining: true, ..Default::default() });
    gateway.until("the worker is set aside", |app| app.pool.ready().is_empty()).await;
    assert_eq!(gateway.post(CHAT, &hello(&json!({}))).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(content(&events.chunks().await, 0), "Long story.");
}

#[tokio::test]
async fn an_operator_can_abort_one_request_or_all() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let mut first = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let mut second = gateway.stream(COMPLETIONS, &prompt(&json!({"stream": true}))).await;
    let id = first.next_json().await["id"].clone();
    second.next().await.unwrap();
    assert_eq!(gateway.ask("/abort_request", &json!({"rid": "chatcmpl-unknown"})).await["aborted"], 0);
    assert_eq!(gateway.ask("/abort_request", &json!({"rid": id})).await["aborted"], 1);
    assert_eq!(finish_reasons(&first.chunks().await), ["abort"]);
    assert_eq!(worker.next_abort().await, 1);
    second.next().await.unwrap();
    assert_eq!(gateway.ask("/abort_request", &json!({"abort_all": true})).await["aborted"], 1);
    assert_eq!(finish_reasons(&second.chunks().await), ["abort"]);
    assert_eq!(worker.next_abort().await, 2);
    assert_eq!(gateway.post("/abort_request", &json!({})).await.status, StatusCode::BAD_REQUEST);
    gateway.until_idle().await;
}

#[tokio::test]
async fn a_stream_that_waits_says_that_it_lives() {
    let worker = FakeWorker::start(|_| {
        let mut acts = vec![Act::Tokens(ids("Long")), Act::Wait(Duration::from_millis(500))];
        acts.extend(say(" story."));
        acts
    })
    .await;
    let gateway = Gateway::start_with(&worker, |config| config.keep_alive_interval = Duration::from_millis(50)).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    let mut chunks = Vec::new();
    while content(&chunks, 0) != "Long story." {
        chunks.push(events.next_json().await);
    }
    assert!(events.comments >= 1);
}
