//! A request in progress: folds what its workers send into text, choice by choice, as far as somebody reads it.
//!
//! The text state of a choice outlives its worker: `survival` has another one go on after the last token, and the fold
//! never learns of it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use self::survival::Survival;
use super::attempts::Attempts;
use super::limits::{ReplayLimits, ReplayPlace};
use super::needs::Need;
use super::pace::Pace;
use super::place::{Hearing, Placement};
use super::retained::Retained;
use super::{Enforced, GenerateError, GenerateSpec, Generator};
use crate::chat::output::{Delta, OutputFold};
use crate::openai::logprobs::TokenLogprob;
use crate::openai::response::Usage;
use crate::text::tokenizer::Tokenizer;
use crate::worker::Failure;
use crate::worker::mailbox::{Batch, Cut, End, Mailbox, Row};
use crate::worker::pool::Life;
use crate::worker::submit::Submission;

mod survival;

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
    /// None once the choice has ended, and while it waits for another worker.
    placement: Option<Placement>,
    attempts: Attempts,
    /// What another worker would need to take over; none where none could.
    retained: Option<Retained>,
    /// Held until the first token after a replay.
    replay: Option<ReplayPlace>,
    /// Held likewise by one under which a worker died, from when workers are kept free for it.
    hearing: Option<Hearing>,
    /// The worker that died so, or was given up by its peer, unless it turns out to live.
    mourned: Option<Life>,
    /// Prompt scores that came already, and how many of them a repeated prompt brings once more.
    num_prompt_scores: usize,
    num_repeated_scores: usize,
    pace: Pace,
}

/// Whether a generation goes on after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Running,
    Done,
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
    constraint: Option<Enforced>,
    arrived: Instant,
    saw_token: bool,
    survival: Survival,
}

impl Generation {
    /// A request whose choices have not been submitted.
    pub(super) fn new(
        generator: Arc<Generator>,
        spec: &GenerateSpec,
        tokenizer: &Arc<Tokenizer>,
        arrived: Instant,
    ) -> Self {
        let num_choices = spec.prompts.len() * spec.n as usize;
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
            placement: None,
            attempts: Attempts::default(),
            retained: None,
            replay: None,
            hearing: None,
            mourned: None,
            num_prompt_scores: 0,
            num_repeated_scores: 0,
            pace: Pace::default(),
        });
        Self {
            id: spec.id,
            choices: choices.collect(),
            moved: Vec::new(),
            generator,
            mailbox: Arc::new(Mailbox::new(num_choices)),
            batch: Batch::default(),
            running: num_choices,
            prompt_lens: spec.prompts.iter().map(|prompt| prompt.token_ids.len()).collect(),
            constraint: spec.constraint.clone(),
            arrived,
            saw_token: false,
            survival: Survival::default(),
        }
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// Takes what holds its choices in their workers, in order, and what would take them elsewhere.
    pub(super) fn hold(&mut self, placements: Vec<Placement>, submissions: Vec<Submission>, needs: Vec<Need>) {
        self.survival.begin(needs, self.generator.can_resume());
        for ((choice, placement), submission) in self.choices.iter_mut().zip(placements).zip(submissions) {
            choice.placement = Some(placement);
            choice.retained = Retained::new(submission, &self.generator.limits);
        }
    }

    /// Waits for news and folds all that there is into `choices`; `moved` says which changed.
    ///
    /// # Errors
    /// The request failed as a whole. It must not be polled again.
    pub fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Result<Progress, GenerateError>> {
        self.moved.clear();
        if self.running == 0 {
            return Poll::Ready(Ok(Progress::Done));
        }
        loop {
            match self.mailbox.poll_take(context, &mut self.batch) {
                Poll::Ready(Ok(())) => {
                    if let Err(error) = self.fold() {
                        return Poll::Ready(Err(error));
                    }
                }
                Poll::Ready(Err(Cut::SlowClient)) => return Poll::Ready(Err(GenerateError::SlowClient)),
                Poll::Ready(Err(Cut::Aborted)) => {
                    self.abort();
                    return Poll::Ready(Ok(Progress::Done));
                }
                Poll::Pending => return self.poll_survival(context).map(Err),
            }
            if self.running == 0 {
                return Poll::Ready(Ok(Progress::Done));
            }
            if !self.moved.is_empty() {
                return Poll::Ready(Ok(Progress::Running));
            }
        }
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

    fn fold(&mut self) -> Result<(), GenerateError> {
        let now = Instant::now();
        let mut batch = std::mem::take(&mut self.batch);
        let mut token_ids = batch.token_ids.as_slice();
        let mut failed = None;
        for row in &mut batch.rows {
            let (tokens, rest) = token_ids.split_at(row.num_tokens as usize);
            token_ids = rest;
            if let Err(failure) = self.fold_row(row, tokens, now) {
                failed = Some(failure);
                break;
            }
        }
        batch.clear();
        self.batch = batch;
        failed.map_or(Ok(()), |failure| Err(self.explain(failure)))
    }

    fn explain(&self, failure: Failure) -> GenerateError {
        GenerateError::Worker(match &self.constraint {
            Some(enforced) => enforced.explain(failure),
            None => failure,
        })
    }

    fn fold_row(&mut self, row: &mut Row, tokens: &[u32], now: Instant) -> Result<(), Failure> {
        let index = row.choice as usize;
        let is_present = |choice: &&mut Choice| {
            choice.finish.is_none() && choice.placement.is_some() && choice.attempts.hears(row.origin)
        };
        let Some(choice) = self.choices.get_mut(index).filter(is_present) else { return Ok(()) };
        if let Some(End::Failed(failure)) = row.end.take_if(|end| matches!(end, End::Failed(_))) {
            return self.fail_attempt(index, row.origin.is_prefill_leg, *failure, now);
        }
        if row.origin.is_prefill_leg {
            return match row.end {
                Some(End::HandedOver) => {
                    choice.let_go_of_prefill();
                    Ok(())
                }
                Some(_) => {
                    let failure = Failure::lost("The worker that computed this prompt gave it up. Send it again.");
                    self.fail_attempt(index, true, failure, now)
                }
                None => Ok(()),
            };
        }
        if choice.num_tokens == 0 {
            choice.cached_tokens = row.cached_tokens;
        }
        choice.push_prompt_scores(&mut row.prompt_logprobs);
        let taken = choice.push_tokens(row, tokens);
        if taken > 0 {
            if !self.saw_token {
                self.generator.metrics.ttft.record((now - self.arrived).as_secs_f64());
                self.saw_token = true;
            }
            if let Some(ticket) = choice.placement.as_mut().and_then(|placement| placement.prefill_ticket.as_mut()) {
                ticket.note_survived();
            }
            choice.pace.note(taken, now, &self.generator.metrics);
            choice.keep_tokens(&tokens[..taken as usize], self.survival.keeps_tokens(), now);
        }
        if choice.finish.is_some() {
            if let Some(retained) = &choice.retained {
                self.generator.limits.absolve(|| retained.fingerprint());
            }
            choice.end();
            choice.pace.report(&self.generator.metrics);
            self.running -= 1;
        }
        self.moved.push(index);
        Ok(())
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
        for choice in &mut self.choices {
            choice.pace.report(metrics);
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
                Some(End::Abort | End::HandedOver) => Some(Finish::Abort),
                Some(End::Failed(_)) | None => None,
            };
        }
        taken
    }

    /// Adds scores of the prompt that have not come before.
    fn push_prompt_scores(&mut self, scores: &mut Vec<TokenLogprob>) {
        let repeated = self.num_repeated_scores.min(scores.len());
        self.num_repeated_scores -= repeated;
        self.num_prompt_scores += scores.len() - repeated;
        self.prompt_logprobs.extend(scores.drain(..).skip(repeated));
    }

    /// Keeps tokens for a worker that may have to take over. Where none could, or memory is short, what is kept goes.
    fn keep_tokens(&mut self, token_ids: &[u32], may_resume: bool, now: Instant) {
        self.replay = None;
        if let Some(hearing) = self.hearing.take() {
            hearing.trial.end_well(now);
        }
        if self.retained.as_mut().is_some_and(|retained| !may_resume || !retained.keep(token_ids)) {
            self.retained = None;
        }
    }

    /// A worker was not lost to this request after all.
    fn acquit(&mut self, worker: Life, limits: &ReplayLimits) {
        self.attempts.acquit();
        if let Some(retained) = &self.retained {
            limits.retract_death(retained.fingerprint(), worker);
        }
    }

    /// The decode leg has all that the prefill leg computed.
    fn let_go_of_prefill(&mut self) {
        let Some(placement) = &mut self.placement else { return };
        placement.prefill_ticket = None;
        if let Some(worker) = &placement.prefill_worker {
            worker.breaker().succeeded();
        }
    }

    /// Releases held-back text, and the worker where it still computes.
    fn end(&mut self) {
        let is_cut = !matches!(self.finish, Some(Finish::StopToken(_)));
        self.fold.finish(is_cut, &mut self.delta);
        if let Some(placement) = self.placement.take().filter(|_| self.finish != Some(Finish::Abort)) {
            placement.worker.breaker().succeeded();
        }
        self.retained = None;
        self.replay = None;
        self.hearing = None;
    }
}
