//! What strikes from outside, each kind at most once in a course of events.

use crate::decode::Decode;
use crate::gateway::Answer;
use crate::links::{Connection, Item, Stream, Worker};
use crate::messages::{Content, FromPrefill};
use crate::prefill::{Leg, Prefill};
use crate::world::{Event, State, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Its client has enough.
    ClientLeaves,
    /// The prefill worker takes the pages of a leg away before it has its token.
    Preempts,
    /// Somebody else gets a page of the prefill worker, writes it and gives it back.
    ReusesPage,
    CutsPrefillStream,
    CutsDecodeStream,
    CutsConnection,
    /// A command is lost on its way. In truth frames are numbered, so that the next one would cut the stream; nobody
    /// notices here. One of both: if neither worker hears of a request, nobody is left to notice.
    LosesPrefillCommand,
    LosesDecodeCommand,
    /// A message of a leg is lost, or comes twice: more than TCP would do.
    LosesMessageToPrefill,
    LosesMessageToDecode,
    RepeatsMessageToPrefill,
    RepeatsMessageToDecode,
    DamagesPage,
    LengthensPage,
    RestartsPrefill,
    RestartsDecode,
    RestartsGateway,
    /// A timer runs out though its peer is only slow.
    EndsLeaseEarly,
    LosesPatienceEarly,
}

/// Which kinds have struck.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults(u32);

impl Faults {
    #[must_use]
    pub fn num_struck(self) -> u32 {
        self.0.count_ones()
    }

    #[must_use]
    pub fn has_struck(self, kind: Fault) -> bool {
        self.0 & (1 << kind as u32) != 0
    }

    pub(crate) fn note(&mut self, kind: Fault) {
        self.0 |= 1 << kind as u32;
    }
}

impl Fault {
    pub const ALL: [Self; 19] = [
        Self::ClientLeaves,
        Self::Preempts,
        Self::ReusesPage,
        Self::CutsPrefillStream,
        Self::CutsDecodeStream,
        Self::CutsConnection,
        Self::LosesPrefillCommand,
        Self::LosesDecodeCommand,
        Self::LosesMessageToPrefill,
        Self::LosesMessageToDecode,
        Self::RepeatsMessageToPrefill,
        Self::RepeatsMessageToDecode,
        Self::DamagesPage,
        Self::LengthensPage,
        Self::RestartsPrefill,
        Self::RestartsDecode,
        Self::RestartsGateway,
        Self::EndsLeaseEarly,
        Self::LosesPatienceEarly,
    ];

    /// Whether there is something that it could hit.
    #[must_use]
    pub fn can_strike(self, state: &State) -> bool {
        match self {
            Self::ClientLeaves | Self::RestartsGateway => state.gateway.answer.is_none(),
            Self::Preempts => preemptible(state).is_some(),
            Self::ReusesPage => state.prefill.pages.iter().any(|page| !page.is_granted),
            Self::CutsPrefillStream => stream(Worker::Prefill, state).is_some(),
            Self::CutsDecodeStream => stream(Worker::Decode, state).is_some(),
            Self::CutsConnection => connection(state, |_| true).is_some(),
            Self::LosesPrefillCommand => {
                !state.faults.has_struck(Self::LosesDecodeCommand) && with_command(Worker::Prefill, state).is_some()
            }
            Self::LosesDecodeCommand => {
                !state.faults.has_struck(Self::LosesPrefillCommand) && with_command(Worker::Decode, state).is_some()
            }
            Self::LosesMessageToPrefill | Self::RepeatsMessageToPrefill => {
                connection(state, |entry| !entry.to_prefill.is_empty()).is_some()
            }
            Self::LosesMessageToDecode | Self::RepeatsMessageToDecode => {
                connection(state, |entry| matches!(entry.to_decode.first(), Some(Item::Said(..)))).is_some()
            }
            Self::DamagesPage | Self::LengthensPage => connection(state, carries_page).is_some(),
            Self::RestartsPrefill | Self::RestartsDecode => state.gateway.answer.is_none(),
            Self::EndsLeaseEarly => leased(state).is_some(),
            Self::LosesPatienceEarly => state.decode.receiving.iter().any(Option::is_some),
        }
    }

    /// Hits the first thing that it can.
    pub fn strike(self, world: &World, state: &mut State) {
        match self {
            Self::ClientLeaves => state.gateway.end(Answer::Cut, &mut state.streams, &mut state.breach),
            Self::Preempts => {
                if let Some(key) = preemptible(state) {
                    state.prefill.preempt(key);
                }
            }
            Self::ReusesPage => {
                if let Some(number) = state.prefill.pages.iter().position(|page| !page.is_granted) {
                    state.prefill.reuse(number);
                }
            }
            Self::CutsPrefillStream | Self::CutsDecodeStream => {
                let worker = if self == Self::CutsPrefillStream { Worker::Prefill } else { Worker::Decode };
                if let Some(index) = stream(worker, state) {
                    state.streams[index].is_cut = true;
                }
            }
            Self::LosesPrefillCommand | Self::LosesDecodeCommand => {
                let worker = if self == Self::LosesPrefillCommand { Worker::Prefill } else { Worker::Decode };
                if let Some(index) = with_command(worker, state) {
                    state.streams[index].down.remove(0);
                }
            }
            Self::RestartsPrefill | Self::RestartsDecode => restart(self, world, state),
            Self::RestartsGateway => {
                state.gateway.holds = [false; 2];
                state.gateway.end(Answer::Cut, &mut state.streams, &mut state.breach);
                for stream in &mut state.streams {
                    (stream.gateway_end, stream.up) = (false, Vec::new());
                }
            }
            Self::EndsLeaseEarly => {
                if let Some(key) = leased(state) {
                    world.apply(state, Event::LeaseEnds(key));
                }
            }
            Self::LosesPatienceEarly => {
                if let Some(key) = state.decode.receiving.iter().position(Option::is_some) {
                    world.apply(state, Event::LosesPatience(key));
                }
            }
            _ => self.strike_connection(state),
        }
    }

    fn strike_connection(self, state: &mut State) {
        let index = match self {
            Self::CutsConnection => connection(state, |_| true),
            Self::LosesMessageToPrefill | Self::RepeatsMessageToPrefill => {
                connection(state, |entry| !entry.to_prefill.is_empty())
            }
            Self::DamagesPage | Self::LengthensPage => connection(state, carries_page),
            _ => connection(state, |entry| matches!(entry.to_decode.first(), Some(Item::Said(..)))),
        };
        let Some(connection) = index.map(|index| &mut state.connections[index]) else { return };
        match self {
            Self::CutsConnection => connection.is_cut = true,
            Self::LosesMessageToPrefill => drop(connection.to_prefill.remove(0)),
            Self::LosesMessageToDecode => drop(connection.to_decode.remove(0)),
            Self::RepeatsMessageToPrefill => connection.to_prefill.insert(0, connection.to_prefill[0]),
            Self::RepeatsMessageToDecode => connection.to_decode.insert(0, connection.to_decode[0].clone()),
            _ => {
                let harm = if self == Self::DamagesPage { Content::Damaged } else { Content::TooLong };
                if let Some(Item::Said(_, bytes)) = connection.to_decode.first_mut() {
                    *bytes = Some(harm);
                }
            }
        }
    }
}

/// The worker is killed and starts anew at once, at the same address.
fn restart(fault: Fault, world: &World, state: &mut State) {
    let worker = if fault == Fault::RestartsPrefill { Worker::Prefill } else { Worker::Decode };
    match worker {
        Worker::Prefill => state.prefill = Prefill::new(state.prefill.epoch + 1, world.num_pages),
        Worker::Decode => state.decode = Decode::new(state.decode.epoch + 1, world.num_pages),
    }
    for connection in &mut state.connections {
        match worker {
            Worker::Prefill => {
                (connection.prefill_end, connection.to_prefill) = (false, Vec::new());
                connection.shut();
            }
            Worker::Decode => (connection.decode_end, connection.to_decode) = (false, Vec::new()),
        }
    }
    for stream in state.streams.iter_mut().filter(|stream| stream.worker == worker) {
        (stream.worker_end, stream.down) = (false, Vec::new());
    }
}

fn preemptible(state: &State) -> Option<usize> {
    let is_meant = |leg: &Leg| leg.num_computed > 0 && usize::from(leg.num_computed) < leg.pages.len();
    state.prefill.legs.iter().position(|leg| leg.as_ref().is_some_and(is_meant))
}

fn leased(state: &State) -> Option<usize> {
    state.prefill.sending.iter().position(|sending| sending.as_ref().is_some_and(|entry| entry.leg.is_leased()))
}

fn stream(worker: Worker, state: &State) -> Option<usize> {
    let is_whole = |stream: &Stream| !stream.is_cut && stream.gateway_end && stream.worker_end;
    state.streams.iter().position(|stream| stream.worker == worker && is_whole(stream))
}

fn with_command(worker: Worker, state: &State) -> Option<usize> {
    let is_meant = |stream: &Stream| stream.worker == worker && stream.worker_end && !stream.down.is_empty();
    state.streams.iter().position(is_meant)
}

fn connection(state: &State, is_meant: impl Fn(&Connection) -> bool) -> Option<usize> {
    let is_whole = |entry: &Connection| !entry.is_cut && entry.prefill_end && entry.decode_end;
    state.connections.iter().position(|entry| is_whole(entry) && is_meant(entry))
}

/// Whether the next message of the connection follows the bytes of a page.
fn carries_page(connection: &Connection) -> bool {
    matches!(connection.to_decode.first(), Some(Item::Said(FromPrefill::Sealed { .. }, Some(_))))
}
