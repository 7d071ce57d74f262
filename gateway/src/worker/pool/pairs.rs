//! Which pairs are open to requests: those whose pages have one layout and over whose link a page has come.
//!
//! A pair is tried when both workers are ready, and again after either was connected anew; a trial that fails is
//! repeated with back-off. Workers that cannot try (an earlier release) are taken at their word.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tracing::{info, warn};

use super::{Pool, ReadyWorker};
use crate::worker::{PROBE_TRANSFER, Role};

const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Numbers of a prefill and a decode worker.
pub type Numbers = (u16, u16);

/// Connections of a prefill and a decode worker: a worker that is connected anew has another one.
type Connections = (u64, u64);

/// What is known of the pairs of the workers that are ready.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    trials: Mutex<HashMap<Connections, Trial>>,
}

/// How the trials of one pair went.
#[derive(Clone, Debug, Default)]
struct Trial {
    passed: bool,
    /// Why the last one failed.
    failure: Option<String>,
    num_failures: u32,
    /// When it may be tried again; none while it is.
    again_at: Option<Instant>,
}

impl Pairs {
    fn lock(&self) -> MutexGuard<'_, HashMap<Connections, Trial>> {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pairs of one layout that no page has come through yet.
    pub(super) fn closed(&self, ready: &[ReadyWorker]) -> HashSet<Numbers> {
        let trials = self.lock();
        let is_open = |connections| trials.get(&connections).is_some_and(|trial| trial.passed);
        tryable(ready)
            .filter(|(prefill, decode)| !is_open((prefill.connection, decode.connection)))
            .map(|(prefill, decode)| (prefill.number, decode.number))
            .collect()
    }

    /// Whether a pair is tried for the first time since both are connected.
    pub(super) fn are_tried(&self, ready: &[ReadyWorker]) -> bool {
        let trials = self.lock();
        let is_open_question = |(prefill, decode): (&ReadyWorker, &ReadyWorker)| {
            trials
                .get(&(prefill.connection, decode.connection))
                .is_none_or(|trial| !trial.passed && trial.failure.is_none())
        };
        tryable(ready).any(is_open_question)
    }

    /// One sentence for each pair that no page has come through yet.
    pub(super) fn obstacles(&self, ready: &[ReadyWorker]) -> Vec<String> {
        let trials = self.lock();
        let sentence = |(prefill, decode): (&ReadyWorker, &ReadyWorker)| {
            let trial = trials.get(&(prefill.connection, decode.connection));
            let (from, to) = (&prefill.name, &decode.name);
            match trial.and_then(|trial| trial.failure.as_ref()) {
                Some(failure) => Some(format!("no page comes from {from} to {to}: {failure}")),
                None if trial.is_some_and(|trial| trial.passed) => None,
                None => Some(format!("it is being tried whether pages come from {from} to {to}")),
            }
        };
        tryable(ready).filter_map(sentence).collect()
    }

    /// Takes the pairs that are due, forgets those that are gone, and says when the next one is due.
    fn due(&self, ready: &[ReadyWorker], now: Instant) -> (Vec<(ReadyWorker, ReadyWorker)>, Option<Instant>) {
        let mut trials = self.lock();
        let present: HashSet<Connections> =
            tryable(ready).map(|(prefill, decode)| (prefill.connection, decode.connection)).collect();
        trials.retain(|connections, _| present.contains(connections));
        let mut due = Vec::new();
        for (prefill, decode) in tryable(ready) {
            let trial = trials
                .entry((prefill.connection, decode.connection))
                .or_insert(Trial { again_at: Some(now), ..Trial::default() });
            if trial.again_at.is_some_and(|at| at <= now) {
                trial.again_at = None;
                due.push((prefill.clone(), decode.clone()));
            }
        }
        (due, trials.values().filter_map(|trial| trial.again_at).min())
    }

    /// Notes what a trial gave. True where something else is known now.
    fn note(&self, prefill: &ReadyWorker, decode: &ReadyWorker, result: Result<(), String>) -> bool {
        let mut trials = self.lock();
        // One of them may have left meanwhile.
        let Some(trial) = trials.get_mut(&(prefill.connection, decode.connection)) else { return false };
        let failure = result.err();
        trial.passed = failure.is_none();
        let is_news = trial.passed || trial.failure != failure;
        match &failure {
            None if trial.failure.is_some() => {
                info!(prefill = %prefill.name, decode = %decode.name, "pages come again");
            }
            Some(reason) if is_news => {
                warn!(prefill = %prefill.name, decode = %decode.name, %reason, "no page comes: the pair is not used");
            }
            _ => {}
        }
        if failure.is_some() {
            let backoff = FIRST_BACKOFF.saturating_mul(1 << trial.num_failures.min(8)).min(MAX_BACKOFF);
            trial.again_at = Some(Instant::now() + backoff);
            trial.num_failures += 1;
        }
        trial.failure = failure;
        is_news
    }
}

/// Pairs that could be tried.
fn tryable(ready: &[ReadyWorker]) -> impl Iterator<Item = (&ReadyWorker, &ReadyWorker)> {
    let of = move |role| {
        ready.iter().filter(move |worker| worker.info.role == role && worker.info.has_feature(PROBE_TRANSFER))
    };
    of(Role::Prefill)
        .flat_map(move |prefill| of(Role::Decode).map(move |decode| (prefill, decode)))
        .filter(|(prefill, decode)| decode.info.layout_id == prefill.info.layout_id)
}

/// Tries pairs for as long as the pool lives; never returns.
pub(super) async fn keep_trying(pool: Arc<Pool>) {
    let mut changes = pool.changes();
    let mut trials = JoinSet::new();
    loop {
        changes.mark_unchanged();
        let (due, next) = pool.pairs.due(&pool.ready(), Instant::now());
        for (prefill, decode) in due {
            trials.spawn(async move {
                let result = try_pair(&prefill, &decode).await;
                (prefill, decode, result)
            });
        }
        tokio::select! {
            Some(tried) = trials.join_next() => {
                if let Ok((prefill, decode, result)) = tried && pool.pairs.note(&prefill, &decode, result) {
                    pool.recount_pairs();
                }
            }
            changed = changes.changed() => if changed.is_err() { return },
            () = until(next) => {}
        }
    }
}

async fn until(next: Option<Instant>) {
    match next {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

async fn try_pair(prefill: &ReadyWorker, decode: &ReadyWorker) -> Result<(), String> {
    // A prefill worker without an endpoint never becomes ready.
    let peer = prefill.info.transfer_endpoints.first().ok_or("it names no endpoint")?;
    decode.link.calls().probe_transfer(peer, prefill.info.boot_epoch).await
}
