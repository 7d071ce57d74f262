//! What the API server says of one Service's endpoint slices: one list, then a watch from where the list ended.
//!
//! A watch that ends goes on from the last version seen. What makes its history useless (410, an event that cannot be
//! read) costs a new list; a refusal of who asks, a new client from the files as they are by then.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use kube::{Api, Error};
use tokio::sync::watch::Sender;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::access;
use super::slices::Slices;
use crate::config::services::ServicePlace;
use crate::worker::pool::jittered;

/// The API server is to end a watch after this long, so that a connection that is dead without a sign is noticed.
const WATCH_S: u32 = 60;
/// How much later than it should a watch may end.
const GRACE: Duration = Duration::from_secs(5);
/// Longest wait for a list, and for a watch to begin.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A watch that has lasted this long, or has brought something, was a good one.
const GOOD_WATCH: Duration = Duration::from_secs(5);
const MOST_PAUSE: Duration = Duration::from_secs(10);
/// By this label the control plane says whose slice it is.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// See the module.
pub struct Watch {
    place: ServicePlace,
    kubeconfig: Option<PathBuf>,
    least_pause: Duration,
    pause: Duration,
    complaint: Option<String>,
    slices: Slices,
    /// Where a watch goes on; none before the first list, and after what makes another one necessary.
    version: Option<String>,
    news: Sender<Option<Slices>>,
}

/// Why a list or a watch has ended, and so what comes next.
#[derive(Debug)]
enum Trouble {
    /// Goes on from the version seen last.
    Cut(String),
    /// What was seen is of no use any more; none where its time was simply over.
    Stale(Option<String>),
    /// The API server does not know who asks.
    Stranger(String),
}

impl Watch {
    pub fn new(
        place: ServicePlace,
        kubeconfig: Option<PathBuf>,
        least_pause: Duration,
        news: Sender<Option<Slices>>,
    ) -> Self {
        let (complaint, slices, version) = (None, Slices::default(), None);
        Self { place, kubeconfig, least_pause, pause: least_pause, complaint, slices, version, news }
    }

    /// Never returns.
    pub async fn run(mut self) {
        loop {
            let reason = match access::client(self.kubeconfig.as_deref()).await {
                Ok(client) => self.follow(&Api::namespaced(client, &self.place.namespace)).await,
                Err(reason) => reason,
            };
            self.rest(Some(&reason)).await;
        }
    }

    /// Lists and watches until the API server does not know who asks; returns how it says so.
    async fn follow(&mut self, api: &Api<EndpointSlice>) -> String {
        loop {
            match self.list_and_watch(api).await {
                Ok(()) => sleep(jittered(self.least_pause)).await,
                Err(Trouble::Cut(reason)) => self.rest(Some(&reason)).await,
                Err(Trouble::Stale(reason)) => {
                    self.version = None;
                    self.rest(reason.as_deref()).await;
                }
                Err(Trouble::Stranger(reason)) => return reason,
            }
        }
    }

    /// One watch, with a list before it where that is necessary. Returns when a watch that was good has ended.
    async fn list_and_watch(&mut self, api: &Api<EndpointSlice>) -> Result<(), Trouble> {
        let version = match self.version.clone() {
            Some(version) => version,
            None => self.list(api).await?,
        };
        let params = WatchParams::default().labels(&self.selector()).timeout(WATCH_S);
        let began = Instant::now();
        let mut events = match timeout(ANSWER_TIMEOUT, api.watch(&params, &version)).await {
            Ok(Ok(events)) => pin!(events),
            Ok(Err(error)) => return Err(self.trouble("watch", &error)),
            Err(_) => return Err(Trouble::Cut("the API server does not answer".into())),
        };
        let mut was_good = false;
        loop {
            let event = timeout(Duration::from_secs(WATCH_S.into()) + GRACE, events.next()).await;
            let trouble = match event {
                Ok(Some(Ok(event))) => match self.take(event) {
                    Ok(()) => {
                        self.went_well();
                        was_good = true;
                        continue;
                    }
                    Err(trouble) => return Err(trouble),
                },
                Ok(Some(Err(error))) => self.trouble("watch", &error),
                Ok(None) => Trouble::Cut("the API server ends the watch at once".into()),
                Err(_) => Trouble::Cut("the API server has gone silent".into()),
            };
            // However it was cut, it goes on from there.
            return match trouble {
                Trouble::Cut(reason) if was_good || began.elapsed() >= GOOD_WATCH => {
                    debug!(service = %self.place, reason, "a watch has ended");
                    self.went_well();
                    Ok(())
                }
                trouble => Err(trouble),
            };
        }
    }

    async fn list(&mut self, api: &Api<EndpointSlice>) -> Result<String, Trouble> {
        let params = ListParams::default().labels(&self.selector());
        let list = match timeout(ANSWER_TIMEOUT, api.list(&params)).await {
            Ok(Ok(list)) => list,
            Ok(Err(error)) => return Err(self.trouble("list", &error)),
            Err(_) => return Err(Trouble::Cut("the API server does not answer".into())),
        };
        let Some(version) = list.metadata.resource_version.filter(|version| !version.is_empty()) else {
            let reason = "the API server's list has no resourceVersion to watch from";
            return Err(Trouble::Stale(Some(reason.into())));
        };
        self.slices = Slices::listed(list.items);
        self.version = Some(version.clone());
        self.publish();
        self.was_answered();
        Ok(version)
    }

    fn take(&mut self, event: WatchEvent<EndpointSlice>) -> Result<(), Trouble> {
        let version = match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                let version = slice.metadata.resource_version.clone();
                self.slices.put(slice);
                self.publish();
                version
            }
            WatchEvent::Deleted(slice) => {
                self.slices.remove(&slice);
                self.publish();
                slice.metadata.resource_version
            }
            WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version),
            WatchEvent::Error(status) => return Err(refused(&status, "watch", &self.place.namespace, Trouble::stale)),
        };
        self.version = version.or_else(|| self.version.take());
        Ok(())
    }

    fn publish(&self) {
        self.news.send_replace(Some(self.slices.clone()));
    }

    /// By what the API server picks the Service's slices.
    fn selector(&self) -> String {
        format!("{SERVICE_LABEL}={}", self.place.name)
    }

    fn was_answered(&mut self) {
        if self.complaint.take().is_some() {
            info!(service = %self.place, "the API server is followed again");
        }
    }

    fn went_well(&mut self) {
        self.was_answered();
        self.pause = self.least_pause;
    }

    /// Says what is wrong, once, and waits before the next attempt.
    async fn rest(&mut self, reason: Option<&str>) {
        if let Some(reason) = reason.filter(|&reason| self.complaint.as_deref() != Some(reason)) {
            warn!(service = %self.place, reason, "the endpoints cannot be followed: the workers stay as they were");
            self.complaint = Some(reason.to_owned());
        }
        sleep(jittered(self.pause)).await;
        self.pause = (self.pause * 2).min(MOST_PAUSE);
    }

    fn trouble(&self, verb: &str, error: &Error) -> Trouble {
        match error {
            // Any object is taken for a status that is no event; one without a code is neither.
            Error::Api(status) if status.code == 0 => Trouble::stale("what the API server says is no event".into()),
            Error::Api(status) => refused(status, verb, &self.place.namespace, Trouble::Cut),
            Error::SerdeError(error) => Trouble::stale(format!("what the API server says cannot be read: {error}")),
            // The token's file is gone, for example.
            Error::Auth(error) => Trouble::Stranger(format!("this gateway cannot say who it is: {error}")),
            error => Trouble::Cut(access::explain(error)),
        }
    }
}

impl Trouble {
    fn stale(reason: String) -> Self {
        Self::Stale(Some(reason))
    }
}

/// What follows from a refusal; `otherwise` where the code has no consequence of its own.
fn refused(status: &Status, verb: &str, namespace: &str, otherwise: fn(String) -> Trouble) -> Trouble {
    match status.code {
        401 => Trouble::Stranger(access::refusal(status, verb, namespace)),
        410 => Trouble::Stale(None),
        _ => otherwise(access::refusal(status, verb, namespace)),
    }
}
