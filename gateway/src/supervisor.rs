//! Runs a local worker as a child process: starts it, follows its life on its standard output, restarts it with
//! back-off, and takes it down with the gateway. One that somebody else has asked to end is let finish what it has, and
//! followed by another.
//!
//! The worker writes one JSON object a line to standard output and watches its standard input: when that pipe closes,
//! for whatever reason, it ends. Its messages for people go to standard error, which it shares with the gateway.

use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::worker::pool::{Departure, WorkerSlot};

const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// A worker that was ready this long has proved itself: its next restart is quick again.
const PROOF: Duration = Duration::from_secs(60);
/// What a worker gets between the end of its standard input and a kill.
const EXIT_GRACE: Duration = Duration::from_millis(1500);

/// A terminal sends its signals to the worker and to the gateway alike: by then the gateway has noticed too.
const SIGNAL_GRACE: Duration = Duration::from_secs(1);

/// What the gateway has in mind with the workers that it has started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Intent {
    #[default]
    Keep,
    /// It ends once requests in progress have; a worker that is asked to end waits for that.
    Drain,
    Stop,
}

/// How to start the worker.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Added to the gateway's own environment.
    pub envs: Vec<(OsString, OsString)>,
    /// Out of reach of the signals that a terminal sends to this process; the worker still ends with it.
    pub own_process_group: bool,
}

/// What a ready worker holds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ReadyReport {
    pub device: String,
    pub dtype: String,
    pub capacity_pages: u64,
    pub page_size_tokens: u64,
    pub context_length_tokens: u64,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub load_seconds: f64,
}

/// Where the worker is in its life.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Phase {
    #[default]
    Starting,
    Loading {
        done_bytes: u64,
        total_bytes: u64,
    },
    Ready(ReadyReport),
    /// It ended and is started again after a pause.
    Restarting,
}

/// The worker cannot be started at all.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum StartError {
    #[error("cannot start the worker with {program}: {reason}")]
    Spawn { program: String, reason: String },
    /// The worker's own sentence.
    #[error("{0}")]
    Fatal(String),
    #[error("the worker ended ({0}) before it was ready; its own messages are above")]
    Died(ExitStatus),
}

/// One line of the worker's standard output, named by its field `event`.
#[derive(Debug)]
enum Event {
    Listening { address: String },
    Loading { done_bytes: u64, total_bytes: u64 },
    Ready(ReadyReport),
    Fatal { message: String },
}

impl Event {
    fn parse(line: &str) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Name {
            Listening,
            Loading,
            Ready,
            Fatal,
        }
        #[derive(Deserialize)]
        struct Named {
            event: Name,
        }
        #[derive(Deserialize)]
        struct Listening {
            address: String,
        }
        #[derive(Deserialize)]
        struct Loading {
            done_bytes: u64,
            total_bytes: u64,
        }
        #[derive(Deserialize)]
        struct Fatal {
            message: String,
        }
        // Read twice, because an enum tagged by a field cannot hold numbers of arbitrary precision.
        let Named { event } = serde_json::from_str(line)?;
        Ok(match event {
            Name::Listening => {
                let Listening { address } = serde_json::from_str(line)?;
                Self::Listening { address }
            }
            Name::Loading => {
                let Loading { done_bytes, total_bytes } = serde_json::from_str(line)?;
                Self::Loading { done_bytes, total_bytes }
            }
            Name::Ready => Self::Ready(serde_json::from_str(line)?),
            Name::Fatal => {
                let Fatal { message } = serde_json::from_str(line)?;
                Self::Fatal { message }
            }
        })
    }
}

/// See the module.
pub struct Supervisor {
    command: WorkerCommand,
    slot: Arc<WorkerSlot>,
    phase: watch::Sender<Phase>,
    intent: watch::Receiver<Intent>,
    drain_timeout: Duration,
}

/// One life of the child.
struct Life {
    child: Child,
    stdin: Option<ChildStdin>,
    events: Lines<BufReader<ChildStdout>>,
    ready_at: Option<Instant>,
    fatal: Option<String>,
}

impl Supervisor {
    /// A supervisor of `command` that tells `slot` where the worker listens. It runs until `intent` is to stop.
    /// `drain_timeout`: how long a worker that leaves may take for the requests it has.
    #[must_use]
    pub fn new(
        command: WorkerCommand,
        slot: Arc<WorkerSlot>,
        intent: watch::Receiver<Intent>,
        drain_timeout: Duration,
    ) -> Self {
        Self { command, slot, phase: watch::Sender::default(), intent, drain_timeout }
    }

    /// Follows the worker's phases.
    #[must_use]
    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Keeps the worker running until the gateway stops.
    ///
    /// # Errors
    /// The worker ended before it was ever ready: trying again would only repeat its complaint.
    pub async fn run(mut self) -> Result<(), StartError> {
        let mut was_ever_ready = false;
        let mut backoff = FIRST_BACKOFF;
        loop {
            let mut life = self.spawn()?;
            let ended = self.follow(&mut life).await;
            self.slot.set_address(None);
            let Some(status) = ended else { return Ok(()) };
            was_ever_ready |= life.ready_at.is_some();
            if !was_ever_ready {
                return Err(life.fatal.map_or(StartError::Died(status), StartError::Fatal));
            }
            if life.ready_at.is_some_and(|since| since.elapsed() >= PROOF) {
                backoff = FIRST_BACKOFF;
            }
            let reason = life.fatal.unwrap_or_default();
            warn!(%status, reason, backoff_ms = backoff.as_millis(), "the worker ended and is started again");
            self.phase.send_replace(Phase::Restarting);
            tokio::select! {
                () = tokio::time::sleep(backoff) => {}
                () = stopped(&mut self.intent) => return Ok(()),
            }
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    fn spawn(&self) -> Result<Life, StartError> {
        let WorkerCommand { program, args, envs, own_process_group } = &self.command;
        debug!(program = %program.display(), ?args, "starting the worker");
        let failed = |reason: String| StartError::Spawn { program: program.display().to_string(), reason };
        let mut command = Command::new(program);
        if *own_process_group {
            command.process_group(0);
        }
        let mut child = command
            .args(args)
            .envs(envs.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().ok_or_else(|| failed("its output cannot be read".into()))?;
        Ok(Life { child, stdin, events: BufReader::new(stdout).lines(), ready_at: None, fatal: None })
    }

    /// Follows one life to its end. `None` where the gateway ended it.
    async fn follow(&mut self, life: &mut Life) -> Option<ExitStatus> {
        let mut address = None;
        let mut left = pin!(left(self.slot.departure(), self.intent.clone(), self.drain_timeout));
        loop {
            let line = tokio::select! {
                line = life.events.next_line() => line,
                () = stopped(&mut self.intent) => {
                    end(life).await;
                    return None;
                }
                () = &mut left => {
                    info!("the worker was asked to end by somebody else");
                    break;
                }
            };
            let Ok(Some(line)) = line else { break };
            match Event::parse(&line) {
                Ok(Event::Listening { address: bound }) => address = Some(bound),
                Ok(Event::Loading { done_bytes, total_bytes }) => {
                    self.phase.send_replace(Phase::Loading { done_bytes, total_bytes });
                }
                Ok(Event::Ready(report)) => {
                    debug!(device = report.device, dtype = report.dtype, "the worker is loaded");
                    life.ready_at = Some(Instant::now());
                    self.slot.set_address(address.clone());
                    self.phase.send_replace(Phase::Ready(report));
                }
                Ok(Event::Fatal { message }) => life.fatal = Some(message),
                Err(error) => warn!(%error, line, "the worker said something this gateway does not understand"),
            }
        }
        // Nothing is left for it to do; or its standard output is closed, so it is ending or no longer controllable.
        life.stdin = None;
        match tokio::time::timeout(EXIT_GRACE, life.child.wait()).await {
            Ok(Ok(status)) => Some(status),
            _ => {
                end(life).await;
                Some(ExitStatus::default())
            }
        }
    }
}

async fn stopped(intent: &mut watch::Receiver<Intent>) {
    // A dropped sender means that the gateway is gone, which is a stop as well.
    let _ = intent.wait_for(|intent| *intent == Intent::Stop).await;
}

/// Waits until the worker has drained, or drains for too long, while the gateway does not.
async fn left(mut departure: watch::Receiver<Departure>, intent: watch::Receiver<Intent>, drain_timeout: Duration) {
    loop {
        let leaves = departure.wait_for(|departure| *departure != Departure::Stays).await.is_ok();
        if !leaves {
            return std::future::pending().await;
        }
        tokio::time::sleep(SIGNAL_GRACE).await;
        // Too late is late enough: what it still has goes on at the next one.
        let drained = departure.wait_for(|departure| *departure != Departure::Drains);
        let _ = tokio::time::timeout(drain_timeout, drained).await;
        if *departure.borrow() != Departure::Stays && *intent.borrow() == Intent::Keep {
            return;
        }
    }
}

async fn end(life: &mut Life) {
    life.stdin = None;
    if tokio::time::timeout(EXIT_GRACE, life.child.wait()).await.is_err() {
        warn!("the worker did not end in time and is killed");
        if let Err(error) = life.child.kill().await {
            warn!(%error, "the worker could not be killed");
        }
    }
}
