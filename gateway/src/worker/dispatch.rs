//! Sorts the frames of one worker stream into the mailboxes of the requests they speak of.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::mailbox::{Cut, End, Mailbox, Origin, Row};
use super::{Failure, FailureKind, wire};
use crate::openai::logprobs::TokenLogprob;

/// A stream whose frames cannot be trusted any more.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BrokenStream {
    #[error("frame {received} arrived where frame {expected} was due")]
    Gap { expected: u64, received: u64 },
    #[error("a step frame's columns differ in length ({0})")]
    Columns(&'static str),
}

/// Requests in flight on one stream. A key leaves the table with its last row, when it is aborted, or with the stream.
#[derive(Debug, Default)]
pub(super) struct Table {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Keys are numbered here, so that nobody can choose them to collide.
    entries: HashMap<u64, Entry, foldhash::fast::RandomState>,
    closed: Option<Failure>,
    last_key: u64,
    /// Of all entries.
    pending_prefill_us: f64,
    /// Entries that have not been survived yet.
    num_untried: usize,
    /// When such a one was last taken back, which its worker may still be computing.
    taken_back_at: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    mailbox: Arc<Mailbox>,
    choice: u32,
    origin: Origin,
    /// Expected cost of its prompt until its first token is out, 0 from then on.
    pending_prefill_us: f64,
    /// The worker has given a token of it, and lives.
    is_survived: bool,
}

/// One continuation as it enters the table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Arrival {
    pub choice: u32,
    pub origin: Origin,
    /// What its prompt is expected to cost, microseconds.
    pub prefill_us: f64,
}

/// What the requests of a stream still ask of its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InFlight {
    pub requests: usize,
    /// Expected cost of the prompts whose first token is not out, microseconds.
    pub pending_prefill_us: f64,
}

impl State {
    fn remove(&mut self, key: u64) -> Option<Entry> {
        let entry = self.entries.remove(&key)?;
        self.settle(entry.pending_prefill_us);
        self.num_untried -= usize::from(!entry.is_survived);
        Some(entry)
    }

    /// Removes what the worker has not answered.
    fn take_back(&mut self, key: u64) -> bool {
        let entry = self.remove(key);
        if entry.as_ref().is_some_and(|entry| !entry.is_survived) {
            self.taken_back_at = Some(Instant::now());
        }
        entry.is_some()
    }

    /// Takes off what is no longer pending. An empty table owes nothing, whatever rounding has left.
    fn settle(&mut self, cost_us: f64) {
        self.pending_prefill_us = if self.entries.is_empty() { 0.0 } else { self.pending_prefill_us - cost_us };
    }
}

impl Table {
    /// Registers one key for each of `arrivals`.
    ///
    /// # Errors
    /// The stream has ended; the failure says why.
    pub(super) fn insert(
        &self,
        mailbox: &Arc<Mailbox>,
        arrivals: impl IntoIterator<Item = Arrival>,
    ) -> Result<Vec<u64>, Failure> {
        let mut state = self.lock();
        if let Some(failure) = &state.closed {
            return Err(failure.clone());
        }
        let keys = arrivals.into_iter().map(|Arrival { choice, origin, prefill_us }| {
            state.last_key += 1;
            let key = state.last_key;
            state.pending_prefill_us += prefill_us;
            state.num_untried += 1;
            let mailbox = mailbox.clone();
            let entry = Entry { mailbox, choice, origin, pending_prefill_us: prefill_us, is_survived: false };
            state.entries.insert(key, entry);
            key
        });
        Ok(keys.collect())
    }

    /// Forgets a key; false where it had already ended.
    pub(super) fn remove(&self, key: u64) -> bool {
        self.lock().take_back(key)
    }

    /// The worker has survived this one, though it has not said so.
    pub(super) fn note_survived(&self, key: u64) {
        let mut state = self.lock();
        if let Some(entry) = state.entries.get_mut(&key)
            && !std::mem::replace(&mut entry.is_survived, true)
        {
            state.num_untried -= 1;
        }
    }

    /// As though nobody had told.
    #[cfg(test)]
    pub(super) fn forget_survivals(&self) {
        let mut state = self.lock();
        state.entries.values_mut().for_each(|entry| entry.is_survived = false);
        state.num_untried = state.entries.len();
    }

    /// Whether nothing is left there of which the worker may die: every request has given a token or was answered, and
    /// what was taken back was so for as long as `rest`.
    pub(super) fn has_survived_all(&self, rest: Duration) -> bool {
        let state = self.lock();
        state.num_untried == 0 && state.taken_back_at.is_none_or(|at| at.elapsed() >= rest)
    }

    pub(super) fn in_flight(&self) -> InFlight {
        let state = self.lock();
        InFlight { requests: state.entries.len(), pending_prefill_us: state.pending_prefill_us }
    }

    /// Ends every request in flight with `failure`, and every later `insert`.
    pub(super) fn close(&self, failure: &Failure) {
        let entries = {
            let mut state = self.lock();
            state.closed.get_or_insert_with(|| failure.clone());
            state.pending_prefill_us = 0.0;
            state.num_untried = 0;
            std::mem::take(&mut state.entries)
        };
        for entry in entries.into_values() {
            deliver_failure(&entry, failure.clone());
        }
    }

    /// Delivers the rows of one step. Keys whose client was cut are returned: the worker is to be told to stop.
    pub(super) fn step(&self, step: &wire::StepFrame) -> Result<Vec<u64>, BrokenStream> {
        let columns = Columns::check(step)?;
        let mut cut_keys = Vec::new();
        let mut wakers = Vec::with_capacity(step.keys.len());
        {
            let mut state = self.lock();
            let mut token_ids = step.token_ids.as_slice();
            let mut logprobs = ScoreReader::new(step.logprobs.as_ref());
            let mut prompt_logprobs = ScoreReader::new(step.prompt_logprobs.as_ref());
            for index in 0..columns.num_rows {
                let num_tokens = step.token_counts[index];
                let (tokens, rest) = token_ids.split_at(num_tokens as usize);
                token_ids = rest;
                let row_logprobs = logprobs.take_row(index);
                let row_prompt_logprobs = prompt_logprobs.take_row(index);
                let key = step.keys[index];
                let Some(entry) = state.entries.get_mut(&key) else { continue };
                let is_first = num_tokens > 0 && !std::mem::replace(&mut entry.is_survived, true);
                let cost_us = if is_first { std::mem::take(&mut entry.pending_prefill_us) } else { 0.0 };
                let row = Row {
                    choice: entry.choice,
                    origin: entry.origin,
                    num_tokens,
                    cached_tokens: step.cached_tokens[index],
                    logprobs: row_logprobs,
                    prompt_logprobs: row_prompt_logprobs,
                    end: end_of(step.finish_reasons[index]),
                };
                let ended = row.end.is_some();
                match entry.mailbox.push(row, tokens) {
                    Ok(waker) => wakers.extend(waker),
                    Err(Cut::SlowClient | Cut::Aborted) if ended => {}
                    Err(_) => cut_keys.push(key),
                }
                state.num_untried -= usize::from(is_first);
                state.settle(cost_us);
                if ended {
                    state.remove(key);
                }
            }
            for &key in &cut_keys {
                state.take_back(key);
            }
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
        Ok(cut_keys)
    }

    /// Ends one request with the worker's error.
    pub(super) fn fail(&self, error: wire::RequestError) {
        let Some(entry) = self.lock().remove(error.key) else { return };
        deliver_failure(&entry, failure_of(error));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn deliver_failure(entry: &Entry, failure: Failure) {
    let (choice, origin) = (entry.choice, entry.origin);
    let row = Row { choice, origin, end: Some(End::Failed(Box::new(failure))), ..Row::default() };
    // A request that was cut has its own ending.
    if let Ok(Some(waker)) = entry.mailbox.push(row, &[]) {
        waker.wake();
    }
}

fn end_of(reason: i32) -> Option<End> {
    match wire::FinishReason::try_from(reason).unwrap_or(wire::FinishReason::Unspecified) {
        wire::FinishReason::Unspecified => None,
        wire::FinishReason::Stop => Some(End::Stop),
        wire::FinishReason::Length => Some(End::Length),
        wire::FinishReason::Abort => Some(End::Abort),
        wire::FinishReason::HandedOver => Some(End::HandedOver),
    }
}

fn failure_of(error: wire::RequestError) -> Failure {
    let kind = match error.code() {
        wire::ErrorCode::InvalidArgument => FailureKind::InvalidArgument,
        wire::ErrorCode::Unimplemented => FailureKind::Unimplemented,
        wire::ErrorCode::Unavailable => FailureKind::Unavailable,
        wire::ErrorCode::PeerFailed => FailureKind::PeerFailed,
        wire::ErrorCode::ResourceExhausted => FailureKind::Overloaded,
        wire::ErrorCode::DeadlineExceeded => FailureKind::DeadlineExceeded,
        wire::ErrorCode::Internal | wire::ErrorCode::Unspecified => FailureKind::Internal,
    };
    Failure { kind, field: Some(error.field).filter(|field| !field.is_empty()), message: error.message }
}

/// Proof that a step frame's columns fit together, so that rows can be cut out of them by index.
struct Columns {
    num_rows: usize,
}

impl Columns {
    fn check(step: &wire::StepFrame) -> Result<Self, BrokenStream> {
        let num_rows = step.keys.len();
        let same = |length: usize, column| if length == num_rows { Ok(()) } else { Err(BrokenStream::Columns(column)) };
        same(step.token_counts.len(), "token_counts")?;
        same(step.finish_reasons.len(), "finish_reasons")?;
        same(step.cached_tokens.len(), "cached_tokens")?;
        if !sums_to(&step.token_counts, step.token_ids.len()) {
            return Err(BrokenStream::Columns("token_ids"));
        }
        for scores in [&step.logprobs, &step.prompt_logprobs].into_iter().flatten() {
            let fits = scores.rows.len() == scores.counts.len()
                && scores.rows.iter().all(|&row| (row as usize) < num_rows)
                && scores.rows.windows(2).all(|pair| pair[0] < pair[1])
                && sums_to(&scores.counts, scores.token_ids.len())
                && scores.logprobs.len() == scores.token_ids.len()
                && scores.top_counts.len() == scores.token_ids.len()
                && sums_to(&scores.top_counts, scores.top_token_ids.len())
                && scores.top_logprobs.len() == scores.top_token_ids.len();
            if !fits {
                return Err(BrokenStream::Columns("logprobs"));
            }
        }
        Ok(Self { num_rows })
    }
}

fn sums_to(counts: &[u32], total: usize) -> bool {
    counts.iter().map(|&count| u64::from(count)).sum::<u64>() == total as u64
}

/// Walks checked log-probability columns row by row.
struct ScoreReader<'a> {
    columns: Option<&'a wire::LogprobColumns>,
    row: usize,
    token: usize,
    top: usize,
}

impl<'a> ScoreReader<'a> {
    fn new(columns: Option<&'a wire::LogprobColumns>) -> Self {
        Self { columns, row: 0, token: 0, top: 0 }
    }

    /// Scores of frame row `index`; rows are asked for in ascending order.
    fn take_row(&mut self, index: usize) -> Vec<TokenLogprob> {
        let Some(columns) = self.columns else { return Vec::new() };
        if columns.rows.get(self.row).is_none_or(|&row| row as usize != index) {
            return Vec::new();
        }
        let count = columns.counts[self.row] as usize;
        self.row += 1;
        let tokens = self.token..self.token + count;
        self.token = tokens.end;
        tokens.map(|token| self.score(columns, token)).collect()
    }

    fn score(&mut self, columns: &wire::LogprobColumns, token: usize) -> TokenLogprob {
        let tops = self.top..self.top + columns.top_counts[token] as usize;
        self.top = tops.end;
        TokenLogprob {
            token_id: columns.token_ids[token],
            logprob: Some(columns.logprobs[token]),
            top: tops.map(|top| (columns.top_token_ids[top], columns.top_logprobs[top])).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
