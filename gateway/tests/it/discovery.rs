//! Workers found by name, at a small DNS server of the tests' own.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use baleen_gateway::config::Config;
use baleen_gateway::config::names::{Name, Question};
use baleen_gateway::worker::Role;
use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{Name as DomainName, RData, Record, RecordType};
use serde_json::json;
use tokio::net::UdpSocket;

use crate::fake_worker::FakeWorker;
use crate::gateway::{CHAT, Gateway, babble, config, hello, say};

const SERVICE: &str = "_grpc._tcp.workers.test.";
const HOST: &str = "worker.test.";

/// What the server answers. Records live for no time at all, so that the gateway asks as often as it may.
#[derive(Default)]
struct Zone {
    /// Priority and port of each service record, all of `HOST`.
    services: Vec<(u16, u16)>,
    hosts: Vec<IpAddr>,
    fails: bool,
    num_questions: usize,
}

struct DnsServer {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
}

impl DnsServer {
    async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone = Arc::new(Mutex::new(Zone { hosts: vec![[127, 0, 0, 1].into()], ..Zone::default() }));
        let answers = zone.clone();
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
                let answer = answers.lock().unwrap().answer(&Message::from_vec(&buffer[..length]).unwrap());
                socket.send_to(&answer.to_vec().unwrap(), peer).await.unwrap();
            }
        });
        Self { address, zone }
    }

    fn set(&self, change: impl FnOnce(&mut Zone)) {
        change(&mut self.zone.lock().unwrap());
    }

    fn num_questions(&self) -> usize {
        self.zone.lock().unwrap().num_questions
    }

    /// A gateway whose only workers are those of `question`.
    fn config(&self, question: Question) -> Config {
        let name = Name { question, role: Role::Unified, transfer_port: None };
        Config { names: vec![name], dns_server: Some(self.address), ..config(Vec::new()) }
    }
}

impl Zone {
    fn answer(&mut self, asked: &Message) -> Message {
        self.num_questions += 1;
        let mut answer = Message::response(asked.metadata.id, OpCode::Query);
        answer.metadata.recursion_available = true;
        let question = asked.queries[0].clone();
        answer.add_query(question.clone());
        if self.fails {
            answer.metadata.response_code = ResponseCode::ServFail;
            return answer;
        }
        let record = |data| Record::from_rdata(question.name().clone(), 0, data);
        match (question.name().to_string().as_str(), question.query_type()) {
            (SERVICE, RecordType::SRV) => {
                let host = DomainName::from_ascii(HOST).unwrap();
                let services = self.services.iter();
                let data = services.map(|&(priority, port)| RData::SRV(SRV::new(priority, 0, port, host.clone())));
                answer.add_answers(data.map(record));
            }
            (HOST, RecordType::A) => {
                let v4 = self.hosts.iter().filter_map(|host| if let IpAddr::V4(v4) = host { Some(*v4) } else { None });
                answer.add_answers(v4.map(|v4| record(RData::A(v4.into()))));
            }
            (HOST, RecordType::AAAA) => {
                let v6 = self.hosts.iter().filter_map(|host| if let IpAddr::V6(v6) = host { Some(*v6) } else { None });
                answer.add_answers(v6.map(|v6| record(RData::AAAA(v6.into()))));
            }
            _ => answer.metadata.response_code = ResponseCode::NXDomain,
        }
        answer
    }
}

pub fn slots(gateway: &Gateway) -> BTreeSet<String> {
    gateway.app.pool.slots().iter().map(|slot| slot.name.to_string()).collect()
}

pub fn names(workers: &[&FakeWorker]) -> BTreeSet<String> {
    workers.iter().map(|worker| worker.address.to_string()).collect()
}

#[tokio::test]
async fn workers_of_a_service_join_and_leave_without_a_restart() {
    let (first, second) = (FakeWorker::start(|_| say("Yes.")).await, FakeWorker::start(|_| say("Yes.")).await);
    let server = DnsServer::start().await;
    server.set(|zone| zone.services = vec![(5, first.address.port())]);
    let gateway = Gateway::start_unready(server.config(Question::Service(SERVICE.into()))).await;
    gateway.until("the first has joined", |app| app.pool.ready().len() == 1).await;
    gateway.ask(CHAT, &hello(&json!({}))).await;
    server.set(|zone| zone.services.push((5, second.address.port())));
    gateway.until("the second has joined", |app| app.pool.ready().len() == 2).await;
    assert_eq!(slots(&gateway), names(&[&first, &second]));
    server.set(|zone| _ = zone.services.remove(0));
    gateway.until("the first has left", |app| app.pool.slots().len() == 1).await;
    assert_eq!(slots(&gateway), names(&[&second]));
    gateway.ask(CHAT, &hello(&json!({}))).await;
    // One that stands in is not taken while another is there.
    server.set(|zone| zone.services.push((9, first.address.port())));
    asked_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&second]));
}

#[tokio::test]
async fn a_worker_that_leaves_finishes_what_it_computes() {
    let (first, second) = (FakeWorker::start(|_| babble()).await, FakeWorker::start(|_| say("Yes.")).await);
    let server = DnsServer::start().await;
    server.set(|zone| zone.services = vec![(0, first.address.port())]);
    let gateway = Gateway::start_unready(server.config(Question::Service(SERVICE.into()))).await;
    gateway.until("it has joined", |app| app.pool.ready().len() == 1).await;
    let mut events = gateway.stream(CHAT, &hello(&json!({"stream": true}))).await;
    events.next().await.unwrap();
    server.set(|zone| zone.services = vec![(0, second.address.port())]);
    gateway
        .until("the other one takes requests", |app| {
            let ready = app.pool.ready();
            ready.len() == 1 && *ready[0].name == second.address.to_string()
        })
        .await;
    asked_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&first, &second]));
    events.next().await.unwrap();
    drop(events);
    gateway.until("it is given up", |app| app.pool.slots().len() == 1).await;
}

#[tokio::test]
async fn a_name_that_cannot_be_resolved_changes_nothing() {
    let worker = FakeWorker::start(|_| say("Yes.")).await;
    let server = DnsServer::start().await;
    let question = Question::Host { host: HOST.into(), port: worker.address.port() };
    let gateway = Gateway::start_unready(server.config(question)).await;
    gateway.until("it has joined", |app| app.pool.ready().len() == 1).await;
    server.set(|zone| zone.fails = true);
    asked_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&worker]));
    server.set(|zone| (zone.fails, zone.hosts) = (false, Vec::new()));
    asked_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&worker]));
    gateway.ask(CHAT, &hello(&json!({}))).await;
    // And it is followed again when it is back.
    server.set(|zone| zone.hosts = vec!["::1".parse().unwrap()]);
    let moved = BTreeSet::from([format!("[::1]:{}", worker.address.port())]);
    gateway.until("the new address is followed", |_| slots(&gateway) == moved).await;
}

#[tokio::test]
async fn a_name_leaves_the_workers_of_others_alone() {
    let (given, named) = (FakeWorker::start(|_| say("Yes.")).await, FakeWorker::start(|_| say("Yes.")).await);
    let server = DnsServer::start().await;
    let both = [named.address.port(), given.address.port()];
    server.set(|zone| zone.services = both.map(|port| (0, port)).to_vec());
    let named_too = server.config(Question::Service(SERVICE.into()));
    let config =
        Config { names: named_too.names, dns_server: named_too.dns_server, ..config(vec![given.address.to_string()]) };
    let gateway = Gateway::start_unready(config).await;
    gateway.until("both are ready", |app| app.pool.ready().len() == 2).await;
    server.set(|zone| zone.services.truncate(1));
    asked_again(&gateway, &server).await;
    assert_eq!(slots(&gateway), names(&[&given, &named]));
}

/// Waits until what the server says now must have been heard.
async fn asked_again(gateway: &Gateway, server: &DnsServer) {
    let asked = server.num_questions();
    gateway.until("the name is asked for again", |_| server.num_questions() > asked + 6).await;
}
