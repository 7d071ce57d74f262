//! Keeps one stream to every worker, reconnects with back-off, and publishes the workers that are ready.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinHandle};

use super::breaker::Breaker;
use super::client::GatewayIdentity;
use super::client::Link;
use super::key::WorkerKey;
use super::{Role, TokenizerFiles, WorkerInfo};
use crate::route::prefix::SharedPrefixIndex;

mod keeper;
mod pairs;
mod recovery;

pub use keeper::Departure;
use keeper::Keeper;
#[cfg(feature = "kubernetes")]
pub(crate) use keeper::jittered;
pub use pairs::Numbers;
use pairs::Pairs;

/// A worker as the operator names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    pub name: String,
    /// `host:port`; none while it is not known where the worker listens.
    pub address: Option<String>,
    /// What it must say it is.
    pub role: Role,
    /// The port its pages must be read at, where the operator has named one.
    pub transfer_port: Option<u16>,
}

impl WorkerSpec {
    /// A worker that listens at `address` and is known by it.
    #[must_use]
    pub fn at(address: String, role: Role) -> Self {
        Self { name: address.clone(), address: Some(address), role, transfer_port: None }
    }

    /// # Errors
    /// One sentence: the worker is another kind than the operator says.
    fn check(&self, info: &WorkerInfo) -> Result<(), String> {
        let flag = |role| match role {
            Role::Unified => "--worker",
            Role::Prefill => "--prefill",
            Role::Decode => "--decode",
        };
        if info.role != self.role {
            return Err(format!(
                "it is a {} worker and was given by {}: give it by {}, or start it with another --disaggregation-mode",
                info.role,
                flag(self.role),
                flag(info.role)
            ));
        }
        if info.role == Role::Prefill && info.transfer_endpoints.is_empty() {
            return Err("it is a prefill worker that names no endpoint at which its pages can be read".into());
        }
        let Some(expected) = self.transfer_port else { return Ok(()) };
        let ports: Vec<u16> = info.transfer_endpoints.iter().filter_map(super::TransferEndpoint::port).collect();
        if ports.contains(&expected) {
            return Ok(());
        }
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        Err(format!(
            "--prefill says that its pages are read at port {expected}, and it has them at {}: leave the port out, or \
             start it with --disaggregation-bootstrap-port {expected}",
            ports.join(", ")
        ))
    }
}

/// One life of a worker: its place in the pool, and its epoch.
pub type Life = (u16, u64);

/// A worker that takes requests.
#[derive(Clone, Debug)]
pub struct ReadyWorker {
    /// Its place in the pool.
    pub number: u16,
    pub name: Arc<str>,
    /// By it prompts are spread in the same way by every gateway.
    pub name_hash: u64,
    /// Number of its stream among all that this gateway has had: another one after each reconnection.
    pub connection: u64,
    pub info: Arc<WorkerInfo>,
    pub link: Arc<Link>,
    slot: Arc<WorkerSlot>,
}

impl ReadyWorker {
    /// What is known of its failures, to be looked at or changed.
    pub fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.slot.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which life this is.
    #[must_use]
    pub fn life(&self) -> Life {
        (self.number, self.info.boot_epoch)
    }

    /// Whether it can decode from the other's pages.
    #[must_use]
    pub fn pairs_with(&self, prefill: &Self) -> bool {
        self.info.layout_id == prefill.info.layout_id
    }
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
pub struct WorkerSlot {
    number: u16,
    pub name: Arc<str>,
    pub spec: WorkerSpec,
    address: watch::Sender<Option<String>>,
    /// Interrupts a pause between two attempts.
    nudge: Notify,
    condition: Mutex<Condition>,
    breaker: Mutex<Breaker>,
    last_boot_epoch: AtomicU64,
    /// An operator wants no new requests to go there.
    is_set_aside: AtomicBool,
    /// Its stream broke, and has not been tried again yet.
    is_returning: AtomicBool,
    departure: watch::Sender<Departure>,
    keeper: OnceLock<AbortHandle>,
}

impl fmt::Debug for WorkerSlot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WorkerSlot").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl WorkerSlot {
    fn new(number: u16, spec: WorkerSpec) -> Arc<Self> {
        Arc::new(Self {
            number,
            name: spec.name.as_str().into(),
            address: watch::Sender::new(spec.address.clone()),
            spec,
            nudge: Notify::new(),
            condition: Mutex::new(Condition::NotReady("it is not connected yet".into())),
            breaker: Mutex::default(),
            last_boot_epoch: AtomicU64::new(0),
            is_set_aside: AtomicBool::new(false),
            is_returning: AtomicBool::new(false),
            departure: watch::Sender::default(),
            keeper: OnceLock::new(),
        })
    }

    /// Where the worker listens from now on; `None` while there is no such place.
    pub fn set_address(&self, address: Option<String>) {
        self.address.send_replace(address);
        self.nudge.notify_one();
    }

    /// Follows whether the worker leaves.
    #[must_use]
    pub fn departure(&self) -> watch::Receiver<Departure> {
        self.departure.subscribe()
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
    slots: ArcSwap<Vec<Arc<WorkerSlot>>>,
    ready: ArcSwap<Vec<ReadyWorker>>,
    changes: watch::Sender<u64>,
    identity: GatewayIdentity,
    gate: OnceLock<Arc<dyn ModelGate>>,
    /// One change of the slots at a time.
    changing: Mutex<()>,
    is_stopped: AtomicBool,
    /// Shown to every worker.
    key: Option<WorkerKey>,
    num_connections: AtomicU64,
    pairs: Pairs,
    /// Pairs of one layout that take no requests, since no page has come from the one to the other.
    closed_pairs: ArcSwap<HashSet<Numbers>>,
    /// One change of `ready` and `closed_pairs` at a time.
    publishing: Mutex<()>,
    trying: OnceLock<AbortHandle>,
    /// What the workers' prefix caches hold.
    pub prefixes: Arc<SharedPrefixIndex>,
}

impl Pool {
    /// A pool with one slot for each of `workers`, which share `key`; nothing is connected before `start`.
    #[must_use]
    pub fn new(workers: impl IntoIterator<Item = WorkerSpec>, key: Option<WorkerKey>) -> Arc<Self> {
        let slots = (0..).zip(workers).map(|(number, spec)| WorkerSlot::new(number, spec));
        let identity = GatewayIdentity { id: format!("gateway-{}", std::process::id()), epoch: rand::random::<u64>() };
        Arc::new(Self {
            slots: ArcSwap::from_pointee(slots.collect()),
            ready: ArcSwap::default(),
            changes: watch::Sender::new(0),
            identity,
            gate: OnceLock::new(),
            changing: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            key,
            num_connections: AtomicU64::new(0),
            pairs: Pairs::default(),
            closed_pairs: ArcSwap::default(),
            publishing: Mutex::default(),
            trying: OnceLock::new(),
            prefixes: Arc::default(),
        })
    }

    /// Connects every slot, those that are added later too.
    pub fn start(self: &Arc<Self>, gate: &Arc<dyn ModelGate>) {
        let gate = self.gate.get_or_init(|| gate.clone());
        self.slots().iter().for_each(|slot| self.keep(slot, gate));
        // A pool is started once, or started again without effect.
        let _ = self.trying.set(tokio::spawn(pairs::keep_trying(self.clone())).abort_handle());
    }

    /// Gives up every stream, and takes no request from now on.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.slots().iter().filter_map(|slot| slot.keeper.get()).for_each(AbortHandle::abort);
        self.trying.get().into_iter().for_each(|task| task.abort());
        self.changes.send_modify(|version| *version += 1);
    }

    /// Whether this gateway is ending.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Takes a further worker in.
    ///
    /// # Errors
    /// One sentence: there is such a worker already, or no place is left.
    pub fn add(self: &Arc<Self>, spec: WorkerSpec) -> Result<(), String> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = self.slots();
        if slots.iter().any(|slot| *slot.name == *spec.name) {
            return Err(format!("the worker {} is there already", spec.name));
        }
        let is_free = |number: &u16| slots.iter().all(|slot| slot.number != *number);
        let number = (0..u16::MAX).find(is_free).ok_or("there is no place for a further worker")?;
        let slot = WorkerSlot::new(number, spec);
        self.slots.store(Arc::new(slots.iter().chain([&slot]).cloned().collect()));
        if let Some(gate) = self.gate.get() {
            self.keep(&slot, gate);
        }
        Ok(())
    }

    /// Gives a worker up; what it computes for this gateway is lost to it. False where there is none of this name.
    pub fn remove(&self, name: &str) -> bool {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = self.slots();
        let Some(slot) = slots.iter().find(|slot| *slot.name == *name) else { return false };
        self.slots.store(Arc::new(slots.iter().filter(|other| !Arc::ptr_eq(other, slot)).cloned().collect()));
        if let Some(keeper) = slot.keeper.get() {
            keeper.abort();
        }
        self.publish(slot, None);
        self.prefixes.forget(slot.number);
        true
    }

    /// Sends no new request to a worker from now on, or again. False where there is none of this name.
    pub fn set_aside(&self, name: &str, is_set_aside: bool) -> bool {
        let slots = self.slots();
        let Some(slot) = slots.iter().find(|slot| *slot.name == *name) else { return false };
        slot.is_set_aside.store(is_set_aside, Ordering::Release);
        // Its keeper looks at the mark with the next frame, which comes within a second.
        slot.nudge.notify_one();
        true
    }

    /// Workers that take requests now.
    #[must_use]
    pub fn ready(&self) -> Arc<Vec<ReadyWorker>> {
        self.ready.load_full()
    }

    /// Whether a request can be served: by a worker that does all of it, or by a pair whose pages fit.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        let ready = self.ready();
        let of = |role| ready.iter().filter(move |worker| worker.info.role == role);
        of(Role::Unified).next().is_some()
            || of(Role::Decode).any(|decode| of(Role::Prefill).any(|prefill| self.is_open(prefill, decode)))
    }

    /// Pairs of one layout that take no requests, by the workers' numbers.
    #[must_use]
    pub fn closed_pairs(&self) -> Arc<HashSet<Numbers>> {
        self.closed_pairs.load_full()
    }

    fn is_open(&self, prefill: &ReadyWorker, decode: &ReadyWorker) -> bool {
        decode.pairs_with(prefill) && !self.closed_pairs.load().contains(&(prefill.number, decode.number))
    }

    /// What keeps ready workers of a pair apart: one sentence for each that has no partner of its layout, and for each
    /// pair through which no page has come.
    #[must_use]
    pub fn unpaired(&self) -> Vec<String> {
        let ready = self.ready();
        let lonely = |worker: &ReadyWorker| {
            let other = match worker.info.role {
                Role::Unified => return None,
                Role::Prefill => Role::Decode,
                Role::Decode => Role::Prefill,
            };
            let mut others = ready.iter().filter(|partner| partner.info.role == other).peekable();
            let example = (*others.peek()?).clone();
            let has_partner = others.any(|partner| worker.pairs_with(partner));
            (!has_partner).then(|| {
                format!(
                    "{} pairs with no {other} worker: its pages have the layout {}, those of {} have {}",
                    worker.name, worker.info.layout_id, example.name, example.info.layout_id
                )
            })
        };
        ready.iter().filter_map(lonely).chain(self.pairs.obstacles(&ready)).collect()
    }

    /// All workers, ready or not.
    #[must_use]
    pub fn slots(&self) -> Arc<Vec<Arc<WorkerSlot>>> {
        self.slots.load_full()
    }

    /// Changes whenever a worker becomes ready or stops being so.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn keep(self: &Arc<Self>, slot: &Arc<WorkerSlot>, gate: &Arc<dyn ModelGate>) {
        let keeper = Keeper { pool: self.clone(), slot: slot.clone(), gate: gate.clone() };
        let task: JoinHandle<()> = tokio::spawn(keeper.run());
        // A slot is kept once: it was made for this call, or `start` is called for the first time.
        let _ = slot.keeper.set(task.abort_handle());
    }

    fn publish(&self, slot: &WorkerSlot, worker: Option<ReadyWorker>) {
        let publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let ready = self.ready();
        let others = ready.iter().filter(|other| !Arc::ptr_eq(&other.name, &slot.name)).cloned();
        let ready: Vec<ReadyWorker> = others.chain(worker).collect();
        // First what is closed: nobody may see a worker whose pairs seem open because nothing is said of them.
        self.closed_pairs.store(Arc::new(self.pairs.closed(&ready)));
        self.ready.store(Arc::new(ready));
        drop(publishing);
        self.changes.send_modify(|version| *version += 1);
    }

    /// After a trial has ended.
    fn recount_pairs(&self) {
        let publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed_pairs.store(Arc::new(self.pairs.closed(&self.ready())));
        drop(publishing);
        self.changes.send_modify(|version| *version += 1);
    }

    /// Whether another worker could do what this one does.
    fn has_stand_in(&self, slot: &WorkerSlot, role: Role) -> bool {
        self.ready().iter().any(|other| other.number != slot.number && other.info.role == role)
    }
}
