//! What holds for every request before the model is asked: paths, methods, sizes, keys, permits, ids.

use baleen_gateway::config;
use http::{Method, StatusCode};
use serde_json::json;

use crate::fake_worker::{CONTEXT_LENGTH_TOKENS, FakeWorker};
use crate::gateway::{CHAT, COMPLETIONS, Gateway, babble, config as test_config, hello, prompt, say};

#[tokio::test]
async fn unknown_paths_methods_and_models_have_error_objects() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let missing = gateway.get("/v1/nothing").await;
    assert_eq!((missing.status, missing.error()["code"].as_str()), (StatusCode::NOT_FOUND, Some("unknown_url")));
    let wrong = gateway.get(CHAT).await;
    assert_eq!(wrong.status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(wrong.error()["message"].as_str().unwrap().contains("GET"));
    assert_eq!(wrong.headers["allow"], "POST");
    for path in [CHAT, COMPLETIONS] {
        let body = if path == CHAT { hello(&json!({"model": "gpt"})) } else { prompt(&json!({"model": "gpt"})) };
        let unknown = gateway.post(path, &body).await;
        assert_eq!((unknown.status, unknown.error()["param"].as_str()), (StatusCode::NOT_FOUND, Some("model")));
    }
    assert_eq!(gateway.get("/v1/models/gpt").await.error()["param"], "model");
}

#[tokio::test]
async fn bad_bodies_are_refused_and_give_their_permit_back() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let too_long = "word ".repeat(CONTEXT_LENGTH_TOKENS as usize * 2);
    let cases = [
        (CHAT, "{".to_owned(), 400),
        (CHAT, "[]".to_owned(), 400),
        (CHAT, hello(&json!({"temperature": -1})).to_string(), 400),
        (CHAT, json!({"messages": []}).to_string(), 400),
        (CHAT, json!({"messages": [{"role": "user", "content": too_long}]}).to_string(), 400),
        (COMPLETIONS, json!({"prompt": too_long}).to_string(), 400),
        (COMPLETIONS, prompt(&json!({"max_tokens": CONTEXT_LENGTH_TOKENS})).to_string(), 400),
        (COMPLETIONS, format!("{{\"prompt\": \"{}\"}}", "x".repeat(3 << 20)), 413),
    ];
    for (path, body, status) in cases {
        let shown: String = body.chars().take(60).collect();
        let reply = gateway.collect(gateway.request(Method::POST, path, body)).await;
        assert_eq!(reply.status.as_u16(), status, "{shown}: {:?}", reply.body);
        assert_eq!(reply.error()["type"], "invalid_request_error", "{shown}");
    }
    gateway.until_idle().await;
    assert_eq!(worker.num_running(), 0);
}

#[tokio::test]
async fn requests_beyond_the_permits_are_told_to_come_back() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start_with(&worker, |config| config.limits.max_concurrent_requests = 2).await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
        events.next().await.unwrap();
        streams.push(events);
    }
    let refused = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    let retry_after_s: u32 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after_s));
    assert_eq!(refused.error()["type"], "rate_limit_error");
    // The permit is held for the life of the stream, and no longer.
    streams.pop();
    gateway.until("a permit is back", |app| app.admission.active() < 2).await;
    worker.set_script(|_| say("Yes."));
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn a_key_guards_everything_but_probes_and_metrics() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway =
        Gateway::start_with(&worker, |config| config.api_key_digest = Some(config::digest("open sesame"))).await;
    for path in ["/livez", "/readyz", "/health", "/metrics"] {
        assert_eq!(gateway.get(path).await.status, StatusCode::OK, "{path}");
    }
    for path in ["/v1/models", "/v1/models/micro", "/version", "/v1/nothing", "//v1/models"] {
        let reply = gateway.get(path).await;
        assert_eq!((reply.status, reply.error()["code"].as_str()), (StatusCode::UNAUTHORIZED, Some("invalid_api_key")));
        assert_eq!(reply.headers["www-authenticate"], "Bearer");
    }
    for key in ["Bearer open", "Bearer open sesame!", "Basic open sesame", "Bearer", "open sesame"] {
        let mut request = gateway.request(Method::POST, CHAT, hello(&json!({})).to_string());
        request.headers_mut().insert("authorization", key.parse().unwrap());
        assert_eq!(gateway.collect(request).await.status, StatusCode::UNAUTHORIZED, "{key}");
    }
    let mut request = gateway.request(Method::POST, CHAT, hello(&json!({})).to_string());
    request.headers_mut().insert("authorization", "Bearer open sesame".parse().unwrap());
    assert_eq!(gateway.collect(request).await.status, StatusCode::OK);
    for (key, status) in [("open", StatusCode::UNAUTHORIZED), ("open sesame", StatusCode::OK)] {
        let mut request = gateway.request(Method::POST, CHAT, hello(&json!({})).to_string());
        request.headers_mut().insert("x-api-key", key.parse().unwrap());
        assert_eq!(gateway.collect(request).await.status, status, "{key}");
    }
}

#[tokio::test]
async fn a_request_id_is_echoed_or_made() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let ask = async |id: &str| {
        let mut request = gateway.request(Method::GET, "/livez", "");
        request.headers_mut().insert("x-request-id", id.parse().unwrap());
        gateway.collect(request).await.headers["x-request-id"].to_str().unwrap().to_owned()
    };
    assert_eq!(ask("abc-123").await, "abc-123");
    let long = "x".repeat(65);
    assert_ne!(ask(&long).await, long);
    assert_ne!(ask("a b").await, "a b");
    let made = [gateway.get("/livez").await, gateway.get("/nothing").await];
    assert_ne!(made[0].headers["x-request-id"], made[1].headers["x-request-id"]);
}

#[tokio::test]
async fn without_a_worker_requests_are_told_to_come_back() {
    let gateway = Gateway::start_unready(test_config(vec!["127.0.0.1:9".into()])).await;
    for path in ["/readyz", "/health"] {
        assert_eq!(gateway.get(path).await.status, StatusCode::SERVICE_UNAVAILABLE);
    }
    let refused = gateway.post(CHAT, &hello(&json!({}))).await;
    assert_eq!(
        (refused.status, refused.error()["code"].as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, Some("not_ready"))
    );
    assert!(refused.error()["message"].as_str().unwrap().contains("127.0.0.1:9"));
    assert_eq!(gateway.get("/v1/models").await.json()["data"], json!([]));
}

#[tokio::test]
async fn the_operators_routes_answer() {
    let worker = FakeWorker::start(|_| babble()).await;
    let gateway = Gateway::start(&worker).await;
    let version = gateway.get("/version").await.json();
    assert_eq!((version["version"].as_str(), version["protocol_version"].as_u64()), (Some("0.1.0"), Some(1)));
    let card = gateway.get("/v1/models/micro").await.json();
    assert_eq!((card["object"].as_str(), card["max_model_len"].as_u64()), (Some("model"), Some(4096)));
    assert_eq!(gateway.get("/v1/models").await.json()["data"][0], card);
    assert_eq!(gateway.ask("/flush_cache", &json!({})).await["freed_pages"], 5);
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    let busy = gateway.post("/flush_cache", &json!({})).await;
    assert_eq!(busy.status, StatusCode::CONFLICT);
    assert_eq!(busy.error()["message"], "requests are running");
    let metrics = gateway.get("/metrics").await;
    assert_eq!(metrics.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    assert!(gateway.metric("baleen_active_requests").await == 1.0);
    assert!(gateway.metric("baleen_time_to_first_token_seconds_count").await == 1.0);
}
