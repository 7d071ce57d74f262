//! Keeps one stream to every worker, reconnects with back-off, and publishes the workers that are ready.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::calls::{GatewayIdentity, WorkerCalls, WorkerError};
use super::client::{Inbound, Link};
use super::{Failure, TokenizerFiles, WorkerInfo};
use crate::route::prefix::SharedPrefixIndex;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// A worker that takes requests.
#[derive(Clone, Debug)]
pub struct ReadyWorker {
    /// Its place in the pool.
    pub number: u16,
    pub name: Arc<str>,
    /// By it prompts are spread in the same way by every gateway.
    pub name_hash: u64,
    pub info: Arc<WorkerInfo>,
    pub link: Arc<Link>,
}

/// What stands between a worker and readiness, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Ready,
    Draining,
    /// One sentence; time may mend it.
    NotReady(String),
    /// One sentence: this worker cannot serve here as it is.
    Refused(String),
}

/// A worker's place in the pool. Its address may change: a supervised worker picks a new port at each start.
#[derive(Debug)]
pub struct WorkerSlot {
    number: u16,
    pub name: Arc<str>,
    address: watch::Sender<Option<String>>,
    /// Interrupts a pause between two attempts.
    nudge: Notify,
    condition: Mutex<Condition>,
}

impl WorkerSlot {
    /// Where the worker listens from now on; `None` while there is no such place.
    pub fn set_address(&self, address: Option<String>) {
        self.address.send_replace(address);
        self.nudge.notify_one();
    }

    /// Why the worker is ready or not.
    #[must_use]
    pub fn condition(&self) -> Condition {
        self.condition.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Accepts the first worker's model and refuses later workers that serve another one.
pub trait ModelGate: Send + Sync + 'static {
    /// Whether tokenizer files are still wanted from a worker.
    fn wants_tokenizer(&self) -> bool;

    /// Called before a worker becomes ready.
    ///
    /// # Errors
    /// One sentence that says why this worker cannot serve here.
    fn admit(&self, info: &WorkerInfo, files: Option<TokenizerFiles>) -> Result<(), String>;
}

/// All workers of this gateway.
pub struct Pool {
    slots: Vec<Arc<WorkerSlot>>,
    ready: ArcSwap<Vec<ReadyWorker>>,
    changes: watch::Sender<u64>,
    identity: GatewayIdentity,
    /// What the workers' prefix caches hold.
    pub prefixes: Arc<SharedPrefixIndex>,
}

impl Pool {
    /// A pool with one slot for each `(name, address)`; nothing is connected before `start`.
    #[must_use]
    pub fn new(workers: impl IntoIterator<Item = (String, Option<String>)>) -> Arc<Self> {
        let slots = (0..).zip(workers).map(|(number, (name, address))| {
            Arc::new(WorkerSlot {
                number,
                name: name.into(),
                address: watch::Sender::new(address),
                nudge: Notify::new(),
                condition: Mutex::new(Condition::NotReady("it is not connected yet".into())),
            })
        });
        let identity = GatewayIdentity { id: format!("gateway-{}", std::process::id()), epoch: rand::random::<u64>() };
        Arc::new(Self {
            slots: slots.collect(),
            ready: ArcSwap::default(),
            changes: watch::Sender::new(0),
            identity,
            prefixes: Arc::default(),
        })
    }

    /// Connects every slot; the tasks run until the pool's streams are closed by aborting the handles.
    pub fn start(self: &Arc<Self>, gate: &Arc<dyn ModelGate>) -> Vec<JoinHandle<()>> {
        let spawn = |slot: &Arc<WorkerSlot>| {
            let keeper = Keeper { pool: self.clone(), slot: slot.clone(), gate: gate.clone() };
            tokio::spawn(keeper.run())
        };
        self.slots.iter().map(spawn).collect()
    }

    /// Workers that take requests now.
    #[must_use]
    pub fn ready(&self) -> Arc<Vec<ReadyWorker>> {
        self.ready.load_full()
    }

    /// All workers, ready or not.
    #[must_use]
    pub fn slots(&self) -> &[Arc<WorkerSlot>] {
        &self.slots
    }

    /// Changes whenever a worker becomes ready or stops being so.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn publish(&self, slot: &WorkerSlot, worker: Option<ReadyWorker>) {
        self.ready.rcu(|ready| {
            let others = ready.iter().filter(|other| !Arc::ptr_eq(&other.name, &slot.name)).cloned();
            others.chain(worker.clone()).collect::<Vec<_>>()
        });
        self.changes.send_modify(|version| *version += 1);
    }
}

/// The task behind one slot.
struct Keeper {
    pool: Arc<Pool>,
    slot: Arc<WorkerSlot>,
    gate: Arc<dyn ModelGate>,
}

impl Keeper {
    async fn run(self) {
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
        let (number, prefixes) = (self.slot.number, &self.pool.prefixes);
        prefixes.begin(number, info.capacity_pages as usize);
        let name = self.slot.name.clone();
        let name_hash = xxh3_64(name.as_bytes());
        let worker = ReadyWorker { number, name, name_hash, info: Arc::new(info), link: link.clone() };
        // The first time goes without saying: the banner follows.
        match returns {
            true => info!(worker = %self.slot.name, address, "worker is ready again"),
            false => debug!(worker = %self.slot.name, address, "worker is ready"),
        }
        self.set(Condition::Ready, Some(worker));
        let mut draining = false;
        let error = loop {
            match inbound.deliver_next().await {
                Ok(news) => {
                    news.cache_changes.iter().for_each(|change| prefixes.apply(number, change));
                    if news.is_draining && !draining {
                        draining = true;
                        self.set(Condition::Draining, None);
                    }
                }
                Err(error) => break error,
            }
        };
        self.set(Condition::NotReady(error.to_string()), None);
        link.close(&Failure::unavailable(format!(
            "The worker that computed this request was lost ({error}). Send the request again."
        )));
        prefixes.forget(number);
        (true, error)
    }

    async fn connect(&self, address: &str) -> Result<(Arc<Link>, Inbound, WorkerInfo), WorkerError> {
        let calls = WorkerCalls::connect(address).await?;
        let info = calls.info().await?;
        let files = match self.gate.wants_tokenizer() {
            true => Some(calls.tokenizer(&info.tokenizer_sha256).await?),
            false => None,
        };
        let (gate, admitted) = (self.gate.clone(), info.clone());
        let admission = tokio::task::spawn_blocking(move || gate.admit(&admitted, files)).await;
        admission.map_err(|error| WorkerError::Refused(error.to_string()))?.map_err(WorkerError::Refused)?;
        let (link, inbound) = calls.open(&self.pool.identity, &info).await?;
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
        self.set(condition, None);
    }
}

/// Between half and all of `pause`, so that many gateways do not come back at the same instant.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())
}
