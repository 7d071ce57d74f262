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
use crate::discovery::follow::Follower;

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
pub async fn keep_workers_up_to_date(app: Arc<App>) {
    let Some(path) = &app.config.workers_file else { return };
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen: Option<Stamp> = None;
    let mut follower = Follower::of_all(app.pool.clone());
    loop {
        looks.tick().await;
        let stamp = stamp(path);
        if seen.replace(stamp) != Some(stamp) {
            match read_workers_file(path) {
                Ok(specs) => follower.follow(&specs),
                Err(error) => warn!(%error, "the workers stay as they were"),
            }
        }
        follower.release();
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
