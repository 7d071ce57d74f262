//! Follows the endpoints of a Kubernetes Service: the API server says where its workers are, and the pool has them.
//!
//! `access` finds the API server and reads its refusals, `watch` keeps what it says of one Service, `slices` tells which
//! workers that means. An API server that cannot be asked changes nothing: the workers that were known stay.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::{Receiver, channel};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::follow::Follower;
use crate::config::services::Service;
use crate::worker::pool::{Pool, WorkerSpec};

mod access;
mod slices;
mod watch;

use slices::Slices;
use watch::Watch;

/// How often it is looked at whether a worker that leaves is done.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps the workers of `service` up to date; never returns. `least_pause` is how long an API server that fails first
/// has peace.
pub async fn keep_up_to_date(pool: Arc<Pool>, service: Service, kubeconfig: Option<PathBuf>, least_pause: Duration) {
    let (sender, receiver) = channel(None);
    let watch = Watch::new(service.place.clone(), kubeconfig, least_pause, sender);
    tokio::join!(watch.run(), follow(Follower::of_its_own(pool), service, receiver));
}

/// Makes the pool have what the slices say, whenever they say something else.
async fn follow(mut follower: Follower, service: Service, mut slices: Receiver<Option<Slices>>) {
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut complaint: Option<String> = None;
    loop {
        tokio::select! {
            _ = looks.tick() => follower.release(),
            Ok(()) = slices.changed() => {
                let Some(slices) = slices.borrow_and_update().clone() else { continue };
                let found = slices.workers(&service.place.port, |name| follower.owns(name));
                if let Ok(addresses) = &found {
                    let spec = |address: &String| WorkerSpec {
                        transfer_port: service.transfer_port,
                        ..WorkerSpec::at(address.clone(), service.role)
                    };
                    follower.follow(&addresses.iter().map(spec).collect::<Vec<_>>());
                }
                let problem = match found {
                    Err(reason) => Some(reason),
                    Ok(_) if slices.is_empty() => Some("it has no endpoint slice: is there a Service of this name?".into()),
                    Ok(_) => None,
                };
                tell(&service, &mut complaint, problem);
            }
        }
    }
}

/// Logs what is wrong with the Service when that changes.
fn tell(service: &Service, complaint: &mut Option<String>, problem: Option<String>) {
    match &problem {
        Some(reason) if complaint.as_ref() != Some(reason) => {
            warn!(service = %service.place, reason, "the Service's workers are not all known");
        }
        None if complaint.is_some() => info!(service = %service.place, "the Service's workers are known again"),
        _ => {}
    }
    *complaint = problem;
}
