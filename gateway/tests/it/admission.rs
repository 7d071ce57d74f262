//! Who is let in, and when: keys with limits of their own, the line before the permits, and deadlines.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use baleen_gateway::config::{Config, KeyFile, digest};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::fake_worker::{Act, FakeWorker};
use crate::gateway::{CHAT, COMPLETIONS, Gateway, PATIENCE, Reply, babble, hello, prompt, say, with};

/// One entry of a key file.
fn entry(name: &str, key: &str, more: &str) -> String {
    let sha256 = digest(key).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    });
    format!("[[key]]\nname = '{name}'\nsha256 = '{sha256}'\n{more}\n")
}

fn write(path: &Path, entries: &[String]) {
    // As tools that replace a file do it: never half written.
    let beside = path.with_extension("new");
    std::fs::write(&beside, entries.concat()).unwrap();
    std::fs::rename(beside, path).unwrap();
}

fn key_file(entries: &[String]) -> (tempfile::TempDir, KeyFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    write(&path, entries);
    let file = KeyFile::read(&path).unwrap();
    (folder, file)
}

async fn post_as(gateway: &Gateway, key: &str, path: &str, body: &Value) -> Reply {
    let mut request = gateway.request(Method::POST, path, body.to_string());
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    gateway.collect(request).await
}

fn code(reply: &Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.error()["code"].as_str().unwrap_or_default().to_owned())
}

fn refused(status: StatusCode, code: &str) -> (u16, String) {
    (status.as_u16(), code.to_owned())
}

fn retry_after(reply: &Reply) -> u64 {
    reply.headers["retry-after"].to_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn keys_open_what_their_entry_says() {
    let (_folder, file) = key_file(&[
        entry("alice", "a", ""),
        entry("ops", "o", "operator = true"),
        entry("former", "f", "enabled = false"),
    ]);
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start_with(&worker, |config| {
        config.api_key_file = Some(file);
        config.api_key_digest = Some(digest("single"));
    })
    .await;
    for (key, path, expected) in [
        ("a", CHAT, 200),
        ("o", CHAT, 200),
        ("single", CHAT, 200),
        ("f", CHAT, 403),
        ("x", CHAT, 401),
        ("a", "/flush_cache", 403),
        ("o", "/flush_cache", 200),
        ("single", "/flush_cache", 200),
        ("x", "/flush_cache", 401),
    ] {
        let reply = post_as(&gateway, key, path, &hello(&json!({}))).await;
        assert_eq!(reply.status.as_u16(), expected, "{key} {path}: {:?}", reply.body);
        if expected == 403 {
            assert_eq!(code(&reply), refused(StatusCode::FORBIDDEN, "permission_denied"));
            assert_eq!(reply.error()["type"], "permission_error");
        }
    }
}

#[tokio::test]
async fn a_keys_concurrency_is_its_own() {
    let (_folder, file) = key_file(&[entry("alice", "a", "max_concurrent_requests = 1"), entry("bob", "b", "")]);
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, |config| config.api_key_file = Some(file)).await;
    let mut stream = gateway.request(Method::POST, CHAT, hello(&json!({"stream": true})).to_string());
    stream.headers_mut().insert("authorization", "Bearer a".parse().unwrap());
    let stream = gateway.send(stream).await;
    worker.set_script(|_| say("Yes."));
    let second = post_as(&gateway, "a", CHAT, &hello(&json!({}))).await;
    assert_eq!(code(&second), refused(StatusCode::TOO_MANY_REQUESTS, "concurrency_limit_exceeded"));
    assert_eq!(retry_after(&second), 1);
    assert_eq!(post_as(&gateway, "b", CHAT, &hello(&json!({}))).await.status, StatusCode::OK);
    drop(stream);
    gateway.until_idle().await;
    assert_eq!(post_as(&gateway, "a", CHAT, &hello(&json!({}))).await.status, StatusCode::OK);
    assert!(gateway.metric("baleen_key_refusals_total").await == 1.0);
}

#[tokio::test]
async fn a_key_that_has_spent_its_tokens_waits() {
    let (_folder, file) = key_file(&[entry("alice", "a", "tokens_per_minute = 6"), entry("bob", "b", "")]);
    // "hello" is a prompt of at least one token, and the answer has seven.
    let worker = FakeWorker::start(|_| {
        let mut acts = vec![Act::Tokens(vec![30; 6])];
        acts.extend(say(""));
        acts
    })
    .await;
    let gateway = Gateway::start_with(&worker, |config| config.api_key_file = Some(file)).await;
    let body = prompt(&json!({}));
    let first = post_as(&gateway, "a", COMPLETIONS, &body).await;
    assert_eq!(first.status, StatusCode::OK);
    let spent = first.json()["usage"]["total_tokens"].as_u64().unwrap();
    assert!(spent > 6);
    let second = post_as(&gateway, "a", COMPLETIONS, &body).await;
    assert_eq!(code(&second), refused(StatusCode::TOO_MANY_REQUESTS, "token_rate_exceeded"));
    // A token takes ten seconds; all but the minute's own must be paid back.
    let debt_s = (spent - 6) * 10;
    assert!((debt_s - 9..=debt_s + 1).contains(&retry_after(&second)), "{} of {debt_s}", retry_after(&second));
    assert_eq!(post_as(&gateway, "b", COMPLETIONS, &body).await.status, StatusCode::OK);
    let text = String::from_utf8(gateway.get("/metrics").await.body.to_vec()).unwrap();
    for line in [
        "baleen_key_requests_total{key=\"alice\",outcome=\"completed\"} 1",
        "baleen_key_requests_total{key=\"alice\",outcome=\"rejected\"} 1",
        "baleen_key_refusals_total{key=\"alice\",limit=\"tokens\"} 1",
        "baleen_key_output_tokens_total{key=\"bob\"} 7",
        "baleen_key_present_requests{key=\"bob\"} 0",
    ] {
        assert!(text.contains(line), "{line} is missing in {text}");
    }
    assert!(!text.contains("Bearer"));
}

#[tokio::test]
async fn a_stream_pays_for_what_it_got_before_its_client_left() {
    let (_folder, file) = key_file(&[entry("alice", "a", "tokens_per_minute = 100")]);
    let worker = FakeWorker::start(|_| vec![Act::Tokens(vec![30; 500]), Act::Hang]).await;
    let gateway = Gateway::start_with(&worker, |config| config.api_key_file = Some(file)).await;
    let mut request = gateway.request(Method::POST, COMPLETIONS, prompt(&json!({"stream": true})).to_string());
    request.headers_mut().insert("authorization", "Bearer a".parse().unwrap());
    drop(gateway.send(request).await);
    gateway.until_idle().await;
    let next = post_as(&gateway, "a", COMPLETIONS, &prompt(&json!({}))).await;
    assert_eq!(code(&next), refused(StatusCode::TOO_MANY_REQUESTS, "token_rate_exceeded"));
}

#[tokio::test]
async fn a_changed_file_is_read_again_and_a_broken_one_is_not_followed() {
    let (_folder, file) = key_file(&[entry("alice", "old", "")]);
    let path = file.path.clone();
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start_with(&worker, |config| config.api_key_file = Some(file)).await;
    let status = async |key| post_as(&gateway, key, CHAT, &hello(&json!({}))).await.status.as_u16();
    let until = async |key, expected| {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while status(key).await != expected {
            assert!(tokio::time::Instant::now() < deadline, "{key} is still not answered with {expected}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!((status("old").await, status("new").await), (200, 401));
    write(&path, &[entry("alice", "new", "")]);
    until("new", 200).await;
    assert_eq!(status("old").await, 401);
    // Two changes later the broken one in between has certainly been looked at.
    write(&path, &["[[key]]\nname = 3\n".to_owned()]);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(status("new").await, 200);
    write(&path, &[entry("alice", "new", ""), entry("bob", "newer", "")]);
    until("newer", 200).await;
    assert_eq!(status("new").await, 200);
}

fn one_place(config: &mut Config) {
    config.limits.max_concurrent_requests = 1;
    config.limits.queue_size = 1;
}

#[tokio::test]
async fn one_in_line_gets_the_next_place_and_one_too_many_is_sent_away() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, one_place).await;
    let mut stream = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    stream.next().await.unwrap();
    worker.set_script(|_| say("Yes."));
    let body = hello(&json!({}));
    let waiting = gateway.post(CHAT, &body);
    let sent_away = async {
        gateway.until("one stands in line", |app| app.admission.waiting() == 1).await;
        assert!(gateway.metric("baleen_queued_requests").await == 1.0);
        let third = gateway.post(CHAT, &body).await;
        drop(stream);
        third
    };
    let (second, third) = tokio::join!(waiting, sent_away);
    assert_eq!(code(&third), refused(StatusCode::TOO_MANY_REQUESTS, "too_many_requests"));
    assert!((1..=60).contains(&retry_after(&third)));
    assert_eq!(second.status, StatusCode::OK);
    assert!(gateway.metric("baleen_queue_time_seconds_count").await == 1.0);
    gateway.until_idle().await;
}

#[tokio::test]
async fn standing_in_line_has_an_end() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, |config| {
        one_place(config);
        config.limits.queue_timeout = Duration::from_millis(50);
    })
    .await;
    let mut stream = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    stream.next().await.unwrap();
    let waited = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(code(&waited), refused(StatusCode::TOO_MANY_REQUESTS, "queue_timeout"));
    assert_eq!(gateway.app.admission.waiting(), 0);
}

#[tokio::test]
async fn a_deadline_is_also_the_end_of_standing_in_line() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, one_place).await;
    let mut stream = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    stream.next().await.unwrap();
    let mut request = gateway.request(Method::POST, CHAT, hello(&json!({})).to_string());
    request.headers_mut().insert("x-request-timeout-ms", "10".parse().unwrap());
    assert_eq!(code(&gateway.collect(request).await), refused(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"));
    assert_eq!(gateway.app.admission.waiting(), 0);
}

#[tokio::test]
async fn whoever_leaves_the_line_frees_its_place() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, one_place).await;
    let mut stream = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    stream.next().await.unwrap();
    let body = hello(&json!({}));
    {
        let leaving = gateway.post(CHAT, &body);
        tokio::select! {
            _ = leaving => panic!("there is no place"),
            () = gateway.until("one stands in line", |app| app.admission.waiting() == 1) => {}
        }
    }
    gateway.until("nobody stands in line", |app| app.admission.waiting() == 0).await;
    drop(stream);
    gateway.until_idle().await;
}

#[tokio::test]
async fn a_deadline_ends_an_answer_wherever_it_is_asked_for() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let expected = refused(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded");
    let asked = gateway.post(CHAT, &hello(&json!({"deadline_ms": 300}))).await;
    assert_eq!(code(&asked), expected);
    assert!((1..=300).contains(&worker.next_submit().await.deadline_ms.unwrap()));
    worker.next_abort().await;
    let mut request = gateway.request(Method::POST, CHAT, hello(&json!({"deadline_ms": 60_000})).to_string());
    request.headers_mut().insert("x-request-timeout-ms", "300".parse().unwrap());
    assert_eq!(code(&gateway.collect(request).await), expected);
    worker.next_abort().await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"deadline_ms": 300, "stream": true}))).await.rest().await;
    let last: Value = serde_json::from_str(&events.pop().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded");
    assert!(!events.iter().any(|event| event == "[DONE]"));
    worker.next_abort().await;
    gateway.until_idle().await;
    for wrong in ["0", "-1", "soon", "1.5", ""] {
        let mut request = gateway.request(Method::POST, CHAT, hello(&json!({})).to_string());
        request.headers_mut().insert("x-request-timeout-ms", wrong.parse().unwrap());
        let reply = gateway.collect(request).await;
        assert_eq!((reply.status.as_u16(), reply.error()["param"].as_str()), (400, Some("x-request-timeout-ms")));
    }
}

#[tokio::test]
async fn the_servers_own_limit_holds_for_requests_that_ask_for_more_or_nothing() {
    let worker = FakeWorker::start(|_| babble()).await;
    let limit = Duration::from_millis(300);
    let gateway = Gateway::start_with(&worker, |config| config.limits.max_request_time = limit).await;
    for more in [json!({}), json!({"deadline_ms": 60_000})] {
        let reply = gateway.post(COMPLETIONS, &with(prompt(&json!({})), &more)).await;
        assert_eq!(code(&reply), refused(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"));
        assert!(worker.next_submit().await.deadline_ms.unwrap() <= 300);
    }
}
