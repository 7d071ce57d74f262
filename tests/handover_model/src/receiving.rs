//! The decode leg: `ReceivingLeg` of `worker/baleen_worker/transfer/receiving.py`, method by method.
//!
//! Times are left out: `no_progress` is `tick` once the peer's time has run out, and signs of life are not told. A leg
//! without scores; `reserve` always from place 0 on.

use crate::messages::{Action, Announced, Content, FromDecode, FromPrefill, Place, ProtocolError, Read, Report};
use crate::variant::Variant;

const WINDOW: usize = 2;

/// How often a leg tries again: `_MAX_BAD_READS` and `_MAX_LOSSES`.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub bad_reads: u8,
    pub losses: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceivingLeg {
    /// These three by place.
    announced: Vec<Option<Announced>>,
    missing: Option<Vec<bool>>,
    reading: Vec<Option<Announced>>,
    is_final: bool,
    connected: bool,
    begun: bool,
    arrived: bool,
    pub over: bool,
    num_bad_reads: u8,
    num_losses: u8,
}

impl ReceivingLeg {
    #[must_use]
    pub fn new(num_pages: Place) -> Self {
        let none = vec![None; usize::from(num_pages)];
        Self {
            announced: none.clone(),
            missing: None,
            reading: none,
            is_final: false,
            connected: false,
            begun: false,
            arrived: false,
            over: false,
            num_bad_reads: 0,
            num_losses: 0,
        }
    }

    #[must_use]
    pub fn start(&self) -> Vec<Action> {
        vec![Action::Connect]
    }

    pub fn reserve(&mut self) -> Vec<Action> {
        self.missing = Some(vec![true; self.announced.len()]);
        self.go_on()
    }

    pub fn cancel(&mut self) -> Vec<Action> {
        self.over = true;
        vec![Action::Close, Action::Report(Report::Stopped)]
    }

    pub fn connected(&mut self) -> Vec<Action> {
        self.connected = true;
        let mut wants = vec![Action::ToPrefill(FromDecode::Want)];
        wants.extend(self.arrived.then_some(Action::ToPrefill(FromDecode::Ack)));
        wants
    }

    pub fn lost(&mut self, patience: Patience) -> Vec<Action> {
        self.connected = false;
        self.reading.fill(None);
        self.announced.fill(None);
        self.num_losses += 1;
        if self.num_losses > patience.losses { self.fail() } else { vec![Action::Connect] }
    }

    pub fn rejected(&mut self) -> Vec<Action> {
        self.fail()
    }

    /// # Errors
    /// The peer breaks the protocol.
    pub fn hear(&mut self, message: &FromPrefill, patience: Patience) -> Result<Vec<Action>, ProtocolError> {
        match *message {
            FromPrefill::Wait => Ok(Vec::new()),
            FromPrefill::Chunk { first, ref pages } => {
                for (place, &announced) in (usize::from(first)..).zip(pages) {
                    self.announced[place] = Some(announced);
                }
                let mut actions = Vec::new();
                actions.extend((!self.begun).then_some(Action::Report(Report::Begun)));
                self.begun = true;
                actions.extend(self.go_on());
                Ok(actions)
            }
            FromPrefill::Stale { first } => {
                let place = usize::from(first);
                self.reading[place].take().ok_or(ProtocolError)?;
                self.announced[place] = None;
                Ok(self.bad_read(patience).unwrap_or_else(|| self.go_on()))
            }
            FromPrefill::Final => {
                self.is_final = true;
                Ok(self.go_on())
            }
            FromPrefill::Released if self.arrived => {
                self.over = true;
                Ok(vec![Action::Close])
            }
            FromPrefill::Released | FromPrefill::Refused => Ok(self.fail()),
            FromPrefill::Sealed { .. } => Err(ProtocolError),
        }
    }

    /// What the length of an answer is compared with.
    ///
    /// # Errors
    /// The peer answers what was not asked.
    pub fn expected_pages(&self, first: Place) -> Result<usize, ProtocolError> {
        self.reading[usize::from(first)].map(|_| 1).ok_or(ProtocolError)
    }

    /// The page of an answer has come, with this digest.
    ///
    /// # Errors
    /// The peer answers what was not asked.
    pub fn received(
        &mut self,
        (first, generation): (Place, u8),
        digest: Content,
        patience: Patience,
        variant: Variant,
    ) -> Result<Vec<Action>, ProtocolError> {
        let place = usize::from(first);
        let read = self.reading[place].take().ok_or(ProtocolError)?;
        let is_intact = read.digest == digest || variant == Variant::DigestTrusted;
        if read.generation != generation || !is_intact {
            return Ok(self.bad_read(patience).unwrap_or_else(|| self.go_on()));
        }
        if let Some(missing) = &mut self.missing {
            missing[place] = false;
        }
        let mut actions = vec![Action::Store(first)];
        actions.extend(self.go_on());
        Ok(actions)
    }

    pub fn no_progress(&mut self) -> Vec<Action> {
        self.fail()
    }

    fn go_on(&mut self) -> Vec<Action> {
        let Some(missing) = self.missing.as_ref().filter(|_| !self.arrived && !self.over) else { return Vec::new() };
        if self.is_final && !missing.contains(&true) {
            self.arrived = true;
            let mut actions = vec![Action::Report(Report::Arrived)];
            actions.extend(self.connected.then_some(Action::ToPrefill(FromDecode::Ack)));
            return actions;
        }
        let mut actions = Vec::new();
        for (place, number) in (0..missing.len()).zip(0..) {
            let num_under_way = self.reading.iter().flatten().count();
            let is_ready = missing[place] && self.reading[place].is_none();
            let Some(announced) = self.announced[place].filter(|_| is_ready) else { continue };
            if !self.connected || num_under_way >= WINDOW {
                break;
            }
            self.reading[place] = Some(announced);
            let Announced { page, generation, .. } = announced;
            actions.push(Action::ToPrefill(FromDecode::Read(Read { first: number, page, generation })));
        }
        actions
    }

    fn bad_read(&mut self, patience: Patience) -> Option<Vec<Action>> {
        self.num_bad_reads += 1;
        (self.num_bad_reads > patience.bad_reads).then(|| self.fail())
    }

    fn fail(&mut self) -> Vec<Action> {
        self.over = true;
        if self.arrived { vec![Action::Close] } else { vec![Action::Close, Action::Report(Report::Failed)] }
    }
}
