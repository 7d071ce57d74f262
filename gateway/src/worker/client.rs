//! The one stream to a worker head that carries every request. Conversion between the wire and the gateway's own types
//! happens here and in `dispatch`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tonic::Streaming;

use super::calls::{WorkerCalls, WorkerError, describe};
use super::dispatch::{BrokenStream, InFlight, Table};
use super::mailbox::Mailbox;
use super::outbox::Outbox;
use super::{Failure, SILENCE_LIMIT, wire};
use crate::chat::constraint::Constraint;
use crate::openai::SamplingSpec;
use crate::route::prefix::CacheChange;

/// What a worker reported last about its queue and pages.
#[derive(Debug, Default)]
pub struct Load {
    pub running_requests: AtomicU32,
    pub waiting_requests: AtomicU32,
    pub used_pages: AtomicU32,
    pub total_pages: AtomicU32,
    pub waiting_prompt_tokens: AtomicU64,
    pub steps: AtomicU64,
}

impl Load {
    fn record(&self, report: &wire::LoadReport) {
        self.running_requests.store(report.running_requests, Ordering::Relaxed);
        self.waiting_requests.store(report.waiting_requests, Ordering::Relaxed);
        self.used_pages.store(report.used_pages, Ordering::Relaxed);
        self.total_pages.store(report.total_pages, Ordering::Relaxed);
        self.waiting_prompt_tokens.store(report.waiting_prompt_tokens, Ordering::Relaxed);
        self.steps.store(report.steps, Ordering::Relaxed);
    }
}

/// One continuation to be computed. All submissions of a client request go to one worker together.
#[derive(Clone, Debug)]
pub struct Submission {
    /// 128 random bits, minted by the gateway.
    pub request_id: u128,
    pub prompt_token_ids: Vec<u32>,
    pub sampling: SamplingSpec,
    pub sample: Sample,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: String,
    /// Shared by the choices of a request.
    pub constraint: Option<Arc<Constraint>>,
    /// Whether the prompt ends inside reasoning, which the constraint leaves alone.
    pub starts_in_reasoning: bool,
    /// What computing the prompt is expected to cost, for later choices of a worker.
    pub prefill_us: f64,
}

/// Place of a continuation among the `n` of one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// `request_id` of sample 0.
    pub group_id: u128,
    pub index: u32,
    pub size: u32,
}

/// A live stream. Every method is immediate; the stream's tasks do the waiting.
#[derive(Debug)]
pub struct Link {
    outbox: Arc<Outbox>,
    table: Table,
    pub load: Load,
    calls: WorkerCalls,
}

impl Link {
    /// The two halves of a stream that was just opened.
    pub(super) fn new(
        outbox: Arc<Outbox>,
        frames: Streaming<wire::WorkerFrame>,
        calls: WorkerCalls,
    ) -> (Arc<Self>, Inbound) {
        let link = Arc::new(Self { outbox, table: Table::default(), load: Load::default(), calls });
        (link.clone(), Inbound { frames, sequence: 0, link })
    }

    /// Submits continuations; news of submission i arrives in `mailbox` as choice i.
    ///
    /// # Errors
    /// The stream has ended; the submissions come back.
    pub fn submit(
        self: &Arc<Self>,
        submissions: Vec<Submission>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Ticket>, Vec<Submission>> {
        let costs_us = submissions.iter().map(|submission| submission.prefill_us);
        let Ok(keys) = self.table.insert(mailbox, costs_us) else { return Err(submissions) };
        let tickets = keys.iter().map(|&key| Ticket { link: self.clone(), key }).collect();
        self.outbox.submit(keys.into_iter().zip(submissions).map(|(key, submission)| submit_frame(key, submission)));
        Ok(tickets)
    }

    /// What is in flight on this stream.
    #[must_use]
    pub fn in_flight(&self) -> InFlight {
        self.table.in_flight()
    }

    /// Unary calls to the same worker.
    #[must_use]
    pub fn calls(&self) -> &WorkerCalls {
        &self.calls
    }

    /// Ends the stream and every request on it.
    pub fn close(&self, failure: &Failure) {
        self.outbox.close();
        self.table.close(failure);
    }
}

/// Holds one continuation in the worker: dropping it aborts what has not ended.
#[derive(Debug)]
pub struct Ticket {
    link: Arc<Link>,
    key: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.link.table.remove(self.key) {
            self.link.outbox.abort(self.key);
        }
    }
}

/// What a frame says of its worker rather than of requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// The worker accepts no further submits.
    pub is_draining: bool,
    pub cache_changes: Vec<CacheChange>,
}

/// The worker's half of the stream. Dropping it ends the gateway's half and every request on it as well.
#[derive(Debug)]
pub struct Inbound {
    frames: Streaming<wire::WorkerFrame>,
    sequence: u64,
    link: Arc<Link>,
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.link.close(&Failure::unavailable("The stream to the worker was given up. Send the request again."));
    }
}

impl Inbound {
    /// Delivers one frame to its requests; what it says of the worker itself is returned.
    ///
    /// # Errors
    /// The stream is over, silent or corrupt, and must be closed.
    pub async fn deliver_next(&mut self) -> Result<News, WorkerError> {
        let frame = self.next_frame().await?;
        if let Some(step) = &frame.step {
            for key in self.link.table.step(step)? {
                self.link.outbox.abort(key);
            }
        }
        for error in frame.errors {
            self.link.table.fail(error);
        }
        if let Some(report) = &frame.load {
            self.link.load.record(report);
        }
        let cache_changes = frame.kv_events.into_iter().filter_map(|event| event.event).map(cache_change);
        Ok(News { is_draining: frame.draining, cache_changes: cache_changes.collect() })
    }

    /// The next frame, numbered as it must be.
    pub(super) async fn next_frame(&mut self) -> Result<wire::WorkerFrame, WorkerError> {
        let message = tokio::time::timeout(SILENCE_LIMIT, self.frames.message());
        let frame = match message.await.map_err(|_| WorkerError::Silent)? {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(WorkerError::Broken("the worker closed it".into())),
            Err(status) => return Err(WorkerError::Broken(describe(&status))),
        };
        self.sequence += 1;
        if frame.sequence != self.sequence {
            return Err(BrokenStream::Gap { expected: self.sequence, received: frame.sequence }.into());
        }
        Ok(frame)
    }
}

fn cache_change(event: wire::kv_event::Event) -> CacheChange {
    match event {
        wire::kv_event::Event::Stored(stored) => CacheChange::Stored(stored.page_hashes),
        wire::kv_event::Event::Removed(removed) => CacheChange::Removed(removed.page_hashes),
        wire::kv_event::Event::Cleared(_) => CacheChange::Cleared,
    }
}

fn submit_frame(key: u64, submission: Submission) -> wire::Submit {
    let Submission { request_id, prompt_token_ids, sampling, sample, priority, deadline_ms, cache_salt, .. } =
        submission;
    let group = (sample.size > 1).then(|| wire::SampleGroup {
        group_id: sample.group_id.to_be_bytes().to_vec(),
        index: sample.index,
        size: sample.size,
    });
    wire::Submit {
        key,
        request_id: request_id.to_be_bytes().to_vec(),
        prompt_token_ids,
        sampling: Some(sampling_frame(sampling)),
        priority,
        deadline_ms,
        cache_salt,
        sample_group: group,
        constraint: submission.constraint.map(|constraint| constraint_frame(&constraint)),
        starts_in_reasoning: submission.starts_in_reasoning,
        ..Default::default()
    }
}

fn constraint_frame(constraint: &Constraint) -> wire::submit::Constraint {
    let text = constraint.text().to_owned();
    match constraint {
        Constraint::JsonSchema(_) => wire::submit::Constraint::JsonSchema(text),
        Constraint::Regex(_) => wire::submit::Constraint::Regex(text),
        Constraint::Ebnf(_) => wire::submit::Constraint::Ebnf(text),
        Constraint::StructuralTag(_) => wire::submit::Constraint::StructuralTag(text),
    }
}

fn sampling_frame(sampling: SamplingSpec) -> wire::Sampling {
    let logit_bias = sampling.logit_bias.into_iter().map(|(token_id, bias)| wire::LogitBias { token_id, bias });
    wire::Sampling {
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        logit_bias: logit_bias.collect(),
        seed: sampling.seed,
        stop_token_ids: sampling.stop_token_ids,
        ignore_eos: sampling.ignore_eos,
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        thinking_budget: sampling.thinking_budget,
        logit_processors: sampling.logit_processors,
    }
}
