//! The gateway: one request, submitted to both workers at once, and begun again once when an attempt fails.
//!
//! `Attempts` of `gateway/src/generate/attempts.rs` with room for two attempts, and the `Placement` whose dropping aborts
//! both legs. A gateway that dies forgets the request; its client sees the connection break.

use crate::breach::Breach;
use crate::decode::NUM_TOKENS;
use crate::links::{Stream, Worker, free_id, take_first};
use crate::messages::{Attempt, Command, Row};
use crate::variant::Variant;

/// What the client got in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    Whole,
    Error,
    /// The client left, or the gateway died.
    Cut,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gateway {
    pub attempt: Attempt,
    pub num_tokens: u8,
    /// Tokens that were out when the present attempt began.
    pub num_before: u8,
    pub answer: Option<Answer>,
    /// Per worker: its stream, and whether it holds a leg whose end is not known.
    pub streams: [u8; 2],
    pub holds: [bool; 2],
}

impl Gateway {
    /// Submits the present attempt to both workers.
    pub fn submit(&mut self, streams: &mut [Stream]) {
        self.holds = [true, true];
        let peer_epoch = self.stream(Worker::Prefill, streams).map_or(0, |stream| stream.epoch);
        let command = Command::Submit { attempt: self.attempt, resumed: self.num_tokens, peer_epoch };
        Worker::BOTH.into_iter().for_each(|worker| self.command(worker, command, streams));
    }

    /// Takes the next row of a stream.
    pub fn hear(&mut self, index: usize, streams: &mut [Stream], variant: Variant, breach: &mut Option<Breach>) {
        let worker = streams[index].worker;
        let Some(row) = take_first(&mut streams[index].up) else { return };
        let is_heard = row.attempt() == self.attempt || variant == Variant::EveryRowHeard;
        if self.answer.is_some() || !is_heard {
            return;
        }
        match row {
            Row::Token { index, .. } | Row::Last { index, .. } => {
                if index != self.num_tokens {
                    breach.get_or_insert(Breach::TokenOutOfOrder);
                }
                self.num_tokens += 1;
            }
            Row::HandedOver(_) | Row::PeerFailed(_) => {}
        }
        match row {
            Row::Token { .. } => {}
            Row::Last { .. } => {
                self.holds[worker as usize] = false;
                self.end(Answer::Whole, streams, breach);
            }
            Row::HandedOver(_) => self.holds[worker as usize] = false,
            Row::PeerFailed(_) => {
                self.holds[worker as usize] = false;
                self.fail(worker, streams, variant, breach);
            }
        }
    }

    /// A stream has ended: whatever was on it is lost, and another one begins.
    pub fn lose(
        &mut self,
        (index, epoch): (usize, u8),
        streams: &mut Vec<Stream>,
        variant: Variant,
        breach: &mut Option<Breach>,
    ) {
        let worker = streams[index].worker;
        (streams[index].gateway_end, streams[index].up) = (false, Vec::new());
        self.streams[worker as usize] = open(worker, epoch, streams);
        if std::mem::take(&mut self.holds[worker as usize]) && self.answer.is_none() {
            self.fail(worker, streams, variant, breach);
        }
    }

    /// Ends the request and aborts what is left of it.
    pub fn end(&mut self, answer: Answer, streams: &mut [Stream], breach: &mut Option<Breach>) {
        if self.answer.replace(answer).is_some() {
            breach.get_or_insert(Breach::AnsweredTwice);
        }
        self.release(streams);
    }

    fn fail(&mut self, worker: Worker, streams: &mut [Stream], variant: Variant, breach: &mut Option<Breach>) {
        let num_had = if variant == Variant::AnyTokenIsEnough { 0 } else { self.num_before };
        if worker == Worker::Prefill && self.num_tokens > num_had {
            return; // the decode leg of this attempt has all that the other one computed
        }
        if self.attempt > 0 || self.num_tokens >= NUM_TOKENS {
            return self.end(Answer::Error, streams, breach);
        }
        self.release(streams);
        self.attempt += 1;
        self.num_before = self.num_tokens;
        self.submit(streams);
    }

    /// What dropping a placement does.
    fn release(&mut self, streams: &mut [Stream]) {
        for worker in Worker::BOTH {
            if std::mem::take(&mut self.holds[worker as usize]) {
                self.command(worker, Command::Abort(self.attempt), streams);
            }
        }
    }

    fn command(&self, worker: Worker, command: Command, streams: &mut [Stream]) {
        let id = self.streams[worker as usize];
        if let Some(stream) = streams.iter_mut().find(|stream| stream.id == id && !stream.is_cut) {
            stream.down.push(command);
        }
    }

    fn stream<'a>(&self, worker: Worker, streams: &'a [Stream]) -> Option<&'a Stream> {
        streams.iter().find(|stream| stream.id == self.streams[worker as usize])
    }
}

/// Begins a stream; its number.
pub(crate) fn open(worker: Worker, epoch: u8, streams: &mut Vec<Stream>) -> u8 {
    let id = free_id(streams.iter().map(|stream| stream.id));
    let (down, up) = (Vec::new(), Vec::new());
    streams.push(Stream { id, worker, epoch, down, up, gateway_end: true, worker_end: true, is_cut: false });
    id
}
