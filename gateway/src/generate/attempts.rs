//! How often a request may be begun again. Pure.
//!
//! Only failures of workers are tried again: what a client did wrong would be wrong elsewhere, and a full queue is an
//! answer. A worker that dies before it gave a token of a request may have died of it: such a request is a suspect, and
//! gets no third worker. One that gave tokens first has hardly died of the request, so more of them may.

use crate::worker::FailureKind;
use crate::worker::mailbox::Origin;

/// Workers in a row that may die under one request without a token.
const MAX_DEATHS_IN_VAIN: u32 = 2;
/// Workers that may die under it in all.
const MAX_DEATHS: u32 = 6;
/// Tries in a row without a token, those that a worker turned down included.
const MAX_TRIES_IN_VAIN: u32 = 4;

/// The tries of one choice so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attempts {
    /// Number of the present one; news of earlier ones counts for nothing.
    pub current: u32,
    /// Tokens that were out when it began.
    num_tokens: u32,
    deaths: u32,
    deaths_in_vain: u32,
    tries_in_vain: u32,
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

    /// Whether the last worker may have died of the request.
    pub(super) fn is_suspect(&self) -> bool {
        self.deaths_in_vain > 0
    }

    /// The present attempt failed, in its prefill leg or where its tokens come from, with `num_tokens` out in all.
    /// `can_resume` says that another worker could go on after them.
    pub(super) fn fail(
        &mut self,
        failure: FailureKind,
        is_prefill_leg: bool,
        num_tokens: u32,
        can_resume: bool,
    ) -> Verdict {
        let has_tokens = num_tokens > 0;
        if is_prefill_leg && has_tokens {
            // The decode leg gives tokens, so it has all that the other one computed.
            return Verdict::GoOn;
        }
        if num_tokens > self.num_tokens {
            (self.deaths_in_vain, self.tries_in_vain) = (0, 0);
        } else {
            self.tries_in_vain += 1;
        }
        match failure {
            FailureKind::Lost | FailureKind::PeerFailed => {
                self.deaths += 1;
                self.deaths_in_vain += u32::from(num_tokens == self.num_tokens);
            }
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
        if self.deaths_in_vain >= MAX_DEATHS_IN_VAIN || self.deaths >= MAX_DEATHS {
            // A peer that does not answer may be well, and out of reach.
            return if failure == FailureKind::Lost { Verdict::Poison } else { Verdict::Fail };
        }
        if self.tries_in_vain >= MAX_TRIES_IN_VAIN {
            return Verdict::Fail;
        }
        self.current += 1;
        self.num_tokens = num_tokens;
        if has_tokens { Verdict::Replay } else { Verdict::Retry }
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_death_without_a_token_is_survived_and_the_second_is_not() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.fail(FailureKind::Lost, false, 0, true), Verdict::Retry);
        assert_eq!(attempts.current, 1);
        assert!(attempts.is_suspect());
        let (mut by_peer, mut by_death) = (attempts, attempts);
        assert_eq!(by_peer.fail(FailureKind::PeerFailed, false, 0, true), Verdict::Fail);
        assert_eq!(by_death.fail(FailureKind::Lost, false, 0, true), Verdict::Poison);
    }

    #[test]
    fn a_worker_that_gave_tokens_did_not_die_of_the_request() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.fail(FailureKind::Lost, false, 7, true), Verdict::Replay);
        assert!(!attempts.is_suspect());
        assert_eq!(attempts.fail(FailureKind::Lost, false, 7, true), Verdict::Replay);
        assert!(attempts.is_suspect(), "the second one gave none");
        assert_eq!(attempts.fail(FailureKind::Lost, false, 8, true), Verdict::Replay);
        assert!(!attempts.is_suspect(), "the third one did");
        assert_eq!(attempts.fail(FailureKind::Lost, false, 8, true), Verdict::Replay);
        assert_eq!(attempts.fail(FailureKind::Lost, false, 8, true), Verdict::Poison);
    }

    #[test]
    fn a_request_that_gets_along_a_little_everywhere_ends_all_the_same() {
        let mut attempts = Attempts::default();
        let verdicts: Vec<Verdict> =
            (1..=6).map(|num_tokens| attempts.fail(FailureKind::Lost, false, num_tokens, true)).collect();
        assert_eq!(verdicts[..5], [Verdict::Replay; 5]);
        assert_eq!(verdicts[5], Verdict::Poison);
    }

    #[test]
    fn tokens_that_are_out_need_a_worker_that_goes_on_after_them() {
        assert_eq!(Attempts::default().fail(FailureKind::Lost, false, 1, false), Verdict::Fail);
        assert_eq!(Attempts::default().fail(FailureKind::Lost, false, 0, false), Verdict::Retry);
    }

    #[test]
    fn a_prefill_leg_is_not_missed_once_there_are_tokens() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.fail(FailureKind::Lost, true, 1, false), Verdict::GoOn);
        assert_eq!(attempts, Attempts::default());
        assert_eq!(attempts.fail(FailureKind::Lost, true, 0, false), Verdict::Retry);
    }

    #[test]
    fn a_request_that_is_turned_down_everywhere_ends() {
        let mut attempts = Attempts::default();
        let verdicts: Vec<Verdict> = (0..4).map(|_| attempts.fail(FailureKind::Unavailable, false, 0, true)).collect();
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
            assert_eq!(Attempts::default().fail(failure, false, 0, true), Verdict::Fail, "{failure:?}");
        }
    }
}
