//! What the parts tell each other. Names are those of `worker/baleen_worker/transfer/{messages,actions,orders}.py` and of
//! the contract; owns no behaviour.

/// Which try of the one request.
pub type Attempt = u8;
/// Place of a page in the prompt.
pub type Place = u8;
/// Number of a page in its worker's pool.
pub type PageNumber = u8;

/// What stands in a page. Its digest is itself: equal digests mean equal bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Computed for this attempt, at this place of its prompt.
    Of(Attempt, Place),
    /// Somebody else's, or nobody's yet.
    Foreign,
    /// Changed on its way.
    Damaged,
    /// More bytes than were asked for.
    TooLong,
}

/// One page of an announcement, and what a read names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Announced {
    pub page: PageNumber,
    pub generation: u8,
    pub digest: Content,
}

/// A page by place, number and generation. `pages_per_read` is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Read {
    pub first: Place,
    pub page: PageNumber,
    pub generation: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FromDecode {
    Want,
    Read(Read),
    Ack,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FromPrefill {
    Wait,
    Chunk { first: Place, pages: Vec<Announced> },
    Sealed { first: Place, generation: u8 },
    Stale { first: Place },
    Final,
    Released,
    Refused,
}

/// What a leg asks of whoever drives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    ToDecode(FromPrefill),
    ToPrefill(FromDecode),
    Connect,
    Close,
    Serve(Read),
    Store(Place),
    Report(Report),
}

/// News of a leg for the worker's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Report {
    Begun,
    Arrived,
    Failed,
    Stopped,
    HandedOver,
    LeaseEnded,
}

/// A peer says what it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError;

/// What an engine asks of its transfer thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    Open(Attempt),
    Offer { attempt: Attempt, first: Place, page: PageNumber, generation: u8 },
    Finish(Attempt),
    Withdraw(Attempt),
    Expect { attempt: Attempt, peer_epoch: u8 },
    Receive(Attempt),
    Cancel(Attempt),
}

/// Gateway to worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// `resumed`: tokens that earlier attempts gave. `peer_epoch` matters to decode legs.
    Submit {
        attempt: Attempt,
        resumed: u8,
        peer_epoch: u8,
    },
    Abort(Attempt),
}

/// Worker to gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Row {
    Token {
        attempt: Attempt,
        index: u8,
    },
    /// The last token.
    Last {
        attempt: Attempt,
        index: u8,
    },
    HandedOver(Attempt),
    PeerFailed(Attempt),
}

impl Row {
    /// Whether the leg is over with it.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Token { .. })
    }

    #[must_use]
    pub fn attempt(self) -> Attempt {
        match self {
            Self::Token { attempt, .. }
            | Self::Last { attempt, .. }
            | Self::HandedOver(attempt)
            | Self::PeerFailed(attempt) => attempt,
        }
    }
}
