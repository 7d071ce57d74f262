//! What is kept of a choice so that another worker can take it over: its submission and its tokens.

use std::sync::Arc;
use std::time::Duration;

use super::limits::ReplayLimits;
use crate::route::pages;
use crate::worker::submit::{Sample, Submission};

/// Memory is taken in steps of this many bytes, so that a token costs no exchange with other requests.
const STEP_BYTES: u64 = 1024;

/// See the module.
#[derive(Debug)]
pub(super) struct Retained {
    submission: Submission,
    token_ids: Vec<u32>,
    taken_bytes: u64,
    limits: Arc<ReplayLimits>,
}

impl Retained {
    /// None where memory for replays is used up.
    pub(super) fn new(submission: Submission, limits: &Arc<ReplayLimits>) -> Option<Self> {
        // The samples of a prompt share it.
        let prompt = if submission.sample.index == 0 { bytes_of(&submission.prompt_token_ids) } else { 0 };
        let taken_bytes = prompt + STEP_BYTES;
        limits.retain(taken_bytes).then(|| Self {
            submission,
            token_ids: Vec::new(),
            taken_bytes,
            limits: limits.clone(),
        })
    }

    /// Adds tokens that were given to the client; false where there is no memory for them.
    pub(super) fn keep(&mut self, token_ids: &[u32]) -> bool {
        let needed = bytes_of(&self.token_ids) + bytes_of(token_ids);
        let grown = needed / STEP_BYTES + 1;
        let before = bytes_of(&self.token_ids) / STEP_BYTES + 1;
        let more = (grown - before) * STEP_BYTES;
        if more > 0 {
            if !self.limits.retain(more) {
                return false;
            }
            self.taken_bytes += more;
        }
        self.token_ids.extend_from_slice(token_ids);
        true
    }

    /// Names the prompt.
    pub(super) fn fingerprint(&self) -> u64 {
        fingerprint(&self.submission)
    }

    /// What another worker is to be given, `elapsed` after the first one was.
    pub(super) fn again(&self, attempt: u32, elapsed: Duration) -> Submission {
        let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let mut submission = self.submission.clone();
        submission.attempt = attempt;
        submission.resumed_token_ids.clone_from(&self.token_ids);
        submission.deadline_ms =
            submission.deadline_ms.map(|deadline_ms| deadline_ms.saturating_sub(elapsed_ms).max(1));
        // Its siblings may have ended, or go elsewhere.
        submission.sample = Sample { size: 1, ..submission.sample };
        if !self.token_ids.is_empty() {
            // All of them came before the first token.
            submission.sampling.prompt_logprobs = None;
        }
        submission
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        self.limits.release(self.taken_bytes);
    }
}

/// Names a submission's prompt among those under which workers died.
pub(super) fn fingerprint(submission: &Submission) -> u64 {
    pages::page_hashes(&submission.prompt_token_ids, &submission.cache_salt, submission.prompt_token_ids.len())
        .first()
        .copied()
        .unwrap_or_default()
}

fn bytes_of(token_ids: &[u32]) -> u64 {
    size_of_val(token_ids) as u64
}
