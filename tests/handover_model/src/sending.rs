//! The prefill leg: `SendingLeg` of `worker/baleen_worker/transfer/sending.py`, method by method.
//!
//! Times are left out: `lease_ends` is `tick` once the lease has run out, and signs of life are not told.

use crate::messages::{Action, Announced, FromDecode, FromPrefill, Place, ProtocolError, Read, Report};
use crate::variant::Variant;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct SendingLeg {
    /// By place.
    announced: Vec<Option<Announced>>,
    is_final: bool,
    attached: bool,
    over: bool,
}

impl SendingLeg {
    pub fn announce(&mut self, first: Place, announced: Announced) -> Vec<Action> {
        let place = usize::from(first);
        self.announced.resize(self.announced.len().max(place + 1), None);
        self.announced[place] = Some(announced);
        self.tell(FromPrefill::Chunk { first, pages: vec![announced] })
    }

    pub fn withdraw(&mut self) -> Vec<Action> {
        self.announced.clear();
        Vec::new()
    }

    pub fn finish(&mut self) -> Vec<Action> {
        self.is_final = true;
        self.tell(FromPrefill::Final)
    }

    pub fn cancel(&mut self) -> Vec<Action> {
        self.over = true;
        self.announced.clear();
        if self.attached { vec![Action::ToDecode(FromPrefill::Refused), Action::Close] } else { Vec::new() }
    }

    pub fn attach(&mut self) -> Vec<Action> {
        self.attached = true;
        let mut told = Vec::new();
        let mut run: Option<(Place, Vec<Announced>)> = None;
        for (place, announced) in (0..).zip(self.announced.iter().copied().chain([None])) {
            match (announced, &mut run) {
                (Some(announced), Some((_, pages))) => pages.push(announced),
                (Some(announced), None) => run = Some((place, vec![announced])),
                (None, _) => {
                    told.extend(run.take().map(|(first, pages)| Action::ToDecode(FromPrefill::Chunk { first, pages })));
                }
            }
        }
        told.extend(self.is_final.then_some(Action::ToDecode(FromPrefill::Final)));
        if told.is_empty() { vec![Action::ToDecode(FromPrefill::Wait)] } else { told }
    }

    pub fn detach(&mut self) {
        self.attached = false;
    }

    /// # Errors
    /// The peer breaks the protocol.
    pub fn hear(&mut self, message: FromDecode) -> Result<Vec<Action>, ProtocolError> {
        match message {
            FromDecode::Read(read) if self.holds(read) => Ok(vec![Action::Serve(read)]),
            FromDecode::Read(read) => Ok(vec![Action::ToDecode(FromPrefill::Stale { first: read.first })]),
            FromDecode::Ack if self.is_final => {
                self.over = true;
                let released = Action::ToDecode(FromPrefill::Released);
                Ok(vec![released, Action::Close, Action::Report(Report::HandedOver)])
            }
            FromDecode::Ack | FromDecode::Want => Err(ProtocolError),
        }
    }

    /// Its page was copied out; `generation` is the one that it had after the copy.
    #[must_use]
    pub fn copied(&self, read: Read, generation: u8, variant: Variant) -> FromPrefill {
        let is_its_own = generation == read.generation || variant == Variant::GenerationNotChecked;
        match is_its_own && self.holds(read) {
            true => FromPrefill::Sealed { first: read.first, generation: read.generation },
            false => FromPrefill::Stale { first: read.first },
        }
    }

    #[must_use]
    pub fn holds(&self, read: Read) -> bool {
        let announced = self.announced.get(usize::from(read.first)).copied().flatten();
        announced.is_some_and(|entry| (entry.page, entry.generation) == (read.page, read.generation))
    }

    /// Whether a lease runs: pages are held for the peer alone.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        self.is_final && !self.over
    }

    pub fn lease_ends(&mut self) -> Vec<Action> {
        self.over = true;
        let mut ends = Vec::new();
        if self.attached {
            ends = vec![Action::ToDecode(FromPrefill::Refused), Action::Close];
        }
        ends.push(Action::Report(Report::LeaseEnded));
        ends
    }

    fn tell(&self, message: FromPrefill) -> Vec<Action> {
        if self.attached { vec![Action::ToDecode(message)] } else { Vec::new() }
    }
}
