//! The one pipeline from a validated request to its events: choose a worker, submit, fold what comes back into text.
//!
//! HTTP types never enter here. A `Generation` is pulled by whoever writes the response, so a client that reads slowly
//! slows nobody but itself; dropping it, wherever that happens, aborts in the worker what has not ended.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use thiserror::Error;

use crate::chat::output::{Delta, OutputFold, OutputOptions};
use crate::openai::logprobs::TokenLogprob;
use crate::openai::response::Usage;
use crate::openai::{GenerationSpec, SamplingSpec};
use crate::route::least_load::{LeastLoad, WorkerLoad};
use crate::telemetry::Metrics;
use crate::text::tokenizer::Tokenizer;
use crate::worker::Failure;
use crate::worker::client::{Sample, Submission, Ticket};
use crate::worker::mailbox::{Batch, Cut, End, Mailbox, Row};
use crate::worker::pool::{Condition, Pool, ReadyWorker};

/// A request as the pipeline sees it: token ids in, and how to turn tokens back into text.
#[derive(Clone, Debug)]
pub struct GenerateSpec {
    /// Names the request to clients and, as the request id of its first choice, to workers.
    pub id: u128,
    /// Each is continued `n` times; choice `p * n + s` is sample `s` of prompt `p`.
    pub prompts: Vec<Prompt>,
    pub n: u32,
    /// `max_tokens` is each prompt's own.
    pub sampling: SamplingSpec,
    pub output: OutputOptions,
    /// Whether choices keep their token ids.
    pub keeps_token_ids: bool,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: String,
}

impl GenerateSpec {
    /// What `generation` asks for, of these prompts, under a new id.
    #[must_use]
    pub fn new(generation: &GenerationSpec, output: OutputOptions, prompts: Vec<Prompt>) -> Self {
        Self {
            id: rand::random(),
            prompts,
            n: generation.n,
            sampling: generation.sampling.clone(),
            output,
            keeps_token_ids: generation.return_token_ids,
            priority: generation.priority,
            deadline_ms: generation.deadline_ms,
            cache_salt: generation.cache_salt.clone(),
        }
    }
}

/// One prompt, and how far it may be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub token_ids: Vec<u32>,
    pub max_tokens: u32,
}

/// Why a generation ended without an answer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GenerateError {
    #[error("{0}")]
    NoWorker(String),
    #[error("{0}")]
    Worker(Failure),
    #[error("The client did not read its answer fast enough, so the request was ended.")]
    SlowClient,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token of the model or of the request; it gives no text.
    StopToken(u32),
    /// A stop string of the request.
    StopString(String),
    Length,
    /// An operator ended it.
    Abort,
}

/// What became of one continuation since its taker last cleared it.
pub struct Choice {
    pub prompt_index: usize,
    /// Text of this step; whoever takes it clears it.
    pub delta: Delta,
    /// Tokens behind `delta`, where they are kept, a stop token included; to be cleared likewise.
    pub token_ids: Vec<u32>,
    /// Log-probabilities of these tokens, where asked for; to be cleared likewise.
    pub logprobs: Vec<TokenLogprob>,
    /// Log-probabilities of prompt tokens from the second one on; to be cleared likewise.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// Set in the step in which the choice ends.
    pub finish: Option<Finish>,
    pub num_tokens: u32,
    pub cached_tokens: u32,
    fold: OutputFold,
    keeps_token_ids: bool,
    /// None once the choice has ended.
    ticket: Option<Ticket>,
    last_token_at: Option<Instant>,
}

/// Whether a generation goes on after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Running,
    Done,
}

/// Starts generations, and knows those in progress.
pub struct Generator {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    policy: LeastLoad,
    in_progress: Mutex<HashMap<u128, Weak<Mailbox>>>,
}

impl Generator {
    #[must_use]
    pub fn new(pool: Arc<Pool>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { pool, metrics, policy: LeastLoad::default(), in_progress: Mutex::default() })
    }

    /// Submits every choice of `spec` to one worker. `arrived` is when the client's request came in.
    ///
    /// # Errors
    /// No worker is ready.
    pub fn start(
        self: &Arc<Self>,
        spec: GenerateSpec,
        tokenizer: &Arc<Tokenizer>,
        arrived: Instant,
    ) -> Result<Generation, GenerateError> {
        let id = spec.id;
        let prompt_lens: Vec<usize> = spec.prompts.iter().map(|prompt| prompt.token_ids.len()).collect();
        let num_choices = spec.prompts.len() * spec.n as usize;
        let mailbox = Arc::new(Mailbox::new(num_choices));
        let choices = (0..num_choices).map(|index| Choice {
            prompt_index: index / spec.n.max(1) as usize,
            delta: Delta::default(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            finish: None,
            num_tokens: 0,
            cached_tokens: 0,
            fold: OutputFold::new(tokenizer.clone(), spec.output.clone()),
            keeps_token_ids: spec.keeps_token_ids,
            ticket: None,
            last_token_at: None,
        });
        let mut choices: Vec<Choice> = choices.collect();
        let tickets = self.submit(submissions(spec), &mailbox)?;
        for (choice, ticket) in choices.iter_mut().zip(tickets) {
            choice.ticket = Some(ticket);
        }
        self.lock().insert(id, Arc::downgrade(&mailbox));
        self.metrics.prompt_tokens.increment(prompt_lens.iter().map(|&len| len as u64).sum());
        for &len in &prompt_lens {
            self.metrics.request_prompt_tokens.record(len as f64);
        }
        Ok(Generation {
            id,
            generator: self.clone(),
            mailbox,
            batch: Batch::default(),
            running: choices.len(),
            choices,
            moved: Vec::new(),
            prompt_lens,
            arrived,
            saw_token: false,
        })
    }

    /// Ends the generation with this id as aborted; false where there is none.
    pub fn abort(&self, id: u128) -> bool {
        let mailbox = self.lock().get(&id).and_then(Weak::upgrade);
        mailbox.inspect(|mailbox| mailbox.cut(Cut::Aborted)).is_some()
    }

    /// Ends every generation as aborted; returns how many there were.
    pub fn abort_all(&self) -> usize {
        let mailboxes: Vec<_> = self.lock().values().filter_map(Weak::upgrade).collect();
        mailboxes.iter().for_each(|mailbox| mailbox.cut(Cut::Aborted));
        mailboxes.len()
    }

    fn submit(&self, submissions: Vec<Submission>, mailbox: &Arc<Mailbox>) -> Result<Vec<Ticket>, GenerateError> {
        let mut workers = Vec::clone(&self.pool.ready());
        let mut submissions = Some(submissions);
        while let Some(index) = self.policy.choose(workers.iter().map(load_of)) {
            let worker = workers.swap_remove(index);
            let last = workers.is_empty();
            let submitted = if last { submissions.take() } else { submissions.clone() };
            match worker.link.submit(submitted.unwrap_or_default(), mailbox) {
                Ok(tickets) => return Ok(tickets),
                // Its stream ended a moment ago.
                Err(_) => continue,
            }
        }
        Err(GenerateError::NoWorker(self.why_not_ready()))
    }

    /// One sentence for a client that finds no worker.
    #[must_use]
    pub fn why_not_ready(&self) -> String {
        let reasons = self.pool.slots().iter().filter_map(|slot| match slot.condition() {
            Condition::Ready => None,
            Condition::Draining => Some(format!("{} is shutting down", slot.name)),
            Condition::NotReady(reason) | Condition::Refused(reason) => Some(format!("{}: {reason}", slot.name)),
        });
        let reasons: Vec<String> = reasons.collect();
        format!("No worker is ready ({}). Try again shortly.", reasons.join("; "))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Weak<Mailbox>>> {
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn load_of(worker: &ReadyWorker) -> WorkerLoad {
    let load = &worker.link.load;
    let reported = load.running_requests.load(Ordering::Relaxed) + load.waiting_requests.load(Ordering::Relaxed);
    WorkerLoad {
        in_flight: worker.link.in_flight(),
        reported_requests: reported as usize,
        waiting_prompt_tokens: load.waiting_prompt_tokens.load(Ordering::Relaxed),
    }
}

/// One submission per choice. A client's seed goes to sample 0 as it is; the others get seeds derived from it, so that
/// samples differ and the whole request is reproducible.
fn submissions(spec: GenerateSpec) -> Vec<Submission> {
    let GenerateSpec { id, prompts, n, mut sampling, priority, deadline_ms, cache_salt, .. } = spec;
    let seed = sampling.seed.unwrap_or_else(rand::random);
    let mut submissions = Vec::with_capacity(prompts.len() * n as usize);
    for Prompt { mut token_ids, max_tokens } in prompts {
        sampling.max_tokens = Some(max_tokens);
        let group_id = if submissions.is_empty() { id } else { rand::random() };
        for index in 0..n {
            sampling.seed = Some(sample_seed(seed, index));
            let is_last = index + 1 == n;
            submissions.push(Submission {
                request_id: if index == 0 { group_id } else { rand::random() },
                prompt_token_ids: if is_last { std::mem::take(&mut token_ids) } else { token_ids.clone() },
                sampling: sampling.clone(),
                sample: Sample { group_id, index, size: n },
                priority,
                deadline_ms,
                cache_salt: cache_salt.clone(),
            });
        }
    }
    submissions
}

/// Seed of sample `index`: the client's own for the first, then the SplitMix64 sequence that starts there.
fn sample_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut mixed = seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// A request in progress. See the module.
pub struct Generation {
    /// Names the request to clients and, as the request id of its first choice, to workers.
    pub id: u128,
    pub choices: Vec<Choice>,
    /// Choices that the last step changed, in order of the news; one may appear more than once.
    pub moved: Vec<usize>,
    generator: Arc<Generator>,
    mailbox: Arc<Mailbox>,
    batch: Batch,
    running: usize,
    prompt_lens: Vec<usize>,
    arrived: Instant,
    saw_token: bool,
}

impl Generation {
    /// Waits for news and folds all that there is into `choices`; `moved` says which changed.
    ///
    /// # Errors
    /// The request failed as a whole. It must not be polled again.
    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Result<Progress, GenerateError>> {
        self.moved.clear();
        if self.running == 0 {
            return Poll::Ready(Ok(Progress::Done));
        }
        let taken = ready!(self.mailbox.poll_take(context, &mut self.batch));
        Poll::Ready(match taken {
            Ok(()) => self.fold(),
            Err(Cut::SlowClient) => Err(GenerateError::SlowClient),
            Err(Cut::Aborted) => {
                self.abort();
                Ok(Progress::Done)
            }
        })
    }

    /// The same as a future.
    ///
    /// # Errors
    /// As `poll_step`.
    pub async fn step(&mut self) -> Result<Progress, GenerateError> {
        poll_fn(|context| self.poll_step(context)).await
    }

    /// Whether every choice has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.running == 0
    }

    /// Token counts so far. A prompt counts once, however often it is continued.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let mut cached = vec![0; self.prompt_lens.len()];
        let mut usage = Usage::default();
        for choice in &self.choices {
            cached[choice.prompt_index] = choice.cached_tokens.max(cached[choice.prompt_index]);
            usage.completion_tokens += choice.num_tokens;
            usage.reasoning_tokens += choice.fold.num_reasoning_tokens();
        }
        usage.cached_tokens = cached.iter().sum();
        usage.prompt_tokens = u32::try_from(self.prompt_lens.iter().sum::<usize>()).unwrap_or(u32::MAX);
        usage
    }

    fn fold(&mut self) -> Result<Progress, GenerateError> {
        let now = Instant::now();
        let mut batch = std::mem::take(&mut self.batch);
        let mut token_ids = batch.token_ids.as_slice();
        let mut failed = None;
        for row in &mut batch.rows {
            let (tokens, rest) = token_ids.split_at(row.num_tokens as usize);
            token_ids = rest;
            if let Some(End::Failed(failure)) = row.end.take_if(|end| matches!(end, End::Failed(_))) {
                failed = Some(*failure);
                break;
            }
            self.fold_row(row, tokens, now);
        }
        batch.clear();
        self.batch = batch;
        match failed {
            Some(failure) => Err(GenerateError::Worker(failure)),
            None if self.running == 0 => Ok(Progress::Done),
            None => Ok(Progress::Running),
        }
    }

    fn fold_row(&mut self, row: &mut Row, tokens: &[u32], now: Instant) {
        let index = row.choice as usize;
        let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.finish.is_none()) else { return };
        choice.cached_tokens = row.cached_tokens;
        choice.prompt_logprobs.append(&mut row.prompt_logprobs);
        let taken = choice.push_tokens(row, tokens);
        if taken > 0 {
            observe_tokens(&self.generator.metrics, choice, taken, now, (!self.saw_token).then_some(self.arrived));
            self.saw_token = true;
        }
        if choice.finish.is_some() {
            choice.end();
            self.running -= 1;
        }
        self.moved.push(index);
    }

    fn abort(&mut self) {
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if choice.finish.is_none() {
                choice.finish = Some(Finish::Abort);
                choice.end();
                self.moved.push(index);
            }
        }
        self.running = 0;
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.generator.lock().remove(&self.id);
        let metrics = &self.generator.metrics;
        metrics.cached_prompt_tokens.increment(self.usage().cached_tokens.into());
        for choice in &self.choices {
            metrics.request_output_tokens.record(f64::from(choice.num_tokens));
        }
        metrics.duration.record(self.arrived.elapsed().as_secs_f64());
    }
}

impl Choice {
    /// Tool calls whose arguments are whole.
    #[must_use]
    pub fn num_complete_calls(&self) -> u32 {
        self.fold.num_complete_calls()
    }

    /// Folds the row's tokens up to a stop string and notes how the choice ended. Returns how many were taken.
    fn push_tokens(&mut self, row: &mut Row, tokens: &[u32]) -> u32 {
        let ends_by_token = row.end == Some(End::Stop);
        let mut taken = 0;
        for (place, &token_id) in tokens.iter().enumerate() {
            let is_stop_token = ends_by_token && place + 1 == tokens.len();
            self.fold.push(token_id, is_stop_token, &mut self.delta);
            taken += 1;
            if let Some(matched) = self.fold.stopped() {
                self.finish = Some(Finish::StopString(matched.to_owned()));
                break;
            }
        }
        self.num_tokens += taken;
        if self.keeps_token_ids {
            self.token_ids.extend_from_slice(&tokens[..taken as usize]);
        }
        row.logprobs.truncate(taken as usize);
        self.logprobs.append(&mut row.logprobs);
        if self.finish.is_none() {
            self.finish = match row.end {
                Some(End::Stop) => Some(Finish::StopToken(tokens.last().copied().unwrap_or_default())),
                Some(End::Length) => Some(Finish::Length),
                Some(End::Abort) => Some(Finish::Abort),
                Some(End::Failed(_)) | None => None,
            };
        }
        taken
    }

    /// Releases held-back text, and the worker where it still computes.
    fn end(&mut self) {
        let is_cut = !matches!(self.finish, Some(Finish::StopToken(_)));
        self.fold.finish(is_cut, &mut self.delta);
        self.ticket = None;
    }
}

fn observe_tokens(metrics: &Metrics, choice: &mut Choice, taken: u32, now: Instant, first: Option<Instant>) {
    metrics.output_tokens.increment(taken.into());
    if let Some(arrived) = first {
        metrics.ttft.record((now - arrived).as_secs_f64());
    }
    if let Some(last) = choice.last_token_at {
        // Tokens that came together share the time since those before them.
        metrics.itl.record_many((now - last).as_secs_f64() / f64::from(taken), taken as usize);
    }
    choice.last_token_at = Some(now);
}

#[cfg(test)]
mod tests {
    use super::sample_seed;

    #[test]
    fn samples_get_seeds_of_their_own_and_the_first_keeps_the_clients() {
        let seeds: Vec<u64> = (0..4).map(|index| sample_seed(7, index)).collect();
        assert_eq!(seeds[0], 7);
        assert_eq!(seeds, (0..4).map(|index| sample_seed(7, index)).collect::<Vec<_>>());
        let distinct: std::collections::HashSet<_> = seeds.iter().collect();
        assert_eq!(distinct.len(), 4);
        assert_eq!(sample_seed(u64::MAX, 0), u64::MAX);
    }
}
