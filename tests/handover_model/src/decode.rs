//! The decode worker: its engine, which owns pages, and its transfer thread, which fills them. Orders and news pass
//! between the two in order and late.

use crate::breach::Breach;
use crate::links::{Connection, Item, free_id, take_first};
use crate::messages::{Action, Attempt, Command, Content, FromDecode, FromPrefill, Order, PageNumber, Place};
use crate::messages::{Report, Row};
use crate::receiving::{Patience, ReceivingLeg};
use crate::variant::Variant;

/// Tokens of a whole answer.
pub const NUM_TOKENS: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    pub content: Content,
    pub owner: Option<Attempt>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegState {
    /// Its peer has not begun.
    Awaiting,
    /// For pages.
    Waiting,
    Receiving,
    Running,
    /// Over, with pages that the transfer may still touch.
    Stopping,
}

/// A decode leg as the engine sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leg {
    pub attempt: Attempt,
    pub stream: u8,
    pub state: LegState,
    /// The next token's index.
    pub next: u8,
    pub pages: Vec<PageNumber>,
}

/// A decode leg as the transfer sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiving {
    pub leg: ReceivingLeg,
    pub attempt: Attempt,
    pub peer_epoch: u8,
    pub is_connecting: bool,
    pub connection: Option<u8>,
    pub pages: Vec<PageNumber>,
}

/// Arrays are by key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Decode {
    pub epoch: u8,
    pub pages: Vec<Page>,
    pub legs: [Option<Leg>; 2],
    pub orders: Vec<Order>,
    pub receiving: [Option<Receiving>; 2],
    pub news: Vec<(u8, Report)>,
}

/// What a call changes beside the worker itself.
#[derive(Debug)]
pub struct Around<'a> {
    pub connections: &'a mut Vec<Connection>,
    pub breach: &'a mut Option<Breach>,
    pub patience: Patience,
    pub variant: Variant,
}

impl Decode {
    #[must_use]
    pub fn new(epoch: u8, num_pages: PageNumber) -> Self {
        Self {
            epoch,
            pages: vec![Page { content: Content::Foreign, owner: None }; usize::from(num_pages)],
            legs: [None, None],
            orders: Vec::new(),
            receiving: [None, None],
            news: Vec::new(),
        }
    }

    /// Whether nothing is held for any request.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let no_legs = self.legs.iter().all(Option::is_none) && self.receiving.iter().all(Option::is_none);
        no_legs && self.pages.iter().all(|page| page.owner.is_none())
    }

    // --- the engine

    /// A row where the leg cannot be had.
    pub fn take(&mut self, command: Command, stream: u8, variant: Variant) -> Option<Row> {
        match command {
            Command::Submit { attempt, resumed, peer_epoch } => {
                let key = variant.key_of(attempt);
                if self.legs[key].is_some() {
                    return Some(Row::PeerFailed(attempt));
                }
                let state = LegState::Awaiting;
                self.legs[key] = Some(Leg { attempt, stream, state, next: resumed, pages: Vec::new() });
                self.orders.push(Order::Expect { attempt, peer_epoch });
            }
            Command::Abort(attempt) => self.end_of(stream, Some(attempt), variant),
        }
        None
    }

    /// All legs of a stream, or one of them, are over. Pages that may still be written stay where they are.
    pub fn end_of(&mut self, stream: u8, attempt: Option<Attempt>, variant: Variant) {
        for key in 0..self.legs.len() {
            let is_meant = |leg: &&mut Leg| leg.stream == stream && attempt.is_none_or(|which| which == leg.attempt);
            let Some(leg) = self.legs[key].as_mut().filter(is_meant) else { continue };
            if leg.state == LegState::Stopping {
                continue;
            }
            let (attempt, state) = (leg.attempt, leg.state);
            leg.state = LegState::Stopping;
            if state != LegState::Running && variant != Variant::AbortDropped {
                self.orders.push(Order::Cancel(attempt));
            }
            if state == LegState::Running || variant == Variant::StoppedNotAwaited {
                self.let_go(key);
            }
        }
    }

    /// The leg holds nothing any more; others that wait get its pages.
    fn let_go(&mut self, key: usize) {
        if let Some(leg) = self.legs[key].take() {
            leg.pages.iter().for_each(|&page| self.pages[usize::from(page)].owner = None);
        }
        self.reserve();
    }

    /// Legs whose peer has begun get pages, when there are enough for the whole prompt. The prompt takes all there are.
    fn reserve(&mut self) {
        for leg in self.legs.iter_mut().flatten().filter(|leg| leg.state == LegState::Waiting) {
            if self.pages.iter().any(|page| page.owner.is_some()) {
                return;
            }
            self.pages.iter_mut().for_each(|page| page.owner = Some(leg.attempt));
            leg.pages = (0..).take(self.pages.len()).collect();
            leg.state = LegState::Receiving;
            self.orders.push(Order::Receive(leg.attempt));
        }
    }

    /// The news of a leg; the row that its gateway is told, with the stream.
    pub fn take_news(&mut self) -> Option<(u8, Row)> {
        let (key, report) = take_first(&mut self.news)?;
        let key = usize::from(key);
        let leg = self.legs[key].as_mut()?;
        let (attempt, stream, is_over) = (leg.attempt, leg.stream, leg.state == LegState::Stopping);
        match report {
            Report::Begun => {
                if leg.state == LegState::Awaiting {
                    leg.state = LegState::Waiting;
                    self.reserve();
                }
                None
            }
            Report::Arrived if !is_over => {
                leg.state = LegState::Running;
                Some((stream, self.give_token(key)?))
            }
            Report::Failed if !is_over => {
                self.let_go(key);
                Some((stream, Row::PeerFailed(attempt)))
            }
            // Aborted meanwhile: the transfer is done with it, by whatever way.
            _ => {
                self.let_go(key);
                None
            }
        }
    }

    /// The next token of a leg that runs; with the last one it is over.
    pub fn give_token(&mut self, key: usize) -> Option<Row> {
        let leg = self.legs[key].as_mut()?;
        let (attempt, index) = (leg.attempt, leg.next);
        leg.next += 1;
        if leg.next < NUM_TOKENS {
            return Some(Row::Token { attempt, index });
        }
        self.let_go(key);
        Some(Row::Last { attempt, index })
    }

    // --- the transfer thread

    pub fn carry_out(&mut self, around: &mut Around<'_>) {
        let Some(order) = take_first(&mut self.orders) else { return };
        let num_places = Place::try_from(self.pages.len()).unwrap_or_default();
        match order {
            Order::Expect { attempt, peer_epoch } => {
                let (key, leg) = (around.variant.key_of(attempt), ReceivingLeg::new(num_places));
                let actions = leg.start();
                let (is_connecting, connection, pages) = (false, None, Vec::new());
                self.receiving[key] = Some(Receiving { leg, attempt, peer_epoch, is_connecting, connection, pages });
                self.act(key, actions, around);
            }
            Order::Receive(attempt) => {
                let key = around.variant.key_of(attempt);
                let Some(receiving) = &mut self.receiving[key] else { return };
                receiving.pages = (0..num_places).collect();
                let actions = receiving.leg.reserve();
                self.act(key, actions, around);
            }
            Order::Cancel(attempt) => {
                let key = around.variant.key_of(attempt);
                let Some(receiving) = &mut self.receiving[key] else { return };
                let actions = receiving.leg.cancel();
                self.act(key, actions, around);
            }
            Order::Open(_) | Order::Offer { .. } | Order::Finish(_) | Order::Withdraw(_) => {}
        }
    }

    pub fn connect(&mut self, key: usize, prefill_epoch: u8, around: &mut Around<'_>) {
        let Some(receiving) = &mut self.receiving[key] else { return };
        receiving.is_connecting = false;
        if receiving.peer_epoch != prefill_epoch {
            let actions = receiving.leg.rejected();
            return self.act(key, actions, around);
        }
        let id = free_id(around.connections.iter().map(|connection| connection.id));
        around.connections.push(Connection {
            id,
            key: u8::try_from(key).unwrap_or_default(),
            wanted: false,
            to_prefill: Vec::new(),
            to_decode: Vec::new(),
            former_leg: None,
            prefill_end: true,
            decode_end: true,
            is_cut: false,
        });
        receiving.connection = Some(id);
        let actions = receiving.leg.connected();
        self.act(key, actions, around);
    }

    /// The connection has ended.
    pub fn lose(&mut self, index: usize, around: &mut Around<'_>) {
        let connection = &mut around.connections[index];
        let (id, key) = (connection.id, usize::from(connection.key));
        (connection.decode_end, connection.to_decode) = (false, Vec::new());
        let Some(receiving) = self.receiving[key].as_mut().filter(|receiving| receiving.connection == Some(id)) else {
            return;
        };
        receiving.connection = None;
        let actions = receiving.leg.lost(around.patience);
        self.act(key, actions, around);
    }

    /// What comes next on a connection.
    pub fn hear(&mut self, index: usize, around: &mut Around<'_>) {
        let connection = &mut around.connections[index];
        let (id, key) = (connection.id, usize::from(connection.key));
        let Some(Item::Said(message, bytes)) = take_first(&mut connection.to_decode) else { return };
        let Some(receiving) = self.receiving[key].as_mut().filter(|receiving| receiving.connection == Some(id)) else {
            return;
        };
        let (attempt, patience) = (receiving.attempt, around.patience);
        let heard = match (&message, bytes) {
            (&FromPrefill::Sealed { first, .. } | &FromPrefill::Stale { first }, Some(content)) => {
                if receiving.leg.expected_pages(first).is_err()
                    || (content == Content::TooLong && around.variant != Variant::LengthTrusted)
                {
                    let actions = receiving.leg.rejected();
                    return self.act(key, actions, around);
                }
                let page = receiving.pages[usize::from(first)];
                write(&mut self.pages, page, attempt, content, around.breach);
                match message {
                    FromPrefill::Sealed { first, generation } => {
                        receiving.leg.received((first, generation), content, patience, around.variant)
                    }
                    _ => receiving.leg.hear(&message, patience),
                }
            }
            _ => receiving.leg.hear(&message, patience),
        };
        let actions = heard.unwrap_or_else(|_| receiving.leg.rejected());
        let is_stored =
            |action: &Action| matches!(action, Action::Store(place) if bytes != Some(Content::Of(attempt, *place)));
        if actions.iter().any(is_stored) {
            around.breach.get_or_insert(Breach::StalePageAccepted);
        }
        self.act(key, actions, around);
    }

    pub fn lose_patience(&mut self, key: usize, around: &mut Around<'_>) {
        let Some(receiving) = &mut self.receiving[key] else { return };
        let actions = receiving.leg.no_progress();
        self.act(key, actions, around);
    }

    fn act(&mut self, key: usize, actions: Vec<Action>, around: &mut Around<'_>) {
        for action in actions {
            let Some(receiving) = &mut self.receiving[key] else { break };
            let id = receiving.connection;
            match action {
                Action::ToPrefill(message) => send(around.connections, id, message),
                Action::Connect => receiving.is_connecting = true,
                Action::Close => {
                    if let Some(connection) = around.connections.iter_mut().find(|entry| Some(entry.id) == id) {
                        (connection.decode_end, connection.to_decode) = (false, Vec::new());
                    }
                    receiving.connection = None;
                }
                Action::Report(report) => self.news.push((u8::try_from(key).unwrap_or_default(), report)),
                Action::ToDecode(_) | Action::Serve(_) | Action::Store(_) => {}
            }
        }
        self.receiving[key].take_if(|receiving| receiving.leg.over);
    }
}

fn send(connections: &mut [Connection], id: Option<u8>, message: FromDecode) {
    let connection = connections.iter_mut().find(|connection| Some(connection.id) == id);
    if let Some(connection) = connection.filter(|connection| !connection.is_cut && connection.prefill_end) {
        connection.to_prefill.push(message);
    }
}

/// Bytes go into their page as they come, before anybody knows what they are worth. What is too long goes on.
fn write(pages: &mut [Page], first: PageNumber, owner: Attempt, content: Content, breach: &mut Option<Breach>) {
    let count = if content == Content::TooLong { 2 } else { 1 };
    for number in (usize::from(first)..).take(count) {
        // Behind the last page of the pool lies memory of somebody else.
        let Some(page) = pages.get_mut(number).filter(|page| page.owner == Some(owner)) else {
            breach.get_or_insert(Breach::WrittenByStranger);
            return;
        };
        page.content = content;
    }
}
