//! All parts together: the state, and what may happen in it.

use stateright::{Model, Property};

use crate::breach::Breach;
use crate::decode::{Around, Decode, LegState};
use crate::faults::{Fault, Faults};
use crate::gateway::{Answer, Gateway, open};
use crate::links::{Connection, Item, Stream, Worker};
use crate::messages::{Content, FromPrefill, PageNumber, Place, Row};
use crate::prefill::Prefill;
use crate::receiving::Patience;
use crate::variant::Variant;

/// The bounds of a check.
#[derive(Clone, Debug)]
pub struct World {
    pub variant: Variant,
    /// Pages of the prompt, and of each worker.
    pub num_pages: PageNumber,
    /// How many faults strike, each kind at most once, and which kinds there are.
    pub num_faults: u32,
    pub kinds: &'static [Fault],
    pub patience: Patience,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub gateway: Gateway,
    pub prefill: Prefill,
    pub decode: Decode,
    pub streams: Vec<Stream>,
    pub connections: Vec<Connection>,
    pub faults: Faults,
    /// Rows with which a leg ended, by worker and attempt.
    pub ends: [[u8; 2]; 2],
    pub breach: Option<Breach>,
}

/// Numbers are places in the state's lists, or keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    // The gateway.
    GatewayHears(usize),
    GatewayLoses(usize),
    // The workers' engines.
    Takes(usize),
    EndsStream(usize),
    Computes(usize),
    GivesToken(usize),
    TakesNews(Worker),
    // Their transfers.
    CarriesOut(Worker),
    Connects(usize),
    PrefillHears(usize),
    PrefillLoses(usize),
    Serves(usize),
    DecodeHears(usize),
    DecodeLoses(usize),
    LeaseEnds(usize),
    GivesUpEarly(usize),
    LosesPatience(usize),
    /// What none of them does by itself.
    Strikes(Fault),
}

impl World {
    /// Everything that goes on without a fault. Timers run out only where nothing else can happen: an early one is a fault.
    #[must_use]
    pub fn progress(&self, state: &State) -> Vec<Event> {
        let mut events = self.steps(state);
        if events.is_empty() {
            events = self.timers(state);
        }
        events
    }

    fn steps(&self, state: &State) -> Vec<Event> {
        let mut events = Vec::new();
        let mut add = |is_possible: bool, event| events.extend(is_possible.then_some(event));
        for (index, stream) in state.streams.iter().enumerate() {
            add(stream.gateway_end && !stream.up.is_empty(), Event::GatewayHears(index));
            add(stream.worker_end && !stream.down.is_empty(), Event::Takes(index));
            // What a worker has said before its death may be lost with it.
            add(stream.gateway_end && (stream.is_cut || !stream.worker_end), Event::GatewayLoses(index));
            let is_over = stream.is_cut || (!stream.gateway_end && stream.down.is_empty());
            add(stream.worker_end && is_over, Event::EndsStream(index));
        }
        for (key, leg) in state.prefill.legs.iter().enumerate() {
            let computes = leg.as_ref().is_some_and(|leg| usize::from(leg.num_computed) < leg.pages.len());
            add(computes, Event::Computes(key));
        }
        for (key, leg) in state.decode.legs.iter().enumerate() {
            let runs = leg.as_ref().is_some_and(|leg| leg.state == LegState::Running);
            add(runs, Event::GivesToken(key));
        }
        add(!state.prefill.orders.is_empty(), Event::CarriesOut(Worker::Prefill));
        add(!state.decode.orders.is_empty(), Event::CarriesOut(Worker::Decode));
        add(!state.prefill.news.is_empty(), Event::TakesNews(Worker::Prefill));
        add(!state.decode.news.is_empty(), Event::TakesNews(Worker::Decode));
        for (key, receiving) in state.decode.receiving.iter().enumerate() {
            add(receiving.as_ref().is_some_and(|receiving| receiving.is_connecting), Event::Connects(key));
        }
        for (index, connection) in state.connections.iter().enumerate() {
            let Connection { to_prefill, to_decode, prefill_end, decode_end, is_cut, .. } = connection;
            add(*prefill_end && !to_prefill.is_empty(), Event::PrefillHears(index));
            let peer_left = !*decode_end && to_prefill.is_empty();
            add(*prefill_end && (*is_cut || peer_left), Event::PrefillLoses(index));
            add(*decode_end && connection.unfinished().is_some(), Event::Serves(index));
            add(*decode_end && matches!(to_decode.first(), Some(Item::Said(..))), Event::DecodeHears(index));
            let peer_left = !*prefill_end && to_decode.is_empty();
            add(*decode_end && (*is_cut || peer_left), Event::DecodeLoses(index));
        }
        events
    }

    fn timers(&self, state: &State) -> Vec<Event> {
        let mut events = Vec::new();
        for key in 0..2 {
            let is_leased = state.prefill.sending[key].as_ref().is_some_and(|sending| sending.leg.is_leased());
            if is_leased && self.variant != Variant::LeaseNeverEnds {
                events.push(Event::LeaseEnds(key));
            }
            if state.prefill.early[key].is_some() {
                events.push(Event::GivesUpEarly(key));
            }
            if state.decode.receiving[key].is_some() {
                events.push(Event::LosesPatience(key));
            }
        }
        events
    }

    /// Whether everything has come back: the request is answered and nobody holds anything.
    #[must_use]
    pub fn is_clean(&self, state: &State) -> bool {
        state.gateway.answer.is_some() && state.prefill.is_at_rest() && state.decode.is_at_rest()
    }

    fn faults(&self, state: &State, events: &mut Vec<Event>) {
        if state.faults.num_struck() >= self.num_faults {
            return;
        }
        let possible = self.kinds.iter().copied().filter(|kind| !state.faults.has_struck(*kind));
        events.extend(possible.filter(|kind| kind.can_strike(state)).map(Event::Strikes));
    }

    fn note_row(state: &mut State, stream: u8, row: Row) {
        let Some(stream) = state.streams.iter_mut().find(|entry| entry.id == stream) else { return };
        if row.is_terminal() {
            let ends = &mut state.ends[stream.worker as usize][usize::from(row.attempt())];
            *ends += 1;
            if *ends > 1 {
                state.breach.get_or_insert(Breach::EndedTwice);
            }
        }
        if stream.worker_end && !stream.is_cut {
            stream.up.push(row);
        }
    }

    /// What the event does.
    pub fn apply(&self, state: &mut State, event: Event) {
        let State { gateway, prefill, decode, streams, connections, breach, .. } = state;
        let (variant, num_places) = (self.variant, self.num_pages);
        let mut told = None;
        match event {
            Event::GatewayHears(index) => gateway.hear(index, streams, variant, breach),
            Event::GatewayLoses(index) => {
                let epoch = if streams[index].worker == Worker::Prefill { prefill.epoch } else { decode.epoch };
                gateway.lose((index, epoch), streams, variant, breach);
            }
            Event::Takes(index) => {
                let (id, worker) = (streams[index].id, streams[index].worker);
                let command = streams[index].down.remove(0);
                told = match worker {
                    Worker::Prefill => prefill.take(command, id, num_places, variant),
                    Worker::Decode => decode.take(command, id, variant),
                }
                .map(|row| (id, row));
            }
            Event::EndsStream(index) => self.end_stream(state, index),
            Event::Computes(key) => prefill.compute(key),
            Event::GivesToken(key) => {
                let stream = decode.legs[key].as_ref().map(|leg| leg.stream);
                told = stream.zip(decode.give_token(key));
            }
            Event::TakesNews(Worker::Prefill) => told = prefill.take_news(num_places),
            Event::TakesNews(Worker::Decode) => told = decode.take_news(),
            Event::CarriesOut(Worker::Prefill) => prefill.carry_out(connections, variant),
            Event::PrefillHears(index) => prefill.hear(index, connections),
            Event::PrefillLoses(index) => prefill.drop_peer(index, connections),
            Event::Serves(index) => prefill.serve(index, connections, variant),
            Event::LeaseEnds(key) => prefill.lease_ends(key, connections),
            Event::GivesUpEarly(key) => prefill.give_up_early(key, connections),
            Event::CarriesOut(Worker::Decode)
            | Event::Connects(_)
            | Event::DecodeHears(_)
            | Event::DecodeLoses(_)
            | Event::LosesPatience(_) => self.apply_to_receiving(state, event),
            Event::Strikes(fault) => {
                state.faults.note(fault);
                fault.strike(self, state);
            }
        }
        if let Some((stream, row)) = told {
            Self::note_row(state, stream, row);
        }
        Self::look_after(state);
    }

    /// A worker notices that a stream has ended.
    fn end_stream(&self, state: &mut State, index: usize) {
        let stream = &mut state.streams[index];
        (stream.worker_end, stream.down) = (false, Vec::new());
        match stream.worker {
            Worker::Prefill => {
                state.prefill.end_of(stream.id, None, self.variant);
                state.prefill.admit(self.num_pages);
            }
            Worker::Decode => state.decode.end_of(stream.id, None, self.variant),
        }
    }

    /// What happens in the decode worker's transfer thread.
    fn apply_to_receiving(&self, state: &mut State, event: Event) {
        let State { prefill, decode, connections, breach, .. } = state;
        let mut around = Around { connections, breach, patience: self.patience, variant: self.variant };
        match event {
            Event::Connects(key) => decode.connect(key, prefill.epoch, &mut around),
            Event::DecodeHears(index) => decode.hear(index, &mut around),
            Event::DecodeLoses(index) => decode.lose(index, &mut around),
            Event::LosesPatience(key) => decode.lose_patience(key, &mut around),
            _ => decode.carry_out(&mut around),
        }
    }

    /// Forgets links that both ends have given up, and looks at the pages of legs that run.
    fn look_after(state: &mut State) {
        state.streams.retain(|stream| stream.gateway_end || stream.worker_end);
        state.connections.retain(|connection| connection.prefill_end || connection.decode_end);
        for leg in state.decode.legs.iter().flatten().filter(|leg| leg.state == LegState::Running) {
            let is_own = |(place, &page): (Place, &PageNumber)| {
                state.decode.pages[usize::from(page)].content == Content::Of(leg.attempt, place)
            };
            if !(0..).zip(&leg.pages).all(is_own) {
                state.breach.get_or_insert(Breach::RunsOnForeignPage);
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        let mut streams = Vec::new();
        let of = Worker::BOTH.map(|worker| open(worker, 0, &mut streams));
        let mut gateway =
            Gateway { attempt: 0, num_tokens: 0, num_before: 0, answer: None, streams: of, holds: [false; 2] };
        gateway.submit(&mut streams);
        vec![State {
            gateway,
            prefill: Prefill::new(0, self.num_pages),
            decode: Decode::new(0, self.num_pages),
            streams,
            connections: Vec::new(),
            faults: Faults::default(),
            ends: [[0; 2]; 2],
            breach: None,
        }]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        if state.breach.is_none() {
            events.extend(self.progress(state));
            self.faults(state, events);
        }
    }

    fn next_state(&self, last: &State, event: Event) -> Option<State> {
        let mut state = last.clone();
        self.apply(&mut state, event);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn says(message: &FromPrefill, state: &State) -> bool {
            let mut items = state.connections.iter().flat_map(|connection| &connection.to_decode);
            items.any(|item| matches!(item, Item::Said(said, _) if said == message))
        }
        vec![
            Property::always("no stale page is accepted", |_, state: &State| {
                !matches!(state.breach, Some(Breach::StalePageAccepted | Breach::RunsOnForeignPage))
            }),
            Property::always("a page is written for its owner alone", |_, state: &State| {
                state.breach != Some(Breach::WrittenByStranger)
            }),
            Property::always("a leg ends once", |_, state: &State| state.breach != Some(Breach::EndedTwice)),
            Property::always("a token comes once", |_, state: &State| state.breach != Some(Breach::TokenOutOfOrder)),
            Property::always("a request is answered once", |_, state: &State| {
                state.breach != Some(Breach::AnsweredTwice)
            }),
            Property::always("at rest all is answered and nothing held", |world: &Self, state: &State| {
                state.breach.is_some() || world.is_clean(state) || !world.progress(state).is_empty()
            }),
            Property::sometimes("the first attempt answers", |_, state: &State| {
                state.gateway.answer == Some(Answer::Whole) && state.gateway.attempt == 0
            }),
            Property::sometimes("the second attempt answers", |_, state: &State| {
                state.gateway.answer == Some(Answer::Whole) && state.gateway.attempt == 1
            }),
            Property::sometimes("a stale page is noticed", |_, state: &State| {
                says(&FromPrefill::Stale { first: 0 }, state)
            }),
            Property::sometimes("a leg is handed over", |_, state: &State| says(&FromPrefill::Released, state)),
            Property::sometimes("a leg is refused", |_, state: &State| says(&FromPrefill::Refused, state)),
        ]
    }
}
