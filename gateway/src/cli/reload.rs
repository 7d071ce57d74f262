//! Reads the file of API keys again when it changes and on SIGHUP, and the file of workers when it changes.
//!
//! A file that cannot be followed changes nothing: what is in force stays, and the log says what is wrong.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::app::App;
use crate::config::KeyFile;
use crate::config::workers::read_workers_file;
use crate::worker::pool::{Pool, ReadyWorker, WorkerSpec};

/// How often the file is looked at. A mounted secret is replaced without a signal.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What changes with a file: when it was written, its length and its inode. A new file may be put in place of the old
/// one within the same clock tick.
type Stamp = (Option<SystemTime>, u64, u64);

/// Keeps the keys of `app` up to date; never returns. Does nothing where there is no file.
///
/// SIGHUP is taken over only here: without a file it ends the process, as it always did.
pub async fn keep_keys_up_to_date(app: Arc<App>) {
    let Some(file) = &app.config.api_key_file else { return };
    let path = file.path.clone();
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => return warn!(%error, "SIGHUP cannot be watched, so changed API keys need a restart"),
    };
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The file may have changed between its first reading and now.
    let mut seen: Option<Stamp> = None;
    loop {
        let asked = tokio::select! {
            _ = hangup.recv() => true,
            _ = looks.tick() => false,
        };
        let stamp = stamp(&path);
        if asked || seen != Some(stamp) {
            let is_first = seen.replace(stamp).is_none();
            reload(&app, &path, is_first);
        }
    }
}

/// Keeps the workers of `app` up to date with their file; never returns. Does nothing where there is no file.
///
/// A worker that is no longer named gets no new requests, and is given up once those in progress have ended.
pub async fn keep_workers_up_to_date(app: Arc<App>) {
    let Some(path) = &app.config.workers_file else { return };
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen: Option<Stamp> = None;
    let mut leaving: Vec<ReadyWorker> = Vec::new();
    loop {
        looks.tick().await;
        let stamp = stamp(path);
        if seen.replace(stamp) != Some(stamp) {
            match read_workers_file(path) {
                Ok(specs) => leaving = follow(&app.pool, &specs, leaving),
                Err(error) => warn!(%error, "the workers stay as they were"),
            }
        }
        let is_done = |worker: &mut ReadyWorker| worker.link.in_flight().requests == 0;
        for worker in leaving.extract_if(.., is_done) {
            app.pool.remove(&worker.name);
        }
    }
}

/// Takes in and sets aside. Returns those that still compute, to be given up later.
fn follow(pool: &Arc<Pool>, specs: &[WorkerSpec], mut leaving: Vec<ReadyWorker>) -> Vec<ReadyWorker> {
    let (slots, ready) = (pool.slots(), pool.ready());
    let is_named = |name: &str| specs.iter().any(|spec| spec.name == name);
    leaving.retain(|worker| !is_named(&worker.name));
    let is_leaving = |name: &str| leaving.iter().any(|worker| *worker.name == *name);
    let gone: Vec<_> = slots.iter().filter(|slot| !is_named(&slot.name) && !is_leaving(&slot.name)).collect();
    for slot in gone {
        info!(worker = %slot.name, "the worker is named no longer");
        match ready.iter().find(|worker| worker.name == slot.name) {
            Some(worker) => {
                pool.set_aside(&slot.name, true);
                leaving.push(worker.clone());
            }
            None => _ = pool.remove(&slot.name),
        }
    }
    for spec in specs {
        match slots.iter().find(|slot| *slot.name == *spec.name) {
            Some(slot) if slot.spec == *spec => _ = pool.set_aside(&spec.name, false),
            // Named as something else now, which it must become at once.
            Some(slot) => {
                pool.remove(&slot.name);
                take_in(pool, spec);
            }
            None => take_in(pool, spec),
        }
    }
    leaving
}

fn take_in(pool: &Arc<Pool>, spec: &WorkerSpec) {
    match pool.add(spec.clone()) {
        Ok(()) => info!(worker = spec.name, "a worker is taken in"),
        Err(reason) => warn!(worker = spec.name, reason, "a worker is not taken in"),
    }
}

fn reload(app: &App, path: &Path, is_first: bool) {
    match KeyFile::read(path) {
        Ok(file) => {
            app.admission.replace_keys(&app.config, &file);
            if !is_first {
                info!(keys = file.keys.len(), "the API keys were read again");
            }
        }
        Err(error) => warn!(%error, "the API keys stay as they were"),
    }
}

/// What the file looks like from outside; a missing one has a look of its own.
fn stamp(path: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or((None, 0, 0), |file| (file.modified().ok(), file.len(), file.ino()))
}
