//! Workers that are the endpoints of a Service, told by an API server of the tests' own.

use std::collections::BTreeSet;
use std::process::Stdio;

use baleen_gateway::config::Config;
use baleen_gateway::config::services::{Service, ServicePlace, ServicePort};
use baleen_gateway::worker::Role;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::discovery::{names, slots};
use crate::fake_worker::FakeWorker;
use crate::gateway::{CHAT, Gateway, PATIENCE, babble, config, hello, say};

mod api_server;

use api_server::{ApiServer, SERVICE};

/// A gateway whose only workers are those of the Service.
fn config_of(server: &ApiServer) -> Config {
    let place = ServicePlace { namespace: "llm".into(), name: SERVICE.into(), port: ServicePort::Only };
    let service = Service { place, role: Role::Unified, transfer_port: None };
    Config { services: vec![service], kubeconfig: Some(server.kubeconfig()), ..config(Vec::new()) }
}

async fn gateway_of(server: &ApiServer) -> Gateway {
    Gateway::start_unready(config_of(server)).await
}

/// It has this worker already.
async fn gateway_with(server: &ApiServer, worker: &FakeWorker) -> Gateway {
    put(server, "a", worker, &ready());
    let gateway = gateway_of(server).await;
    until_ready(&gateway, &[worker]).await;
    gateway
}

/// Each worker has its own port on one host, so each has a slice of its own.
fn put(server: &ApiServer, slice: &str, worker: &FakeWorker, conditions: &Value) {
    let ports = json!([{"name": "grpc", "port": worker.address.port(), "protocol": "TCP"}]);
    let endpoints = json!([{"addresses": ["127.0.0.1"], "conditions": conditions}]);
    server.cluster().put_with_ports(slice, &ports, &endpoints);
}

fn ready() -> Value {
    json!({"ready": true, "serving": true, "terminating": false})
}

async fn worker() -> FakeWorker {
    FakeWorker::start(|_| say("Yes.")).await
}

async fn until_ready(gateway: &Gateway, workers: &[&FakeWorker]) {
    let expected = names(workers);
    let is_so = |app: &baleen_gateway::app::App| {
        let ready = app.pool.ready();
        ready.iter().map(|worker| worker.name.to_string()).collect::<BTreeSet<_>>() == expected
    };
    gateway.until("exactly these workers are ready", is_so).await;
}

async fn until_watched(gateway: &Gateway, server: &ApiServer) {
    gateway.until("the slices are watched", |_| server.cluster().num_watchers() > 0).await;
}

#[tokio::test]
async fn endpoints_join_and_leave_with_one_list_and_one_watch() {
    let (first, second) = (worker().await, worker().await);
    let server = ApiServer::start().await;
    let gateway = gateway_of(&server).await;
    until_watched(&gateway, &server).await;
    put(&server, "a", &first, &ready());
    until_ready(&gateway, &[&first]).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
    put(&server, "b", &second, &ready());
    until_ready(&gateway, &[&first, &second]).await;
    server.cluster().remove("a");
    gateway.until("the first has left", |_| slots(&gateway) == names(&[&second])).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
    // The whole Service is scaled to nothing.
    server.cluster().put("b", &json!([]));
    gateway.until("the second has left", |_| slots(&gateway).is_empty()).await;
    let cluster = server.cluster();
    assert_eq!((cluster.num_lists, cluster.watched_from.len()), (1, 1));
}

#[tokio::test]
async fn an_endpoint_joins_when_it_is_ready_and_stays_while_none_is() {
    let (first, second) = (worker().await, worker().await);
    let server = ApiServer::start().await;
    put(&server, "a", &first, &ready());
    put(&server, "b", &second, &json!({"ready": false}));
    let gateway = gateway_of(&server).await;
    until_ready(&gateway, &[&first]).await;
    assert_eq!(slots(&gateway), names(&[&first]));
    put(&server, "b", &second, &ready());
    until_ready(&gateway, &[&first, &second]).await;
    put(&server, "a", &first, &json!({"ready": false}));
    until_ready(&gateway, &[&second]).await;
    put(&server, "b", &second, &json!({"ready": false}));
    server.cluster().bookmark();
    put(&server, "c", &first, &json!({"ready": false, "terminating": true}));
    gateway.until("all is told", |_| server.cluster().num_watchers() == 1).await;
    until_ready(&gateway, &[&second]).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
}

#[tokio::test]
async fn an_endpoint_that_terminates_finishes_what_it_computes() {
    let (first, second) = (FakeWorker::start(|_| babble()).await, worker().await);
    let server = ApiServer::start().await;
    put(&server, "a", &first, &ready());
    let gateway = gateway_of(&server).await;
    until_ready(&gateway, &[&first]).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    put(&server, "b", &second, &ready());
    put(&server, "a", &first, &json!({"ready": false, "serving": true, "terminating": true}));
    until_ready(&gateway, &[&second]).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
    // Its pod is gone from the slices; its stream is not.
    server.cluster().remove("a");
    gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(slots(&gateway), names(&[&first, &second]));
    events.next().await.unwrap();
    drop(events);
    gateway.until("it is given up", |_| slots(&gateway) == names(&[&second])).await;
}

#[tokio::test]
async fn an_endpoint_that_moves_to_another_slice_keeps_its_stream() {
    let worker = worker().await;
    let server = ApiServer::start().await;
    put(&server, "a", &worker, &ready());
    let gateway = gateway_of(&server).await;
    until_ready(&gateway, &[&worker]).await;
    let connection = gateway.app.pool.ready()[0].connection;
    put(&server, "b", &worker, &ready());
    server.cluster().remove("a");
    // A third one tells when the two events have been heard.
    let other = FakeWorker::start(|_| say("Yes.")).await;
    put(&server, "c", &other, &ready());
    until_ready(&gateway, &[&worker, &other]).await;
    let kept = gateway.app.pool.ready();
    let kept = kept.iter().find(|ready| *ready.name == worker.address.to_string()).unwrap();
    assert_eq!(kept.connection, connection);
}

#[tokio::test]
async fn a_watch_that_ends_or_breaks_goes_on_where_it_was() {
    let (server, first, second) = (ApiServer::start().await, worker().await, worker().await);
    let gateway = gateway_with(&server, &first).await;
    until_watched(&gateway, &server).await;
    server.cluster().bookmark();
    server.cluster().end_watches();
    until_watched(&gateway, &server).await;
    server.cluster().cut_watches();
    // While nobody listens.
    put(&server, "b", &second, &ready());
    until_ready(&gateway, &[&first, &second]).await;
    let cluster = server.cluster();
    assert_eq!((cluster.num_lists, cluster.watched_from.as_slice()), (1, [2, 12, 12].as_slice()));
}

#[tokio::test]
async fn a_history_that_is_gone_costs_a_new_list() {
    for tells_gone_by_status in [false, true] {
        let (first, second) = (worker().await, worker().await);
        let server = ApiServer::start().await;
        server.cluster().tells_gone_by_status = tells_gone_by_status;
        put(&server, "a", &first, &ready());
        let gateway = gateway_of(&server).await;
        until_ready(&gateway, &[&first]).await;
        until_watched(&gateway, &server).await;
        server.cluster().end_watches();
        put(&server, "b", &second, &ready());
        server.cluster().remove("a");
        server.cluster().forget_history();
        until_ready(&gateway, &[&second]).await;
        assert_eq!(server.cluster().num_lists, 2);
        until_watched(&gateway, &server).await;
    }
}

#[tokio::test]
async fn an_event_that_cannot_be_read_costs_a_new_list() {
    let (server, first, second) = (ApiServer::start().await, worker().await, worker().await);
    let gateway = gateway_with(&server, &first).await;
    for (number, garbage) in (1..).zip([
        "ha ha\n".to_owned(),
        format!("{}\n", json!({"type": "DANCED", "object": {}})),
        format!("{}\n", json!({"type": "MODIFIED", "object": {"metadata": {"name": "a"}, "endpoints": 7}})),
        format!("{}\n", json!({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}})),
    ]) {
        // The connection of an earlier watch may not be closed yet.
        gateway.until("a watch has begun", |_| server.cluster().watched_from.len() >= number).await;
        server.cluster().say(&garbage);
        gateway
            .until(&format!("the slices are listed again after {garbage}"), |_| server.cluster().num_lists > number)
            .await;
        assert_eq!(slots(&gateway), names(&[&first]), "after {garbage}");
    }
    put(&server, "b", &second, &ready());
    until_ready(&gateway, &[&first, &second]).await;
}

#[tokio::test]
async fn an_api_server_that_is_away_changes_nothing() {
    let (first, second) = (worker().await, worker().await);
    let mut server = ApiServer::start().await;
    put(&server, "a", &first, &ready());
    let gateway = gateway_of(&server).await;
    until_ready(&gateway, &[&first]).await;
    server.go_away().await;
    put(&server, "b", &second, &ready());
    gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(slots(&gateway), names(&[&first]));
    server.come_back().await;
    until_ready(&gateway, &[&first, &second]).await;
    // It answers, and nothing that is of use.
    server.cluster().refusal = Some(("watch", StatusCode::SERVICE_UNAVAILABLE));
    server.cluster().end_watches();
    refused_again(&gateway, &server).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
    assert_eq!(slots(&gateway), names(&[&first, &second]));
    server.cluster().remove("a");
    server.cluster().refusal = None;
    until_ready(&gateway, &[&second]).await;
}

#[tokio::test]
async fn a_token_that_is_replaced_is_read_again() {
    let (first, second) = (worker().await, worker().await);
    let server = ApiServer::start().await;
    server.cluster().token = Some("first".into());
    put(&server, "a", &first, &ready());
    let gateway = gateway_of(&server).await;
    until_ready(&gateway, &[&first]).await;
    server.cluster().token = Some("second".into());
    server.cluster().end_watches();
    refused_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&first]));
    server.write_token("second");
    put(&server, "b", &second, &ready());
    until_ready(&gateway, &[&first, &second]).await;
}

#[tokio::test]
async fn a_refusal_is_told_once_with_what_grants_the_verb() {
    let server = ApiServer::start().await;
    server.cluster().refusal = Some(("list", StatusCode::FORBIDDEN));
    let mut gateway = tokio::process::Command::new(env!("CARGO_BIN_EXE_gateway"))
        .args(["--worker", "k8s://llm/workers", "--port", "0", "--kubeconfig"])
        .arg(server.kubeconfig())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(gateway.stderr.take().unwrap()).lines();
    let mut told = Vec::new();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while told.is_empty() || server.cluster().num_refused < 3 {
        let line = tokio::time::timeout_at(deadline, lines.next_line());
        match line.await {
            Ok(Ok(Some(line))) => told.push(line),
            Ok(end) => panic!("the gateway has ended: {end:?} after {told:?}"),
            Err(_) => break,
        }
        tokio::time::timeout_at(deadline, async {
            while server.cluster().num_refused < 3 {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        })
        .await
        .unwrap();
    }
    let refusals: Vec<&String> = told.iter().filter(|line| line.contains("does not let this gateway list")).collect();
    assert_eq!(refusals.len(), 1, "{told:?}");
    for part in ["endpointslices", "namespace llm", "get, list and watch", "deploy/kubernetes/base/rbac.yaml"] {
        assert!(refusals[0].contains(part), "{part} is missing in {refusals:?}");
    }
}

#[tokio::test]
async fn a_service_with_ports_of_several_names_is_followed_by_the_one_that_is_meant() {
    let worker = worker().await;
    let server = ApiServer::start().await;
    let ports = json!([{"name": "metrics", "port": 1}, {"name": "grpc", "port": worker.address.port()}]);
    server.cluster().put_with_ports("a", &ports, &json!([{"addresses": ["127.0.0.1"]}, {"addresses": ["::1"]}]));
    let mut config = config_of(&server);
    config.services[0].place.port = ServicePort::Named("grpc".into());
    let gateway = Gateway::start_unready(config).await;
    until_ready(&gateway, &[&worker]).await;
    let both = BTreeSet::from([worker.address.to_string(), format!("[::1]:{}", worker.address.port())]);
    assert_eq!(slots(&gateway), both);
    // Nobody can know which is meant, so those that are known stay.
    let unnamed = gateway_of(&server).await;
    until_watched(&unnamed, &server).await;
    assert!(slots(&unnamed).is_empty());
}

/// Waits until the gateway has been turned away a few times more.
async fn refused_again(gateway: &Gateway, server: &ApiServer) {
    let refused = server.cluster().num_refused;
    gateway.until("the API server is asked again", |_| server.cluster().num_refused > refused + 2).await;
}
