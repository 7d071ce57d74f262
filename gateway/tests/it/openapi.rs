//! `/openapi.json` describes what is served, all of it and nothing else; `/docs` shows it.

use std::collections::{BTreeMap, BTreeSet};

use baleen_gateway::http::paths;
use http::{Method, StatusCode};
use serde_json::Value;

use crate::fake_worker::FakeWorker;
use crate::gateway::{Gateway, say};

#[tokio::test]
async fn every_route_is_described_with_its_methods_and_no_other() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let document = gateway.get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let mut described = BTreeMap::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let methods: BTreeSet<String> =
            operations.as_object().unwrap().keys().map(|name| name.to_uppercase()).collect();
        described.insert(path.clone(), methods);
    }
    let mut served = BTreeMap::new();
    for path in paths() {
        let path = path.replace("{*", "{");
        let reply = gateway.collect(gateway.request(Method::PATCH, &path.replace(['{', '}'], ""), "")).await;
        assert_eq!(reply.status, StatusCode::METHOD_NOT_ALLOWED, "{path}");
        let allowed = reply.headers["allow"].to_str().unwrap().split(',').map(str::trim);
        served.insert(path, allowed.filter(|method| *method != "HEAD").map(str::to_owned).collect::<BTreeSet<_>>());
    }
    assert_eq!(described, served);
}

#[tokio::test]
async fn the_page_needs_nothing_from_elsewhere() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let page = gateway.get("/docs").await;
    assert_eq!(
        (page.status, page.headers["content-type"].to_str().unwrap()),
        (StatusCode::OK, "text/html; charset=utf-8")
    );
    assert!(page.headers["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    let text = std::str::from_utf8(&page.body).unwrap();
    assert!(text.contains("openapi.json"));
    for foreign in ["src=\"", "href=\"http", "url(http", "@import", "//cdn"] {
        assert!(!text.contains(foreign), "{foreign}");
    }
}

#[tokio::test]
async fn the_errors_that_are_described_are_the_errors_that_come() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let gateway = Gateway::start(&worker).await;
    let document = gateway.get("/openapi.json").await.json();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let Some(operation) = operations.get("post") else { continue };
        let reply = gateway.collect(gateway.request(Method::POST, path, "[")).await;
        let described = &operation["responses"][reply.status.as_str()];
        assert!(described.is_object(), "{path} answers {} to a broken body", reply.status);
        if reply.status.is_success() {
            continue;
        }
        let schema = described["content"]["application/json"]["schema"]["$ref"].as_str().unwrap();
        let has_type = reply.json().get("type") == Some(&Value::from("error"));
        assert_eq!(schema.ends_with("/MessageError"), has_type, "{path}");
    }
}
