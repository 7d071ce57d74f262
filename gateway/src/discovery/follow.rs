//! Makes the workers of a pool those that a source names.
//!
//! A worker that is no longer named gets no new requests, and is given up once those in progress have ended.

use std::collections::HashSet;
use std::sync::Arc;

use tracing::{info, warn};

use crate::worker::pool::{Pool, ReadyWorker, WorkerSpec};

/// See the module.
pub struct Follower {
    pool: Arc<Pool>,
    /// The workers that came from this source; none where every worker of the pool is its own.
    own: Option<HashSet<String>>,
    leaving: Vec<ReadyWorker>,
}

impl Follower {
    /// For a source that names all workers there are.
    #[must_use]
    pub fn of_all(pool: Arc<Pool>) -> Self {
        Self { pool, own: None, leaving: Vec::new() }
    }

    /// For a source beside others, which never touches the workers of these.
    #[must_use]
    pub fn of_its_own(pool: Arc<Pool>) -> Self {
        Self { pool, own: Some(HashSet::new()), leaving: Vec::new() }
    }

    /// Takes in and sets aside.
    pub fn follow(&mut self, specs: &[WorkerSpec]) {
        let (slots, ready) = (self.pool.slots(), self.pool.ready());
        let is_named = |name: &str| specs.iter().any(|spec| spec.name == name);
        self.leaving.retain(|worker| !is_named(&worker.name));
        let gone = slots.iter().filter(|slot| !is_named(&slot.name) && self.owns(&slot.name));
        for slot in gone.cloned().collect::<Vec<_>>() {
            if self.leaving.iter().any(|worker| worker.name == slot.name) {
                continue;
            }
            info!(worker = %slot.name, "the worker is named no longer");
            match ready.iter().find(|worker| worker.name == slot.name) {
                Some(worker) => {
                    self.pool.set_aside(&slot.name, true);
                    self.leaving.push(worker.clone());
                }
                None => self.give_up(&slot.name),
            }
        }
        for spec in specs {
            match slots.iter().find(|slot| *slot.name == *spec.name) {
                // Somebody else's, who has named it first.
                Some(slot) if !self.owns(&slot.name) => {}
                Some(slot) if slot.spec == *spec => _ = self.pool.set_aside(&spec.name, false),
                // Named as something else now, which it must become at once.
                Some(slot) => {
                    self.give_up(&slot.name);
                    self.take_in(spec);
                }
                None => self.take_in(spec),
            }
        }
    }

    /// Gives up those that leave and have nothing in progress. To be called now and then.
    pub fn release(&mut self) {
        let is_done = |worker: &mut ReadyWorker| worker.link.in_flight().requests == 0;
        for worker in self.leaving.extract_if(.., is_done).collect::<Vec<_>>() {
            self.give_up(&worker.name);
        }
    }

    /// Whether the worker of this name came from this source.
    #[must_use]
    pub fn owns(&self, name: &str) -> bool {
        self.own.as_ref().is_none_or(|own| own.contains(name))
    }

    fn give_up(&mut self, name: &str) {
        self.pool.remove(name);
        if let Some(own) = &mut self.own {
            own.remove(name);
        }
    }

    fn take_in(&mut self, spec: &WorkerSpec) {
        match self.pool.add(spec.clone()) {
            Ok(()) => {
                info!(worker = spec.name, "a worker is taken in");
                if let Some(own) = &mut self.own {
                    own.insert(spec.name.clone());
                }
            }
            Err(reason) => warn!(worker = spec.name, reason, "a worker is not taken in"),
        }
    }
}
