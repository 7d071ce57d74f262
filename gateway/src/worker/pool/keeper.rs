//! Keeps one slot's stream: connects, serves until it ends, and comes back after a pause.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::{Condition, ModelGate, Pool, ReadyWorker, WorkerSlot};
use crate::worker::breaker::Breaker;
use crate::worker::calls::WorkerCalls;
use crate::worker::client::{Inbound, Link};
use crate::worker::error::WorkerError;
use crate::worker::{Failure, WorkerInfo};

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
/// A worker that is ready again is not to wait for long: a second at most, with the greeting and its first answer.
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// Whether a worker is about to end of its own accord, or because somebody else has asked it to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Departure {
    #[default]
    Stays,
    /// It takes no more requests, and has some of this gateway's.
    Drains,
    Drained,
}

/// The task behind one slot.
pub(super) struct Keeper {
    pub pool: Arc<Pool>,
    pub slot: Arc<WorkerSlot>,
    pub gate: Arc<dyn ModelGate>,
}

impl Keeper {
    pub(super) async fn run(self) {
        let mut backoff = FIRST_BACKOFF;
        let mut returns = false;
        let mut addresses = self.slot.address.subscribe();
        loop {
            let Ok(address) = addresses.wait_for(Option::is_some).await.map(|address| address.clone()) else { return };
            let Some(address) = address else { continue };
            let (was_ready, error) = self.serve(&address, returns).await;
            if was_ready {
                backoff = FIRST_BACKOFF;
                returns = true;
            }
            self.note(&error, was_ready);
            tokio::select! {
                () = tokio::time::sleep(jittered(backoff)) => {}
                () = self.slot.nudge.notified() => {}
            }
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }

    /// Serves over one stream until it ends. Returns whether the worker was ready meanwhile, and why it is no longer.
    async fn serve(&self, address: &str, returns: bool) -> (bool, WorkerError) {
        let (link, mut inbound, info) = match self.connect(address).await {
            Ok(connected) => connected,
            Err(error) => return (false, error),
        };
        let (number, prefixes, role) = (self.slot.number, &self.pool.prefixes, info.role);
        prefixes.begin(number, info.capacity_pages as usize);
        let name = self.slot.name.clone();
        let name_hash = xxh3_64(name.as_bytes());
        let connection = self.pool.num_connections.fetch_add(1, Ordering::Relaxed);
        let (info, slot) = (Arc::new(info), self.slot.clone());
        let worker = ReadyWorker { number, name, name_hash, connection, info, link: link.clone(), slot };
        // The first time goes without saying: the banner follows.
        match returns {
            true => info!(worker = %self.slot.name, address, "worker is ready again"),
            false => debug!(worker = %self.slot.name, address, "worker is ready"),
        }
        let epoch = worker.info.boot_epoch;
        if self.slot.last_boot_epoch.swap(epoch, Ordering::Relaxed) != epoch {
            // Another life has a clean record.
            *worker.breaker() = Breaker::default();
        }
        let mut is_taking = None;
        let mut is_draining = false;
        let error = loop {
            let takes = !is_draining && !self.slot.is_set_aside.load(Ordering::Acquire);
            if is_taking != Some(takes) {
                is_taking = Some(takes);
                match takes {
                    true => self.set(Condition::Ready, Some(worker.clone())),
                    false => self.set(Condition::Draining, None),
                }
                self.slot.is_returning.store(false, Ordering::Release);
            }
            self.slot.departure.send_if_modified(|departure| {
                let now = match link.in_flight().requests {
                    _ if !is_draining => Departure::Stays,
                    0 => Departure::Drained,
                    _ => Departure::Drains,
                };
                std::mem::replace(departure, now) != now
            });
            let news = tokio::select! {
                news = inbound.deliver_next() => news,
                () = self.slot.nudge.notified() => continue,
            };
            match news {
                Ok(news) => {
                    news.cache_changes.iter().for_each(|change| prefixes.apply(number, change));
                    is_draining |= news.is_draining;
                }
                Err(error) => break error,
            }
            if inbound.is_stalled() && self.pool.has_stand_in(&self.slot, role) {
                worker.breaker().trip(Instant::now());
                break WorkerError::Stalled;
            }
        };
        self.slot.departure.send_replace(Departure::Stays);
        // One that hangs or shuts down is not back soon.
        let returns = !is_draining && !matches!(error, WorkerError::Stalled | WorkerError::Silent);
        self.slot.is_returning.store(returns, Ordering::Release);
        self.set(Condition::NotReady(error.to_string()), None);
        link.close(&Failure::lost(format!(
            "The worker that computed this request was lost ({error}). Send the request again."
        )));
        prefixes.forget(number);
        (true, error)
    }

    async fn connect(&self, address: &str) -> Result<(Arc<Link>, Inbound, WorkerInfo), WorkerError> {
        let calls = WorkerCalls::connect(address, self.pool.key.clone()).await?;
        let info = calls.info().await?;
        self.slot.spec.check(&info).map_err(WorkerError::Refused)?;
        let files = match self.gate.wants_tokenizer() {
            true => Some(calls.tokenizer(&info.tokenizer_sha256).await?),
            false => None,
        };
        let (gate, admitted) = (self.gate.clone(), info.clone());
        let admission = tokio::task::spawn_blocking(move || gate.admit(&admitted, files)).await;
        admission.map_err(|error| WorkerError::Refused(error.to_string()))?.map_err(WorkerError::Refused)?;
        let (link, inbound) = Link::open(calls, &self.pool.identity, &info).await?;
        Ok((link, inbound, info))
    }

    fn set(&self, condition: Condition, worker: Option<ReadyWorker>) {
        *self.slot.condition.lock().unwrap_or_else(PoisonError::into_inner) = condition;
        self.pool.publish(&self.slot, worker);
    }

    /// Logs a change of reason once, not at every attempt.
    fn note(&self, error: &WorkerError, was_ready: bool) {
        let condition = match error {
            WorkerError::Refused(reason) => Condition::Refused(reason.clone()),
            error => Condition::NotReady(error.to_string()),
        };
        let news = was_ready || self.slot.condition() != condition;
        if news && self.slot.address.borrow().is_some() {
            warn!(worker = %self.slot.name, reason = %error, "worker is not ready");
        }
        if !was_ready {
            self.slot.is_returning.store(false, Ordering::Release);
        }
        self.set(condition, None);
    }
}

/// Between half and all of `pause`, so that many gateways do not come back at the same instant.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())
}
