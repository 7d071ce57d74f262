//! What a request does when a worker fails it: another one takes it up, and the client sees a pause.
//!
//! The tokens that are out go with the prompt, so that the new worker continues the same answer with the same noise;
//! detokenizer, stop strings and parsers are untouched.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;
use tracing::{debug, info};

use super::Generation;
use crate::generate::GenerateError;
use crate::generate::attempts::{Failed, REST, Verdict};
use crate::generate::limits::Death;
use crate::generate::needs::Need;
use crate::generate::place::{Heard, Placement, Search};
use crate::worker::pool::Life;
use crate::worker::{Failure, FailureKind, RESUME};

/// How long a request waits for a worker to take it over: as long as a small model takes to start again.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it looks for one meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_millis(25);

/// See the module.
#[derive(Default)]
pub(super) struct Survival {
    needs: Vec<Need>,
    keeps_tokens: bool,
    /// Choices without a worker.
    stranded: Vec<usize>,
    /// Lives of workers that failed this request.
    avoided: Vec<Life>,
    /// The failure that is answered when nobody takes over, and since when that is so.
    failure: Option<(Failure, Instant)>,
    nap: Option<Pin<Box<Sleep>>>,
}

impl Survival {
    pub(super) fn begin(&mut self, needs: Vec<Need>, keeps_tokens: bool) {
        self.needs = needs;
        self.keeps_tokens = keeps_tokens;
    }

    /// Whether some worker could go on after tokens that are out.
    pub(super) fn keeps_tokens(&self) -> bool {
        self.keeps_tokens
    }
}

impl Generation {
    /// The present attempt of a choice failed, in its prefill leg or where its tokens come from.
    ///
    /// # Errors
    /// The failure is the request's answer.
    pub(super) fn fail_attempt(
        &mut self,
        index: usize,
        is_prefill_leg: bool,
        failure: Failure,
        now: Instant,
    ) -> Result<(), Failure> {
        let choice = &mut self.choices[index];
        let num_tokens = choice.num_tokens;
        let Some(mut placement) = choice.placement.take() else { return Err(failure) };
        let of_prefill = is_prefill_leg || failure.kind == FailureKind::PeerFailed;
        let blamed = placement.prefill_worker.as_ref().filter(|_| of_prefill).unwrap_or(&placement.worker).clone();
        match failure.kind {
            FailureKind::Lost => blamed.breaker().lost(blamed.connection, now),
            FailureKind::PeerFailed => blamed.breaker().failed_peer(now),
            FailureKind::Internal => blamed.breaker().failed(now),
            _ => {}
        }
        let others_resume =
            || self.survival.keeps_tokens && (blamed.info.has_feature(RESUME) || self.generator.can_resume());
        let can_resume = choice.retained.is_some() && others_resume();
        let hearing = choice.hearing.take();
        let in_trial = hearing.as_ref().is_some_and(|hearing| hearing.trial.is_conclusive());
        let failed = Failed { kind: failure.kind, in_prefill_leg: is_prefill_leg, num_tokens, can_resume, in_trial };
        let verdict = match choice.attempts.fail(failed, now) {
            // Without what was submitted there is nothing to submit again.
            Verdict::Retry | Verdict::Replay if choice.retained.is_none() => Verdict::Fail,
            verdict => verdict,
        };
        if verdict == Verdict::GoOn {
            placement.prefill_ticket = None;
            (choice.placement, choice.hearing) = (Some(placement), hearing);
            return Ok(());
        }
        drop(placement);
        match hearing {
            Some(hearing) if failure.kind == FailureKind::PeerFailed => {
                hearing.trial.end_in_doubt(blamed.life(), now + REST);
            }
            hearing => drop(hearing),
        }
        if matches!(failure.kind, FailureKind::Lost | FailureKind::PeerFailed)
            && choice.attempts.is_suspect()
            && let Some(retained) = &choice.retained
        {
            choice.mourned = Some(blamed.life());
            // A peer that does not answer is rarely dead, and condemns nobody but in a trial.
            if failure.kind == FailureKind::Lost || in_trial {
                let death = Death { worker: blamed.life(), in_trial };
                self.generator.limits.note_death(retained.fingerprint(), death, now);
            }
        }
        let may_go_on = match verdict {
            Verdict::Fail | Verdict::GoOn => false,
            Verdict::Retry => self.generator.limits.take_retry(now),
            Verdict::Replay => true,
        };
        if !may_go_on {
            return Err(failure);
        }
        debug!(worker = %blamed.name, reason = %failure, attempt = choice.attempts.current, "a request goes elsewhere");
        self.survival.avoided.push(blamed.life());
        self.survival.stranded.push(index);
        self.survival.failure.get_or_insert((failure, now));
        Ok(())
    }

    /// Finds workers for stranded choices. Ready where the request has to end.
    pub(super) fn poll_survival(&mut self, context: &mut Context<'_>) -> Poll<GenerateError> {
        loop {
            let Some((failure, since)) = &self.survival.failure else { return Poll::Pending };
            let (is_late, kind) = (since.elapsed() >= PATIENCE, failure.kind);
            let is_hopeless = match self.take_up_stranded(kind) {
                Ok(is_hopeless) => is_hopeless,
                Err(failure) => return Poll::Ready(self.explain(failure)),
            };
            if self.survival.stranded.is_empty() {
                self.survival.failure = None;
                self.survival.nap = None;
                return Poll::Pending;
            }
            if is_late || is_hopeless || self.generator.pool.is_stopped() {
                let failure = self.survival.failure.take().map(|(failure, _)| failure);
                return Poll::Ready(self.explain(failure.unwrap_or_else(|| Failure::lost("No worker took it over."))));
            }
            let nap = self.survival.nap.insert(Box::pin(tokio::time::sleep(LOOK_INTERVAL)));
            if nap.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// Submits stranded choices where there is a worker for them. True where one has none, and none is to come.
    ///
    /// # Errors
    /// Workers died of the request.
    fn take_up_stranded(&mut self, kind: FailureKind) -> Result<bool, Failure> {
        if self.generator.pool.is_stopped() {
            return Ok(true);
        }
        let (mut is_hopeless, now) = (false, Instant::now());
        for index in std::mem::take(&mut self.survival.stranded) {
            let choice = &mut self.choices[index];
            if !choice.attempts.has_rested(now) {
                self.survival.stranded.push(index);
                continue;
            }
            if let Some(worker) = choice.mourned.take_if(|worker| self.generator.is_alive(*worker)) {
                choice.acquit(worker, &self.generator.limits);
            }
            if choice.attempts.is_condemned() {
                return Err(Failure::poison());
            }
            if choice.num_tokens > 0 && choice.replay.is_none() {
                choice.replay = self.generator.limits.begin_replay();
                if choice.replay.is_none() {
                    self.survival.stranded.push(index);
                    continue;
                }
            }
            match self.take_up(index, kind, now) {
                Heard::Placed(placement) => self.go_on_at(index, placement),
                Heard::Waits => self.survival.stranded.push(index),
                Heard::Nowhere => {
                    self.survival.stranded.push(index);
                    // One that was turned away waits only for those that are nearly there.
                    is_hopeless |= match kind {
                        FailureKind::Unavailable => !self.generator.pool.is_recovering(),
                        _ => !self.generator.may_come(),
                    };
                }
            }
        }
        Ok(is_hopeless)
    }

    /// Submits a choice anew: rather to workers that have not failed it, and in a trial where it is suspected.
    fn take_up(&mut self, index: usize, kind: FailureKind, now: Instant) -> Heard {
        let choice = &mut self.choices[index];
        let Some(retained) = &choice.retained else { return Heard::Nowhere };
        let submission = [retained.again(choice.attempts.current, self.arrived.elapsed())];
        let Survival { needs, avoided, .. } = &self.survival;
        let search = Search { submissions: &submission, needs, avoided };
        if choice.attempts.is_suspect() {
            return self.generator.hear(&search, &mut choice.hearing, &self.mailbox, now);
        }
        let mut placed = self.generator.place_newcomer(&search, &self.mailbox);
        if placed.is_err() && kind != FailureKind::Unavailable {
            placed = self.generator.place_newcomer(&Search { avoided: &[], ..search }, &self.mailbox);
        }
        let placement = placed.ok().and_then(|mut placements| placements.pop());
        placement.map_or(Heard::Nowhere, Heard::Placed)
    }

    fn go_on_at(&mut self, index: usize, placement: Placement) {
        let choice = &mut self.choices[index];
        let num_tokens = choice.num_tokens;
        info!(worker = %placement.worker.name, num_tokens, "a request goes on at another worker");
        let metrics = &self.generator.metrics;
        let counter = if num_tokens > 0 { &metrics.replays } else { &metrics.retries };
        counter.increment(1);
        choice.num_repeated_scores = if num_tokens > 0 { 0 } else { choice.num_prompt_scores };
        choice.placement = Some(placement);
    }
}
