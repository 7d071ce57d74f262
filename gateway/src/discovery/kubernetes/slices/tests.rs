#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};

use super::*;

fn slice(name: &str, ports: &Value, endpoints: &Value) -> EndpointSlice {
    let kind = json!({"metadata": {"name": name}, "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
    serde_json::from_value(kind).unwrap()
}

fn grpc() -> Value {
    json!([{"name": "grpc", "port": 30001, "protocol": "TCP"}])
}

fn at(host: &str, conditions: &Value) -> Value {
    json!({"addresses": [host], "conditions": conditions})
}

fn workers(slices: Vec<EndpointSlice>, known: &[&str]) -> Vec<String> {
    Slices::listed(slices).workers(&ServicePort::Only, |name| known.contains(&name)).unwrap()
}

#[test]
fn what_is_ready_joins_and_what_terminates_never_does() {
    let endpoints = json!([
        at("10.0.0.1", &json!({"ready": true, "serving": true, "terminating": false})),
        at("10.0.0.2", &json!({"ready": false})),
        at("10.0.0.3", &json!({"ready": false, "serving": true, "terminating": true})),
        // Of a Service that publishes what is not ready.
        at("10.0.0.4", &json!({"ready": true, "serving": true, "terminating": true})),
        at("10.0.0.5", &json!({})),
        {"addresses": ["10.0.0.6"]},
        {"addresses": []},
    ]);
    let known = ["10.0.0.2:30001", "10.0.0.3:30001"];
    let expected = ["10.0.0.1:30001", "10.0.0.5:30001", "10.0.0.6:30001"];
    assert_eq!(workers(vec![slice("a", &grpc(), &endpoints)], &known), expected);
}

#[test]
fn where_nobody_is_ready_those_that_are_known_go_on() {
    let endpoints = json!([
        at("10.0.0.1", &json!({"ready": false})),
        at("10.0.0.2", &json!({"ready": false})),
        at("10.0.0.3", &json!({"ready": false, "terminating": true})),
    ]);
    let slices = || vec![slice("a", &grpc(), &endpoints)];
    assert_eq!(workers(slices(), &["10.0.0.1:30001", "10.0.0.3:30001"]), ["10.0.0.1:30001"]);
    assert_eq!(workers(slices(), &[]), [""; 0]);
}

#[test]
fn an_endpoint_in_two_slices_is_one_worker_and_the_better_standing_counts() {
    let slices = || {
        let moved = |ready: bool| json!([at("10.0.0.1", &json!({"ready": ready}))]);
        [slice("a", &grpc(), &moved(true)), slice("b", &grpc(), &moved(false))]
    };
    let [a, b] = slices();
    assert_eq!(workers(vec![a, b], &[]), ["10.0.0.1:30001"]);
    let [a, b] = slices();
    let mut left = Slices::listed(vec![b]);
    left.put(a.clone());
    left.remove(&a);
    assert_eq!(left.workers(&ServicePort::Only, |_| false).unwrap(), [""; 0]);
}

#[test]
fn a_pod_of_two_address_families_is_one_worker() {
    let of_pod = |host: &str| json!([{"addresses": [host], "targetRef": {"kind": "Pod", "uid": "u1"}}]);
    let (v4, v6) = (slice("b", &grpc(), &of_pod("10.0.0.1")), slice("a", &grpc(), &of_pod("fd00::1")));
    assert_eq!(workers(vec![v4, v6.clone()], &[]), ["10.0.0.1:30001"]);
    assert_eq!(workers(vec![v6], &[]), ["[fd00::1]:30001"]);
}

#[test]
fn the_port_is_named_numbered_or_the_only_one() {
    let two = json!([{"name": "grpc", "port": 30001}, {"name": "metrics", "port": 9100}, {"name": "u", "port": 1, "protocol": "UDP"}]);
    let ask = |ports: &Value, port: &ServicePort| {
        Slices::listed(vec![slice("a", ports, &json!([at("10.0.0.1", &json!({}))]))]).workers(port, |_| false)
    };
    let named = |name: &str| ServicePort::Named(name.into());
    assert_eq!(ask(&two, &named("metrics")).unwrap(), ["10.0.0.1:9100"]);
    assert_eq!(ask(&two, &ServicePort::Number(4)).unwrap(), ["10.0.0.1:4"]);
    assert_eq!(ask(&json!(null), &ServicePort::Number(4)).unwrap(), ["10.0.0.1:4"]);
    for (ports, port, expected) in [
        (&two, ServicePort::Only, "several TCP ports, grpc 30001, metrics 9100: name one"),
        (&two, named("http"), "no TCP port named http: it has grpc 30001, metrics 9100"),
        (&two, named("u"), "no TCP port named u"),
        (&json!([]), ServicePort::Only, "names no TCP port"),
        (&json!([{"port": 70000}]), ServicePort::Only, "names no TCP port"),
    ] {
        let sentence = ask(ports, &port).unwrap_err();
        assert!(sentence.contains(expected), "{sentence}");
    }
    // A slice without endpoints has no ports either.
    let empty = vec![slice("a", &json!(null), &json!(null))];
    assert_eq!(workers(empty, &[]), [""; 0]);
}
