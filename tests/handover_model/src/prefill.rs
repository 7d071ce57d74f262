//! The prefill worker: its engine, which owns pages, and its transfer thread, which owns legs and connections. Orders and
//! news pass between the two in order and late.

use crate::links::{Connection, Item, take_first};
use crate::messages::{Action, Announced, Attempt, Command, Content, FromDecode, FromPrefill, Order, PageNumber};
use crate::messages::{Place, Report, Row};
use crate::sending::SendingLeg;
use crate::variant::Variant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    pub generation: u8,
    pub content: Content,
    pub is_granted: bool,
}

/// A prefill leg as the engine sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leg {
    pub attempt: Attempt,
    pub stream: u8,
    /// None before it is admitted.
    pub pages: Vec<PageNumber>,
    pub num_computed: Place,
}

/// A prefill leg as the transfer sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sending {
    pub leg: SendingLeg,
    pub connection: Option<u8>,
}

/// Arrays are by key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Prefill {
    pub epoch: u8,
    pub pages: Vec<Page>,
    pub legs: [Option<Leg>; 2],
    pub orders: Vec<Order>,
    pub sending: [Option<Sending>; 2],
    pub early: [Option<u8>; 2],
    pub handed_over: [bool; 2],
    pub news: Vec<(u8, Report)>,
}

impl Prefill {
    #[must_use]
    pub fn new(epoch: u8, num_pages: PageNumber) -> Self {
        let page = Page { generation: 0, content: Content::Foreign, is_granted: false };
        Self {
            epoch,
            pages: vec![page; usize::from(num_pages)],
            legs: [None, None],
            orders: Vec::new(),
            sending: [None, None],
            early: [None; 2],
            handed_over: [false; 2],
            news: Vec::new(),
        }
    }

    /// Whether nothing is held for any request.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let no_legs = self.legs.iter().all(Option::is_none) && self.sending.iter().all(Option::is_none);
        no_legs && self.early == [None; 2] && !self.pages.iter().any(|page| page.is_granted)
    }

    // --- the engine

    /// A row where the leg cannot be had.
    pub fn take(&mut self, command: Command, stream: u8, num_places: Place, variant: Variant) -> Option<Row> {
        match command {
            Command::Submit { attempt, .. } => {
                let key = variant.key_of(attempt);
                if self.legs[key].is_some() {
                    return Some(Row::PeerFailed(attempt));
                }
                self.legs[key] = Some(Leg { attempt, stream, pages: Vec::new(), num_computed: 0 });
                self.orders.push(Order::Open(attempt));
            }
            Command::Abort(attempt) => self.end_of(stream, Some(attempt), variant),
        }
        self.admit(num_places);
        None
    }

    /// All legs of a stream, or one of them, are over.
    pub fn end_of(&mut self, stream: u8, attempt: Option<Attempt>, variant: Variant) {
        for key in 0..self.legs.len() {
            let ends = |leg: &mut Leg| leg.stream == stream && attempt.is_none_or(|which| which == leg.attempt);
            if let Some(leg) = self.legs[key].take_if(ends) {
                self.give_back(&leg.pages);
                if variant != Variant::AbortDropped {
                    self.orders.push(Order::Cancel(leg.attempt));
                }
            }
        }
    }

    /// Legs that wait get pages, when there are enough for their whole prompt.
    pub fn admit(&mut self, num_places: Place) {
        for leg in self.legs.iter_mut().flatten().filter(|leg| leg.pages.is_empty()) {
            let free = (0..).zip(&self.pages).filter(|(_, page)| !page.is_granted).map(|(number, _)| number);
            let granted: Vec<PageNumber> = free.take(usize::from(num_places)).collect();
            if granted.len() < usize::from(num_places) {
                return;
            }
            for &number in &granted {
                let page = &mut self.pages[usize::from(number)];
                (page.is_granted, page.generation) = (true, page.generation + 1);
            }
            leg.pages = granted;
        }
    }

    fn give_back(&mut self, pages: &[PageNumber]) {
        pages.iter().for_each(|&number| self.pages[usize::from(number)].is_granted = false);
    }

    /// Computes the next page of a leg.
    pub fn compute(&mut self, key: usize) {
        let Some(leg) = &mut self.legs[key] else { return };
        let (attempt, first) = (leg.attempt, leg.num_computed);
        let number = leg.pages[usize::from(first)];
        leg.num_computed += 1;
        let is_last = usize::from(leg.num_computed) == leg.pages.len();
        let page = &mut self.pages[usize::from(number)];
        page.content = Content::Of(attempt, first);
        self.orders.push(Order::Offer { attempt, first, page: number, generation: page.generation });
        if is_last {
            self.orders.push(Order::Finish(attempt));
        }
    }

    /// Takes the pages of a leg away; it is computed again.
    pub fn preempt(&mut self, key: usize) {
        let Some(leg) = &mut self.legs[key] else { return };
        leg.num_computed = 0;
        let pages = std::mem::take(&mut leg.pages);
        self.orders.push(Order::Withdraw(leg.attempt));
        self.give_back(&pages);
    }

    /// Somebody else gets a free page, writes it and gives it back.
    pub fn reuse(&mut self, number: usize) {
        let page = &mut self.pages[number];
        (page.generation, page.content) = (page.generation + 1, Content::Foreign);
    }

    /// The news of a leg; the row that its gateway is told, with the stream.
    pub fn take_news(&mut self, num_places: Place) -> Option<(u8, Row)> {
        let (key, report) = take_first(&mut self.news)?;
        let leg = self.legs[usize::from(key)].take()?;
        self.give_back(&leg.pages);
        self.admit(num_places);
        let is_handed_over = report == Report::HandedOver;
        Some((leg.stream, if is_handed_over { Row::HandedOver(leg.attempt) } else { Row::PeerFailed(leg.attempt) }))
    }

    // --- the transfer thread

    pub fn carry_out(&mut self, connections: &mut [Connection], variant: Variant) {
        let Some(order) = take_first(&mut self.orders) else { return };
        let key = variant.key_of(match order {
            Order::Open(attempt)
            | Order::Offer { attempt, .. }
            | Order::Finish(attempt)
            | Order::Withdraw(attempt)
            | Order::Expect { attempt, .. }
            | Order::Receive(attempt)
            | Order::Cancel(attempt) => attempt,
        });
        if matches!(order, Order::Open(_)) {
            self.sending[key] = Some(Sending::default());
            if let Some(early) = self.early[key].take() {
                self.attach(key, early, connections);
            }
            return;
        }
        let Some(sending) = &mut self.sending[key] else { return };
        let actions = match order {
            Order::Offer { first, page, generation, .. } => {
                // The engine may have granted it to somebody else by now: this is then their content.
                let digest = self.pages[usize::from(page)].content;
                sending.leg.announce(first, Announced { page, generation, digest })
            }
            Order::Finish(_) => sending.leg.finish(),
            Order::Withdraw(_) => sending.leg.withdraw(),
            _ => sending.leg.cancel(),
        };
        self.act(key, actions, connections);
        if matches!(order, Order::Cancel(_)) {
            self.part_with(key, connections);
        }
    }

    /// The first message of a peer.
    pub fn hear(&mut self, index: usize, connections: &mut [Connection]) {
        let connection = &mut connections[index];
        let (id, key) = (connection.id, usize::from(connection.key));
        let Some(message) = take_first(&mut connection.to_prefill) else { return };
        if !connection.wanted {
            connection.wanted = true;
            if message != FromDecode::Want || self.early[key].is_some() {
                connection.prefill_end = false;
            } else if self.sending[key].is_some() {
                self.attach(key, id, connections);
            } else if self.handed_over[key] {
                connection.to_decode.push(Item::Said(FromPrefill::Released, None));
            } else {
                self.early[key] = Some(id);
            }
            return;
        }
        let Some(sending) = self.sending[key].as_mut().filter(|sending| sending.connection == Some(id)) else { return };
        match sending.leg.hear(message) {
            Ok(actions) => self.act(key, actions, connections),
            Err(_) => self.drop_peer(index, connections),
        }
    }

    /// The connection is gone as far as this end is concerned.
    pub fn drop_peer(&mut self, index: usize, connections: &mut [Connection]) {
        let connection = &mut connections[index];
        (connection.prefill_end, connection.to_prefill) = (false, Vec::new());
        connection.shut();
        let (id, key) = (connection.id, usize::from(connection.key));
        if self.early[key] == Some(id) {
            self.early[key] = None;
        }
        if let Some(sending) = self.sending[key].as_mut().filter(|sending| sending.connection == Some(id)) {
            sending.connection = None;
            sending.leg.detach();
        }
    }

    /// Copies the page that is next in line, or says what the copy is worth.
    pub fn serve(&mut self, index: usize, connections: &mut [Connection], variant: Variant) {
        let connection = &mut connections[index];
        let live = self.sending[usize::from(connection.key)].as_ref();
        let live = live.filter(|sending| sending.connection == Some(connection.id)).map(|sending| &sending.leg);
        let Some(leg) = connection.former_leg.as_ref().or(live) else { return };
        let Some(place) = connection.unfinished() else { return };
        let item = &mut connection.to_decode[place];
        *item = match *item {
            Item::Serve(read) if !leg.holds(read) => Item::Said(FromPrefill::Stale { first: read.first }, None),
            Item::Serve(read) => Item::Copied(read, self.pages[usize::from(read.page)].content),
            Item::Copied(read, content) => {
                let generation = self.pages[usize::from(read.page)].generation;
                Item::Said(leg.copied(read, generation, variant), Some(content))
            }
            Item::Said(..) => return,
        };
        if connection.unfinished().is_none() {
            connection.former_leg = None;
        }
    }

    pub fn lease_ends(&mut self, key: usize, connections: &mut [Connection]) {
        let Some(sending) = &mut self.sending[key] else { return };
        let actions = sending.leg.lease_ends();
        self.act(key, actions, connections);
    }

    /// A peer waits for a leg that never came.
    pub fn give_up_early(&mut self, key: usize, connections: &mut [Connection]) {
        let Some(early) = self.early[key].take() else { return };
        if let Some(connection) = connections.iter_mut().find(|connection| connection.id == early) {
            connection.to_decode.push(Item::Said(FromPrefill::Refused, None));
            connection.prefill_end = false;
        }
    }

    fn attach(&mut self, key: usize, id: u8, connections: &mut [Connection]) {
        let Some(sending) = &mut self.sending[key] else { return };
        if let Some(former) = sending.connection.replace(id)
            && let Some(former) = connections.iter_mut().find(|connection| connection.id == former)
        {
            former.prefill_end = false;
            former.shut();
        }
        let actions = sending.leg.attach();
        self.act(key, actions, connections);
    }

    /// The leg is over; what its peer was to get is still sent.
    fn part_with(&mut self, key: usize, connections: &mut [Connection]) {
        let Some(Sending { leg, connection: Some(id) }) = self.sending[key].take() else { return };
        let connection = connections.iter_mut().find(|connection| connection.id == id);
        if let Some(connection) = connection.filter(|connection| connection.unfinished().is_some()) {
            connection.former_leg = Some(leg);
        }
    }

    fn act(&mut self, key: usize, actions: Vec<Action>, connections: &mut [Connection]) {
        let id = self.sending[key].as_ref().and_then(|sending| sending.connection);
        for action in actions {
            let connection = connections.iter_mut().find(|connection| Some(connection.id) == id);
            match (action, connection) {
                (Action::ToDecode(message), Some(connection)) => connection.to_decode.push(Item::Said(message, None)),
                (Action::Serve(read), Some(connection)) => connection.to_decode.push(Item::Serve(read)),
                (Action::Close, Some(connection)) => connection.prefill_end = false,
                (Action::Report(report), _) => {
                    self.handed_over[key] |= report == Report::HandedOver;
                    self.part_with(key, connections);
                    self.news.push((u8::try_from(key).unwrap_or_default(), report));
                }
                _ => {}
            }
        }
    }
}
