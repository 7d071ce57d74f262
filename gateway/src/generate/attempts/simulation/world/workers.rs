//! What simulated workers do: compute rows, die, refuse; and how their rows reach requests.

use std::time::Duration;

use rand::RngExt;

use super::{Leg, News, UNNOTICED_MS, World, token};
use crate::worker::FailureKind;
use crate::worker::mailbox::Origin;

impl World {
    /// One row of one leg, or the death that a deadly prompt is.
    pub(super) fn compute(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        let is_up = self.workers[number].down_until.is_none() && self.workers[number].is_dying_until.is_none();
        let worker = &mut self.workers[number];
        if !is_up || worker.legs.is_empty() {
            return;
        }
        let place = self.random.random_range(0..worker.legs.len());
        let leg = &mut worker.legs[place];
        if self.requests[leg.request].is_deadly && !leg.origin.is_prefill_leg {
            return; // it waits for a prompt that nobody survives
        }
        if self.requests[leg.request].is_deadly {
            self.requests[leg.request].victims += 1;
            let Leg { request, origin, .. } = *leg;
            let peer = self.requests[request].pair.filter(|_| self.random.random());
            let unnoticed = Duration::from_millis(self.random.random_range(0..UNNOTICED_MS));
            worker.is_dying_until = Some(self.now + unnoticed);
            if let Some((_, decode)) = peer {
                // Its connection to the dead rank ends at once.
                let (origin, peer) = (Origin { is_prefill_leg: false, ..origin }, &mut self.workers[decode]);
                peer.legs.retain(|leg| leg.request != request);
                peer.stream.push_back((request, origin, News::Failed(FailureKind::PeerFailed)));
            }
            return;
        }
        let news = match leg.origin.is_prefill_leg {
            true => News::HandedOver,
            false if leg.next < leg.end => News::Token(token(leg.request, leg.next)),
            false => News::Last,
        };
        leg.next += 1;
        let row = (leg.request, leg.origin, news);
        if matches!(news, News::HandedOver | News::Last) {
            worker.legs.swap_remove(place);
        }
        worker.stream.push_back(row);
    }

    /// The process is gone, and everybody on its stream hears of it in time.
    pub(in super::super) fn die(&mut self, number: usize) {
        let kept = self.random.random_range(0..=self.workers[number].stream.len());
        let worker = &mut self.workers[number];
        // The end of the stream is lost with the worker, ends of requests included.
        let cut: Vec<_> = worker.stream.drain(kept..).map(|(request, origin, _)| (request, origin)).collect();
        let mut lost: Vec<_> = worker.legs.drain(..).map(|leg| (leg.request, leg.origin)).collect();
        lost.extend(cut);
        lost.sort_by_key(|(request, origin)| (*request, origin.attempt));
        lost.dedup();
        worker
            .stream
            .extend(lost.into_iter().map(|(request, origin)| (request, origin, News::Failed(FailureKind::Lost))));
        worker.num_streams += 1;
        worker.is_dying_until = None;
        worker.untried.clear();
        worker.down_until = Some(self.now + Duration::from_millis(self.random.random_range(10..3_000)));
    }

    /// A worker turns a leg down, or a peer is out of reach.
    pub(super) fn refuse(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        let kind = match self.random.random_range(0..3) {
            0 if number >= self.num_prefills => FailureKind::PeerFailed,
            1 => FailureKind::Internal,
            _ => FailureKind::Unavailable,
        };
        let worker = &mut self.workers[number];
        let Some(leg) = worker.legs.pop() else { return };
        worker.stream.push_back((leg.request, leg.origin, News::Failed(kind)));
    }

    /// One row of any worker reaches its request.
    pub(super) fn deliver(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        self.deliver_from(number);
    }

    /// The oldest row of this worker's streams does.
    pub(in super::super) fn deliver_from(&mut self, number: usize) {
        let Some((index, origin, news)) = self.workers[number].stream.pop_front() else { return };
        self.workers[number].untried.remove(&(index, origin.attempt));
        let request = &mut self.requests[index];
        if request.ends > 0 || request.pair.is_none() || !request.attempts.hears(origin) {
            return;
        }
        match news {
            News::Token(id) => {
                assert_eq!(id, token(index, request.given.len()), "every token comes once, in order");
                request.given.push(id);
                if let Some((trial, _)) = request.hearing.take() {
                    trial.end_well(self.now);
                }
                if let Some((prefill, _)) = request.pair {
                    self.workers[prefill].untried.remove(&(index, origin.attempt));
                }
            }
            News::HandedOver => self.workers[number].breaker.succeeded(),
            News::Last => {
                assert_eq!(request.given.len(), request.length, "nothing is missing");
                self.workers[number].breaker.succeeded();
                self.release(index);
                self.end(index);
            }
            News::Failed(kind) => self.fail(index, number, origin.is_prefill_leg, kind),
        }
    }
}
