//! Load on what stands in front of a mock server, bounded in number and time, to the loopback interface only.
//!
//! Closed: each connection sends its next request when the last one is answered. Open (`--rate`): requests are due at
//! random instants whether or not earlier ones are answered, and latency counts from the instant a request was due.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, ValueEnum};
use rand::{RngExt as _, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep_until, timeout_at};

mod bodies;
mod connection;
mod tally;

use bodies::Conversation;
use connection::{Answer, Connection};
use tally::Tally;

const MAX_CONNECTIONS: usize = 16_384;
const MAX_SECONDS: f64 = 120.0;
const SEED: u64 = 20_251_201;

#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Port on the loopback interface
    #[arg(long)]
    port: u16,
    /// Connections, each with one request at a time
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Requests in all; what is not sent by then is left out
    #[arg(long, default_value_t = usize::MAX)]
    requests: usize,
    /// Requests a second, at random instants; without it, as fast as they are answered
    #[arg(long)]
    rate: Option<f64>,
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// What requests say
    #[arg(long, default_value = "short")]
    body: BodyKind,
    /// Tokens of an answer
    #[arg(long, default_value_t = 1)]
    tokens: u32,
    /// Streamed answers
    #[arg(long)]
    stream: bool,
    /// Bearer token of every request
    #[arg(long)]
    key: Option<String>,
}

/// What requests say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BodyKind {
    /// One message; 0.5 KB
    Short,
    /// One message that nobody has seen before; 16 KB
    Cold,
    /// The next turn of a conversation of 16 KB
    Warm,
}

/// Puts the load on and reports what came back.
///
/// # Errors
/// The bounds are exceeded, or nothing listens there.
pub async fn run(args: &LoadArgs) -> anyhow::Result<Value> {
    if args.connections == 0 || args.connections > MAX_CONNECTIONS || !(0.0..=MAX_SECONDS).contains(&args.seconds) {
        bail!("at most {MAX_CONNECTIONS} connections and {MAX_SECONDS} seconds");
    }
    let tasks = LocalSet::new();
    tasks.run_until(drive(args)).await
}

/// What all connections share.
struct Work {
    args: LoadArgs,
    end: Instant,
    /// Instants at which requests are due; `None` in a closed run.
    due: Option<tokio::sync::Mutex<mpsc::Receiver<Instant>>>,
    left: std::cell::Cell<usize>,
}

async fn drive(args: &LoadArgs) -> anyhow::Result<Value> {
    let (due, schedule) = match args.rate {
        Some(rate) => {
            // Requests that nobody is free to send wait here: their latency grows, as it should.
            let (sender, receiver) = mpsc::channel(1 << 20);
            (Some(receiver), Some((rate, sender)))
        }
        None => (None, None),
    };
    let mut connections = Vec::with_capacity(args.connections);
    for number in 0..args.connections {
        // More connections than one address has ports for come from several addresses of this machine.
        let from = Ipv4Addr::new(127, 0, 0, u8::try_from(1 + number / 8192).unwrap_or(1));
        connections.push(Connection::open(from, SocketAddr::from((Ipv4Addr::LOCALHOST, args.port))).await?);
    }
    let started = Instant::now();
    let end = started + Duration::from_secs_f64(args.seconds);
    let work =
        Rc::new(Work { args: args.clone(), end, due: due.map(tokio::sync::Mutex::new), left: args.requests.into() });
    let workers: Vec<_> = connections
        .into_iter()
        .enumerate()
        .map(|(number, connection)| tokio::task::spawn_local(send_all(work.clone(), number, connection)))
        .collect();
    if let Some((rate, sender)) = schedule {
        tokio::task::spawn_local(make_due(rate, sender, started, end));
    }
    let mut tally = Tally::default();
    for worker in workers {
        tally.add(worker.await??);
    }
    let seconds = started.elapsed().as_secs_f64();
    let offered = args.rate.map(|rate| json!(rate));
    Ok(
        json!({"seconds": seconds, "connections": args.connections, "offered_per_s": offered, "result": tally.report(seconds)}),
    )
}

/// Makes requests due at random instants, `rate` a second on average.
async fn make_due(rate: f64, sender: mpsc::Sender<Instant>, started: Instant, end: Instant) {
    let mut random = StdRng::seed_from_u64(SEED);
    let mut due = started;
    loop {
        let uniform: f64 = random.random_range(f64::EPSILON..1.0);
        due += Duration::from_secs_f64(-uniform.ln() / rate);
        if due >= end {
            return;
        }
        sleep_until(due).await;
        if sender.try_send(due).is_err() {
            return;
        }
    }
}

/// One connection's requests, until the time or the work is over.
async fn send_all(work: Rc<Work>, number: usize, mut connection: Connection) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut conversation = Conversation::new(work.args.body, number as u64, work.args.tokens, work.args.stream);
    let mut bytes = Vec::new();
    while let Some(due) = next_due(&work).await {
        connection::write_request(&mut bytes, &conversation.next_body(), work.args.key.as_deref());
        match timeout_at(work.end, connection.ask(&bytes, &mut tally.gaps_us)).await {
            // Not answered in time: it counts neither way.
            Err(_) => break,
            Ok(Ok(answer)) => tally.count(&answer, due),
            Ok(Err(error)) => {
                tally.count(&Answer::broken(), due);
                if connection.reopen().await.is_err() {
                    return Err(error);
                }
            }
        }
    }
    Ok(tally)
}

/// When the next request was due; `None` once there is none.
async fn next_due(work: &Work) -> Option<Instant> {
    let due = match &work.due {
        Some(due) => due.lock().await.recv().await?,
        None => Instant::now(),
    };
    let left = work.left.get().checked_sub(1)?;
    work.left.set(left);
    (Instant::now() < work.end).then_some(due)
}
