//! The one stream to a worker head that carries every request. What is submitted becomes wire types in `submit`, what
//! arrives is sorted in `dispatch`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic::Streaming;

use super::calls::{WorkerCalls, check_version};
use super::dispatch::{Arrival, BrokenStream, InFlight, Table};
use super::error::{WorkerError, describe};
use super::mailbox::{Mailbox, Origin};
use super::outbox::{Outbound, Outbox};
use super::submit::{Part, Submission};
use super::{Failure, Role, SILENCE_LIMIT, STALL_LIMIT, WorkerInfo, wire};
use crate::route::prefix::CacheChange;

/// Who the gateway is to a worker: for its logs, and to tell one start of the gateway from the next.
#[derive(Clone, Debug)]
pub struct GatewayIdentity {
    pub id: String,
    pub epoch: u64,
}

/// What a worker can hold.
#[derive(Clone, Copy, Debug)]
struct Room {
    page_tokens: u64,
    slots: u32,
}

/// When a worker last gave a sign that it computes.
#[derive(Debug)]
struct Progress {
    steps: u64,
    since: Instant,
}

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

    /// Whether a prefill worker that computes nothing must be hung, whatever its peers do: it has not even noticed all of
    /// `given` requests, or has slots and pages for every prompt that waits.
    fn owes_a_step(&self, given: usize, room: Room) -> bool {
        let count = |counter: &AtomicU32| u64::from(counter.load(Ordering::Relaxed));
        let (running, waiting) = (count(&self.running_requests), count(&self.waiting_requests));
        if running + waiting < given as u64 {
            return true;
        }
        let free_pages = count(&self.total_pages).saturating_sub(count(&self.used_pages));
        let waiting_tokens = self.waiting_prompt_tokens.load(Ordering::Relaxed);
        // Each prompt may leave its last page half empty.
        let waiting_pages = waiting_tokens.div_ceil(room.page_tokens.max(1)) + waiting;
        waiting_tokens > 0 && waiting_pages <= free_pages && running + waiting <= room.slots.into()
    }
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
    /// Opens a stream to the worker that `info` describes, and waits for its welcome: the two halves of it.
    ///
    /// # Errors
    /// The worker does not welcome this gateway, or is no longer the one that `info` describes.
    pub async fn open(
        calls: WorkerCalls,
        identity: &GatewayIdentity,
        info: &WorkerInfo,
    ) -> Result<(Arc<Self>, Inbound), WorkerError> {
        let outbox = Arc::new(Outbox::default());
        let frames = calls.stream(Outbound::new(outbox.clone(), identity.id.clone(), identity.epoch)).await?;
        let link = Arc::new(Self { outbox, table: Table::default(), load: Load::default(), calls });
        let progress = Progress { steps: 0, since: Instant::now() };
        let room = Room { page_tokens: info.page_size_tokens.into(), slots: info.max_running_requests };
        let heard = tokio::time::Instant::now();
        let mut inbound = Inbound { frames, sequence: 0, heard, link: link.clone(), role: info.role, room, progress };
        let Some(welcome) = inbound.next_frame().await?.welcome else {
            return Err(WorkerError::Refused("its first frame carries no welcome".into()));
        };
        check_version(welcome.protocol_version)?;
        if welcome.boot_epoch != info.boot_epoch {
            return Err(WorkerError::Broken("it restarted while it was being connected".into()));
        }
        Ok((link, inbound))
    }

    /// Submits one part of continuations; news of each arrives in `mailbox` under its choice and attempt.
    /// `prefill_us` is what the first one's prompt is expected to cost, whose pages the others share.
    ///
    /// None where the stream has ended.
    #[must_use]
    pub fn submit(
        self: &Arc<Self>,
        submissions: &[Submission],
        part: &Part,
        prefill_us: f64,
        mailbox: &Arc<Mailbox>,
    ) -> Option<Vec<Ticket>> {
        let arrivals = submissions.iter().enumerate().map(|(place, submission)| Arrival {
            choice: submission.choice,
            origin: Origin { attempt: submission.attempt, is_prefill_leg: matches!(part, Part::Prefill) },
            prefill_us: if place == 0 { prefill_us } else { 0.0 },
        });
        let keys = self.table.insert(mailbox, arrivals).ok()?;
        let tickets = keys.iter().map(|&key| Ticket { link: self.clone(), key, is_survived: false }).collect();
        self.outbox.submit(keys.into_iter().zip(submissions).map(|(key, submission)| submission.frame(key, part)));
        Some(tickets)
    }

    /// What is in flight on this stream.
    #[must_use]
    pub fn in_flight(&self) -> InFlight {
        self.table.in_flight()
    }

    /// Whether the worker has survived all that it was given here, and what was taken back from it for `rest`.
    #[must_use]
    pub fn has_survived_all(&self, rest: Duration) -> bool {
        self.table.has_survived_all(rest)
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
    /// The table has been told.
    is_survived: bool,
}

impl Ticket {
    /// The worker has done its part of the continuation, as another one's tokens show. Costs nothing from the second
    /// time on: every row of tokens says it anew.
    pub fn note_survived(&mut self) {
        if !std::mem::replace(&mut self.is_survived, true) {
            self.link.table.note_survived(self.key);
        }
    }
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
    /// When the worker last showed that it hears this gateway. A link may be cut in one direction only, and what such a
    /// worker reports of itself goes on arriving.
    heard: tokio::time::Instant,
    link: Arc<Link>,
    role: Role,
    room: Room,
    progress: Progress,
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.link.close(&Failure::lost("The stream to the worker was given up. Send the request again."));
    }
}

impl Inbound {
    /// Delivers one frame to its requests; what it says of the worker itself is returned.
    ///
    /// # Errors
    /// The stream is over, silent or corrupt, and must be closed.
    pub async fn deliver_next(&mut self) -> Result<News, WorkerError> {
        let frame = self.next_frame().await?;
        self.note_progress(&frame);
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

    /// Whether the worker has had requests of this gateway and computed no step for too long. Its head may go on echoing
    /// heartbeats and repeating old reports meanwhile.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.progress.since.elapsed() >= STALL_LIMIT
    }

    fn note_progress(&mut self, frame: &wire::WorkerFrame) {
        let reported = frame.load.as_ref().map(|load| load.steps);
        let has_work = match self.role {
            Role::Unified => self.link.in_flight().requests > 0,
            // One leg may wait for the other for as long as a prompt takes; what it then waits for has its own timers.
            Role::Prefill => self.link.load.owes_a_step(self.link.in_flight().requests, self.room),
            Role::Decode => self.link.load.running_requests.load(Ordering::Relaxed) > 0,
        };
        let has_moved = frame.step.is_some()
            || !frame.errors.is_empty()
            || reported.is_some_and(|steps| steps != self.progress.steps)
            || !has_work;
        if has_moved {
            self.progress.since = Instant::now();
        }
        self.progress.steps = reported.unwrap_or(self.progress.steps);
    }

    /// The next frame, numbered as it must be.
    async fn next_frame(&mut self) -> Result<wire::WorkerFrame, WorkerError> {
        let message = tokio::time::timeout_at(self.heard + SILENCE_LIMIT, self.frames.message());
        let frame = match message.await.map_err(|_| WorkerError::Silent)? {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(WorkerError::Broken("the worker closed it".into())),
            Err(status) => return Err(WorkerError::Broken(describe(&status))),
        };
        self.sequence += 1;
        if frame.sequence != self.sequence {
            return Err(BrokenStream::Gap { expected: self.sequence, received: frame.sequence }.into());
        }
        if frame.heartbeat.is_some() {
            self.heard = tokio::time::Instant::now();
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

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[tokio::test]
    async fn a_ticket_tells_the_table_once_and_its_own_entry_alone() {
        let link = Arc::new(Link {
            outbox: Arc::default(),
            table: Table::default(),
            load: Load::default(),
            calls: WorkerCalls::unconnected(),
        });
        let mailbox = Arc::new(Mailbox::new(2));
        let keys = link.table.insert(&mailbox, [Arrival::default(); 2]).unwrap();
        let mut tickets = keys.iter().map(|&key| Ticket { link: link.clone(), key, is_survived: false });
        let (mut first, mut again) = (tickets.next().unwrap(), tickets.next().unwrap());
        first.note_survived();
        assert!(!link.has_survived_all(Duration::ZERO), "the next attempt is another ticket");
        again.note_survived();
        assert!(link.has_survived_all(Duration::ZERO));
        link.table.forget_survivals();
        first.note_survived();
        again.note_survived();
        assert!(!link.has_survived_all(Duration::ZERO), "the table was told once more");
    }

    #[test]
    fn a_prefill_worker_owes_a_step_for_what_it_has_not_noticed_and_for_what_it_has_room_for() {
        let room = Room { page_tokens: 64, slots: 4 };
        let load = |[running, waiting, used_pages, waiting_tokens]: [u32; 4]| {
            let load = Load::default();
            load.record(&wire::LoadReport {
                running_requests: running,
                waiting_requests: waiting,
                used_pages,
                total_pages: 10,
                waiting_prompt_tokens: waiting_tokens.into(),
                ..wire::LoadReport::default()
            });
            load
        };
        assert!(!load([0, 0, 0, 0]).owes_a_step(0, room));
        assert!(load([0, 0, 0, 0]).owes_a_step(1, room), "it was given one and knows of none");
        assert!(!load([3, 0, 9, 0]).owes_a_step(3, room), "all prompts are computed, and wait for their peers");
        assert!(!load([3, 2, 9, 0]).owes_a_step(3, room), "other gateways have requests there too");
        assert!(load([1, 1, 5, 200]).owes_a_step(2, room));
        assert!(!load([1, 1, 6, 200]).owes_a_step(2, room), "pages may be wanting");
        assert!(!load([4, 1, 5, 10]).owes_a_step(5, room), "slots may be wanting");
    }
}
