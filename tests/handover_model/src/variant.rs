//! What a broken variant of the protocol leaves out, to show that the check would notice.

use crate::messages::Attempt;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Variant {
    /// Nothing.
    #[default]
    Whole,
    /// The owner seals a page without a look at its generation after the copy.
    GenerationNotChecked,
    /// The reader stores a page whatever its digest is.
    DigestTrusted,
    /// The reader takes as many bytes as come.
    LengthTrusted,
    /// Pages are held for a peer that never comes.
    LeaseNeverEnds,
    /// The request's id alone names a leg.
    AttemptNotInKey,
    /// An abort never reaches the transfer of the worker.
    AbortDropped,
    /// The decode worker grants pages anew before the transfer has let go of them.
    StoppedNotAwaited,
    /// The gateway takes rows of any attempt.
    EveryRowHeard,
    /// The gateway misses no prefill leg once any attempt has given a token.
    AnyTokenIsEnough,
}

impl Variant {
    /// What names a leg of this attempt at a worker.
    #[must_use]
    pub fn key_of(self, attempt: Attempt) -> usize {
        if self == Self::AttemptNotInKey { 0 } else { usize::from(attempt) }
    }
}
