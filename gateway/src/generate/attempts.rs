//! How often a request may be begun again. Pure.
//!
//! Only failures of workers are tried again: what a client did wrong would be wrong elsewhere, and a full queue is an
//! answer. A worker that dies before it gave a token of a request may have died of it: such a request is a suspect, and
//! gets no third worker. One that gave tokens first has hardly died of the request, so more of them may.
//!
//! A worker takes many requests with it that have nothing to do with its death. So suspects rest before they are tried
//! again: workers that are killed one after the other have all died by then, and one whose stream alone broke is back in
//! the same life, which acquits. Suspects are tried apart from each other and from newcomers, and only a death in such a
//! trial condemns.

use std::time::{Duration, Instant};

use crate::worker::FailureKind;
use crate::worker::mailbox::Origin;

/// Workers in a row that may die under one request without a token.
const MAX_DEATHS_IN_VAIN: u32 = 2;
/// The same where a trial was spoilt by newcomers, which may have been the cause as well.
const MAX_DEATHS_IN_COMPANY: u32 = 3;
/// Workers that may die under it in all.
const MAX_DEATHS: u32 = 6;
/// Tries in a row without a token, those that a worker turned down included.
const MAX_TRIES_IN_VAIN: u32 = 4;
/// How long a suspect rests before its trial, and what was taken back from a worker before that is thought survived.
pub(super) const REST: Duration = Duration::from_secs(1);

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
    /// The last of them died in its trial.
    died_in_trial: bool,
    /// When a suspect may be tried.
    rests_until: Option<Instant>,
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failed {
    pub kind: FailureKind,
    /// In its prefill leg, not where its tokens come from.
    pub in_prefill_leg: bool,
    /// Tokens that are out in all.
    pub num_tokens: u32,
    /// Whether another worker could go on after them.
    pub can_resume: bool,
    /// Whether it was a suspect's trial, and nobody came in between.
    pub in_trial: bool,
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

    /// Whether one worker died after another, the last one while it was tried there. Once it has rested it is refused,
    /// unless that worker turns out to live.
    pub(super) fn is_condemned(&self) -> bool {
        self.deaths_in_vain >= MAX_DEATHS_IN_VAIN && self.died_in_trial
    }

    /// The worker that was lost last is back, in the same life.
    pub(super) fn acquit(&mut self) {
        self.deaths = self.deaths.saturating_sub(1);
        self.deaths_in_vain = self.deaths_in_vain.saturating_sub(1);
        self.died_in_trial = false;
    }

    /// Whether it may be given to a worker now, as far as its suspicion goes.
    pub(super) fn has_rested(&self, now: Instant) -> bool {
        !self.is_suspect() || self.rests_until.is_none_or(|until| now >= until)
    }

    /// The present attempt failed.
    pub(super) fn fail(&mut self, failed: Failed, now: Instant) -> Verdict {
        let Failed { kind, in_prefill_leg, num_tokens, can_resume, in_trial } = failed;
        let has_tokens = num_tokens > 0;
        if in_prefill_leg && num_tokens > self.num_tokens {
            // The decode leg of this attempt gives tokens, so it has all that the other one computed.
            return Verdict::GoOn;
        }
        if num_tokens > self.num_tokens {
            (self.deaths_in_vain, self.tries_in_vain) = (0, 0);
        } else {
            self.tries_in_vain += 1;
        }
        match kind {
            FailureKind::Lost | FailureKind::PeerFailed => {
                self.deaths += 1;
                self.deaths_in_vain += u32::from(num_tokens == self.num_tokens);
                // A peer may hear of a death before the gateway does: the rest tells, and a living one acquits.
                self.died_in_trial = in_trial;
                self.rests_until = Some(now + REST);
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
        // A peer that does not answer may be well, and out of reach.
        let may_die = if kind == FailureKind::Lost { MAX_DEATHS_IN_COMPANY } else { MAX_DEATHS_IN_VAIN };
        if self.deaths >= MAX_DEATHS || (self.deaths_in_vain >= may_die && !self.is_condemned()) {
            return Verdict::Fail;
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

    /// An attempt of which nothing is out.
    const IN_VAIN: Failed =
        Failed { kind: FailureKind::Lost, in_prefill_leg: false, num_tokens: 0, can_resume: true, in_trial: false };

    fn fail(attempts: &mut Attempts, failed: Failed) -> Verdict {
        attempts.fail(failed, Instant::now())
    }

    #[test]
    fn the_first_death_without_a_token_is_survived_and_the_second_is_not() {
        let mut attempts = Attempts::default();
        assert_eq!(fail(&mut attempts, IN_VAIN), Verdict::Retry);
        assert_eq!(attempts.current, 1);
        assert!(attempts.is_suspect());
        let (mut by_peer, mut by_chance, mut in_trial) = (attempts, attempts, attempts);
        let trial = Failed { in_trial: true, ..IN_VAIN };
        let given_up = Failed { kind: FailureKind::PeerFailed, ..IN_VAIN };
        assert_eq!(fail(&mut by_peer.clone(), given_up), Verdict::Fail);
        assert_eq!(fail(&mut by_peer, Failed { in_trial: true, ..given_up }), Verdict::Retry);
        assert!(by_peer.is_condemned(), "unless that worker turns out to live");
        assert_eq!(fail(&mut by_chance, IN_VAIN), Verdict::Retry, "it died beside others");
        assert!(!by_chance.is_condemned());
        assert_eq!(fail(&mut by_chance, IN_VAIN), Verdict::Fail);
        assert_eq!(fail(&mut in_trial, trial), Verdict::Retry);
        assert!(in_trial.is_condemned());
        in_trial.acquit();
        assert!(in_trial.is_suspect() && !in_trial.is_condemned(), "the other death still counts");
    }

    #[test]
    fn a_suspect_rests_before_its_trial() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        assert!(attempts.has_rested(now));
        attempts.fail(IN_VAIN, now);
        assert!(!attempts.has_rested(now + REST - Duration::from_millis(1)) && attempts.has_rested(now + REST));
        // One whose worker had given tokens is none, and loses no time.
        let mut attempts = Attempts::default();
        attempts.fail(Failed { num_tokens: 3, ..IN_VAIN }, now);
        assert!(attempts.has_rested(now));
    }

    #[test]
    fn a_worker_that_gave_tokens_did_not_die_of_the_request() {
        let mut attempts = Attempts::default();
        let after = |num_tokens| Failed { num_tokens, ..IN_VAIN };
        assert_eq!(fail(&mut attempts, after(7)), Verdict::Replay);
        assert!(!attempts.is_suspect());
        assert_eq!(fail(&mut attempts, after(7)), Verdict::Replay);
        assert!(attempts.is_suspect(), "the second one gave none");
        assert_eq!(fail(&mut attempts, after(8)), Verdict::Replay);
        assert!(!attempts.is_suspect(), "the third one did");
        assert_eq!(fail(&mut attempts, after(8)), Verdict::Replay);
        assert_eq!(fail(&mut attempts, Failed { in_trial: true, ..after(8) }), Verdict::Replay);
        assert!(attempts.is_condemned());
    }

    #[test]
    fn a_request_that_gets_along_a_little_everywhere_ends_and_is_not_called_the_cause() {
        let mut attempts = Attempts::default();
        let verdicts: Vec<Verdict> =
            (1..=6).map(|num_tokens| fail(&mut attempts, Failed { num_tokens, ..IN_VAIN })).collect();
        assert_eq!(verdicts[..5], [Verdict::Replay; 5]);
        assert_eq!(verdicts[5], Verdict::Fail);
    }

    #[test]
    fn tokens_that_are_out_need_a_worker_that_goes_on_after_them() {
        assert_eq!(
            fail(&mut Attempts::default(), Failed { num_tokens: 1, can_resume: false, ..IN_VAIN }),
            Verdict::Fail
        );
        assert_eq!(fail(&mut Attempts::default(), Failed { can_resume: false, ..IN_VAIN }), Verdict::Retry);
    }

    #[test]
    fn a_prefill_leg_is_not_missed_once_there_are_tokens() {
        let mut attempts = Attempts::default();
        assert_eq!(fail(&mut attempts, Failed { in_prefill_leg: true, num_tokens: 1, ..IN_VAIN }), Verdict::GoOn);
        assert_eq!(attempts, Attempts::default());
        assert_eq!(fail(&mut attempts, Failed { in_prefill_leg: true, ..IN_VAIN }), Verdict::Retry);
    }

    #[test]
    fn a_prefill_leg_is_missed_in_a_replay_until_its_own_decode_leg_gives_tokens() {
        let mut attempts = Attempts::default();
        assert_eq!(fail(&mut attempts, Failed { num_tokens: 3, ..IN_VAIN }), Verdict::Replay);
        let in_prefill_leg = |num_tokens| Failed { in_prefill_leg: true, num_tokens, ..IN_VAIN };
        let mut later = attempts;
        assert_eq!(fail(&mut attempts, in_prefill_leg(3)), Verdict::Replay, "nobody has what it computed");
        assert_eq!(fail(&mut later, in_prefill_leg(4)), Verdict::GoOn);
    }

    #[test]
    fn a_request_that_is_turned_down_everywhere_ends() {
        let mut attempts = Attempts::default();
        let verdicts: Vec<Verdict> =
            (0..4).map(|_| fail(&mut attempts, Failed { kind: FailureKind::Unavailable, ..IN_VAIN })).collect();
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
            assert_eq!(
                fail(&mut Attempts::default(), Failed { kind: failure, ..IN_VAIN }),
                Verdict::Fail,
                "{failure:?}"
            );
        }
    }
}
