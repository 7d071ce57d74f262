//! What is between the parts: streams of rows and connections of legs. Messages of one direction stay in order, and each
//! end learns in its own time that the other one is gone.

use crate::messages::{Command, Content, FromDecode, FromPrefill, Read, Row};
use crate::sending::SendingLeg;

/// The two workers, as places in arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Worker {
    Prefill,
    Decode,
}

impl Worker {
    pub const BOTH: [Self; 2] = [Self::Prefill, Self::Decode];
}

/// A `Connect` stream between the gateway and a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    pub id: u8,
    pub worker: Worker,
    /// Of the worker, when the stream began.
    pub epoch: u8,
    pub down: Vec<Command>,
    pub up: Vec<Row>,
    /// Ends that have not noticed any end.
    pub gateway_end: bool,
    pub worker_end: bool,
    /// Nothing that is sent now arrives, and what is under way may not.
    pub is_cut: bool,
}

/// A connection of a decode leg to the prefill worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    pub id: u8,
    /// Which decode leg, and which prefill leg once `wanted`: the key of both.
    pub key: u8,
    pub wanted: bool,
    pub to_prefill: Vec<FromDecode>,
    pub to_decode: Vec<Item>,
    /// The leg that the line still asks, where the transfer has parted with it.
    pub former_leg: Option<SendingLeg>,
    pub prefill_end: bool,
    pub decode_end: bool,
    pub is_cut: bool,
}

/// What stands in the prefill side's line to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Item {
    /// Said, after the bytes of a page where it is the end of an answer.
    Said(FromPrefill, Option<Content>),
    /// A page that is to be copied.
    Serve(Read),
    /// It is copied, and its generation not looked at yet.
    Copied(Read, Content),
}

impl Connection {
    /// The first thing that the prefill side has yet to do before the rest of its line can go.
    #[must_use]
    pub fn unfinished(&self) -> Option<usize> {
        self.to_decode.iter().position(|item| !matches!(item, Item::Said(..)))
    }

    /// What the prefill side has not sent yet is never sent.
    pub(crate) fn shut(&mut self) {
        self.to_decode.truncate(self.unfinished().unwrap_or(self.to_decode.len()));
        self.former_leg = None;
    }
}

/// The lowest number that none of these has.
pub(crate) fn free_id(taken: impl Iterator<Item = u8> + Clone) -> u8 {
    (0..=u8::MAX).find(|id| taken.clone().all(|other| other != *id)).unwrap_or(u8::MAX)
}

/// The first of these, taken out.
pub(crate) fn take_first<T>(line: &mut Vec<T>) -> Option<T> {
    (!line.is_empty()).then(|| line.remove(0))
}
