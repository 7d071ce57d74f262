//! The pace of both mock servers: in every step each running request gets one token, as in an engine.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

/// How a mock server generates.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// tokenizer.json of the tokens
    #[arg(long, value_name = "PATH")]
    pub tokenizer: PathBuf,
    /// Microseconds a step takes; 0 answers as fast as it can
    #[arg(long, default_value_t = 0)]
    pub step_us: u64,
    /// Requests that get a token in one step; others wait
    #[arg(long, default_value_t = 65_536)]
    pub max_running: usize,
}

/// Something for the engine to do.
pub enum Command<J> {
    Start {
        job: J,
        num_tokens: u32,
    },
    /// Forget what matches.
    Abort(Box<dyn Fn(&J) -> bool + Send>),
}

/// Where tokens go.
pub trait Output: Send + 'static {
    type Job: Send + 'static;

    /// Token `index` of a job, perhaps its last. False where nobody wants the next one.
    fn token(&mut self, job: &Self::Job, index: u32, is_last: bool) -> bool;

    /// Every running job has got its token.
    fn end_step(&mut self);
}

struct Running<J> {
    job: J,
    next: u32,
    num_tokens: u32,
}

/// Steps until every sender of `commands` is gone.
pub async fn run<O: Output>(args: EngineArgs, mut commands: mpsc::UnboundedReceiver<Command<O::Job>>, mut output: O) {
    let pause = Duration::from_micros(args.step_us);
    let mut running: Vec<Running<O::Job>> = Vec::new();
    let mut waiting = VecDeque::new();
    let mut due = Instant::now();
    loop {
        if running.is_empty() && waiting.is_empty() {
            let Some(command) = commands.recv().await else { return };
            apply(command, &mut running, &mut waiting);
            due = Instant::now() + pause;
        }
        if pause.is_zero() {
            tokio::task::yield_now().await;
        } else {
            sleep_until(due).await;
            // A step that came late does not make the next one come early.
            due = (due + pause).max(Instant::now());
        }
        while let Ok(command) = commands.try_recv() {
            apply(command, &mut running, &mut waiting);
        }
        while running.len() < args.max_running
            && let Some(next) = waiting.pop_front()
        {
            running.push(next);
        }
        running.retain_mut(|request| {
            let index = request.next;
            request.next += 1;
            let is_last = request.next >= request.num_tokens;
            output.token(&request.job, index, is_last) && !is_last
        });
        output.end_step();
    }
}

fn apply<J>(command: Command<J>, running: &mut Vec<Running<J>>, waiting: &mut VecDeque<Running<J>>) {
    match command {
        Command::Start { job, num_tokens } => waiting.push_back(Running { job, next: 0, num_tokens }),
        Command::Abort(matches) => {
            running.retain(|request| !matches(&request.job));
            waiting.retain(|request| !matches(&request.job));
        }
    }
}
