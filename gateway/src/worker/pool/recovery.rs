//! Who is about to serve: for such a one a request waits a moment, in place of being turned away.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::{Pool, WorkerSlot};

/// Longer than a stream takes to be opened again and a page to be tried, where both go well.
const PATIENCE: Duration = Duration::from_secs(2);

impl WorkerSlot {
    /// Whether its stream broke and is opened again. Not so once that has failed: then nobody knows for how long.
    fn is_returning(&self) -> bool {
        self.is_returning.load(Ordering::Acquire)
            && !self.is_set_aside.load(Ordering::Acquire)
            && self.address.borrow().is_some()
    }
}

impl Pool {
    /// Whether somebody may take requests at any moment: a worker whose stream is opened again, or a pair that is tried.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.slots().iter().any(|slot| slot.is_returning()) || self.pairs.are_tried(&self.ready())
    }

    /// Whether a pair of ready workers waits to be open.
    #[must_use]
    pub fn has_closed_pairs(&self) -> bool {
        !self.closed_pairs.load().is_empty()
    }

    /// Calls `attempt` until it succeeds, and whenever a worker or a pair comes or goes: as long as somebody is about to
    /// serve, and not for ever.
    ///
    /// # Errors
    /// The last attempt's.
    pub async fn attempt_while_recovering<T, E>(&self, attempt: impl Fn() -> Result<T, E>) -> Result<T, E> {
        // Nearly always. Looking who is about to serve takes longer than most attempts.
        if let Ok(outcome) = attempt() {
            return Ok(outcome);
        }
        let until = Instant::now() + PATIENCE;
        let mut changes = self.changes();
        loop {
            // Looked at before and after: what changes meanwhile is no reason to give up.
            let was_recovering = self.is_recovering();
            changes.mark_unchanged();
            let outcome = attempt();
            if outcome.is_ok() || !(was_recovering || self.is_recovering()) || self.is_stopped() {
                return outcome;
            }
            if !matches!(tokio::time::timeout_at(until, changes.changed()).await, Ok(Ok(()))) {
                return outcome;
            }
        }
    }
}
