//! Sends each request to the worker with the least to do.

use std::sync::atomic::{AtomicUsize, Ordering};

/// What a policy knows of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    /// Requests this gateway has in flight there, exact at this instant.
    pub in_flight: usize,
    /// Requests the worker last reported as running or waiting, those of other gateways included.
    pub reported_requests: usize,
    /// Prompt tokens the worker has not computed yet.
    pub waiting_prompt_tokens: u64,
}

/// See the module. Equal workers take turns.
#[derive(Debug, Default)]
pub struct LeastLoad {
    turn: AtomicUsize,
}

impl LeastLoad {
    /// Index of the chosen worker; `None` where there is none.
    pub fn choose(&self, loads: impl ExactSizeIterator<Item = WorkerLoad>) -> Option<usize> {
        let count = loads.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        // A report is up to a second old, so this gateway's own count wins where it is the larger one.
        let weight = |load: WorkerLoad| (load.in_flight.max(load.reported_requests), load.waiting_prompt_tokens);
        let order = |index: usize| (index + count - turn % count) % count;
        loads.enumerate().min_by_key(|&(index, load)| (weight(load), order(index))).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(in_flight: usize, reported_requests: usize) -> WorkerLoad {
        WorkerLoad { in_flight, reported_requests, waiting_prompt_tokens: 0 }
    }

    #[test]
    fn the_least_loaded_worker_is_chosen() {
        let policy = LeastLoad::default();
        for _ in 0..4 {
            assert_eq!(policy.choose([load(3, 0), load(1, 2), load(0, 4)].into_iter()), Some(1));
        }
        assert_eq!(policy.choose(std::iter::empty()), None);
    }

    #[test]
    fn equal_workers_take_turns() {
        let policy = LeastLoad::default();
        let chosen: Vec<_> = (0..6).filter_map(|_| policy.choose([load(0, 0); 3].into_iter())).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }
}
