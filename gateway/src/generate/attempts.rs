//! How often a request may be begun again. Pure.
//!
//! Only failures of workers are tried again: what a client did wrong would be wrong elsewhere, and a full queue is an
//! answer. A request whose workers die one after another may be what kills them, so it gets no third one.

use crate::worker::FailureKind;
use crate::worker::mailbox::Origin;

/// Workers that may die under one request.
const MAX_DEATHS: u32 = 2;
/// Tries in all, those that a worker turned down included.
const MAX_ATTEMPTS: u32 = 4;

/// The tries of one choice so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attempts {
    /// Number of the present one; news of earlier ones counts for nothing.
    pub current: u32,
    deaths: u32,
}

/// What becomes of a choice whose attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is submitted anew; nothing of its answer is out.
    Retry,
    /// It goes on elsewhere after the tokens that are out.
    Replay,
    /// The failure is its answer.
    Fail,
    /// Its workers died one after another.
    Poison,
    /// Nothing: the leg that failed had done its part.
    GoOn,
}

impl Attempts {
    /// Whether news from there counts: it is of the present attempt.
    pub(super) fn hears(&self, origin: Origin) -> bool {
        origin.attempt == self.current
    }

    /// The present attempt failed, in its prefill leg or where its tokens come from. `can_resume` says that another
    /// worker could go on after tokens that are out.
    pub(super) fn fail(
        &mut self,
        failure: FailureKind,
        is_prefill_leg: bool,
        has_tokens: bool,
        can_resume: bool,
    ) -> Verdict {
        if is_prefill_leg && has_tokens {
            // The decode leg gives tokens, so it has all that the other one computed.
            return Verdict::GoOn;
        }
        match failure {
            FailureKind::Lost | FailureKind::PeerFailed => self.deaths += 1,
            FailureKind::Unavailable => {}
            FailureKind::InvalidArgument
            | FailureKind::Unimplemented
            | FailureKind::Internal
            | FailureKind::Poison
            | FailureKind::Overloaded
            | FailureKind::DeadlineExceeded => return Verdict::Fail,
        }
        if has_tokens && !can_resume {
            return Verdict::Fail;
        }
        if self.deaths >= MAX_DEATHS {
            // A peer that does not answer may be well, and out of reach.
            return if failure == FailureKind::Lost { Verdict::Poison } else { Verdict::Fail };
        }
        if self.current + 1 >= MAX_ATTEMPTS {
            return Verdict::Fail;
        }
        self.current += 1;
        if has_tokens { Verdict::Replay } else { Verdict::Retry }
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_death_is_survived_and_the_second_is_not() {
        for (has_tokens, survived) in [(false, Verdict::Retry), (true, Verdict::Replay)] {
            let mut attempts = Attempts::default();
            assert_eq!(attempts.fail(FailureKind::Lost, false, has_tokens, true), survived);
            assert_eq!(attempts.current, 1);
            let (mut by_peer, mut by_death) = (attempts, attempts);
            assert_eq!(by_peer.fail(FailureKind::PeerFailed, false, has_tokens, true), Verdict::Fail);
            assert_eq!(by_death.fail(FailureKind::Lost, false, has_tokens, true), Verdict::Poison);
        }
    }

    #[test]
    fn tokens_that_are_out_need_a_worker_that_goes_on_after_them() {
        assert_eq!(Attempts::default().fail(FailureKind::Lost, false, true, false), Verdict::Fail);
        assert_eq!(Attempts::default().fail(FailureKind::Lost, false, false, false), Verdict::Retry);
    }

    #[test]
    fn a_prefill_leg_is_not_missed_once_there_are_tokens() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.fail(FailureKind::Lost, true, true, false), Verdict::GoOn);
        assert_eq!(attempts, Attempts::default());
        assert_eq!(attempts.fail(FailureKind::Lost, true, false, false), Verdict::Retry);
    }

    #[test]
    fn a_request_that_is_turned_down_everywhere_ends() {
        let mut attempts = Attempts::default();
        let verdicts: Vec<Verdict> =
            (0..4).map(|_| attempts.fail(FailureKind::Unavailable, false, false, true)).collect();
        assert_eq!(verdicts, [Verdict::Retry, Verdict::Retry, Verdict::Retry, Verdict::Fail]);
    }

    #[test]
    fn what_a_worker_says_of_the_request_is_its_answer() {
        for failure in [
            FailureKind::InvalidArgument,
            FailureKind::Unimplemented,
            FailureKind::Internal,
            FailureKind::Overloaded,
            FailureKind::DeadlineExceeded,
        ] {
            assert_eq!(Attempts::default().fail(failure, false, false, true), Verdict::Fail, "{failure:?}");
        }
    }
}
