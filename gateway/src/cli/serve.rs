//! `gateway serve`: the life of the process, from the command line to the last drained stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tracing::{error, info, warn};

use super::{banner, probe, reload};
use crate::app::{App, FirstModel};
use crate::config::locate::Surroundings;
use crate::config::names::Name;
#[cfg(feature = "kubernetes")]
use crate::config::services::Service;
use crate::config::{Config, ConfigError, ServeArgs, Source};
use crate::discovery::dns;
use crate::http::{self, listen};
use crate::supervisor::{Intent, Phase, StartError, Supervisor};
use crate::telemetry::{self, UPKEEP_INTERVAL};
use crate::worker::pool::Condition;

/// How often draining looks whether it is done.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Why the gateway ended with an error. What caused it is its source, not part of its own sentence.
#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Probe(String),
    #[error("cannot listen on {address}")]
    Listen { address: std::net::SocketAddr, source: std::io::Error },
    #[error("{0}")]
    Worker(StartError),
    #[error("the worker runs but cannot be used: {0}")]
    Unusable(String),
    #[error("cannot watch for signals: {0}")]
    Signals(std::io::Error),
    #[error("an inner task ended")]
    Task(#[from] JoinError),
}

impl ServeError {
    /// Whether the worker, which shares standard error, has said it already.
    #[must_use]
    pub fn is_already_told(&self) -> bool {
        matches!(self, Self::Worker(StartError::Fatal(_)))
    }
}

/// Serves until a signal ends it and everything in flight is finished.
///
/// # Errors
/// The command line cannot be followed, or the worker could not be started.
pub async fn run(args: ServeArgs) -> Result<(), ServeError> {
    let started = Instant::now();
    telemetry::init_logging(args.flags.log_level, args.flags.log_format);
    raise_file_limit();
    let config = Config::new(args, &Surroundings::of_this_process()).await?;
    let address = config.listen;
    let listener = TcpListener::bind(address).await.map_err(|source| ServeError::Listen { address, source })?;
    let address = listener.local_addr().map_err(|source| ServeError::Listen { address, source })?;
    if let Source::Local(worker) = &config.source {
        probe::check(worker).await.map_err(ServeError::Probe)?;
    }
    let mut signals = Signals::new().map_err(ServeError::Signals)?;
    let app = App::new(config);
    let mut server = Server::start(app, listener);
    let start = banner::Start {
        address,
        started,
        report: None,
        roles: server.app.pool.slots().iter().map(|slot| slot.spec.role).collect(),
        unpaired: Vec::new(),
        needs_key: server.app.config.needs_key(),
    };
    let ended = tokio::select! {
        ended = server.run(start) => ended,
        () = signals.first() => Ok(()),
    };
    if ended.is_ok() {
        tokio::select! {
            () = server.drain() => {}
            () = signals.first() => warn!("a second signal: ending now"),
        }
    }
    server.stop().await;
    ended
}

/// Every connection is an open file, and the limit that a shell starts with is far below what the machine allows.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, limit = ?limit.current, "the limit on open files, and so on connections, cannot be raised");
    }
}

/// The running parts of a gateway. Tests drive it without signals and without a terminal.
pub struct Server {
    pub app: Arc<App>,
    stop_http: watch::Sender<bool>,
    http: JoinHandle<()>,
    /// With the workers that are started here.
    intent: watch::Sender<Intent>,
    /// Of the workers that are started here.
    phases: Vec<watch::Receiver<Phase>>,
    supervisors: JoinSet<Result<(), StartError>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts serving on `listener`, the worker if it is a local one, and the streams to all workers.
    #[must_use]
    pub fn start(app: Arc<App>, listener: TcpListener) -> Self {
        let (stop_http, http_stopped) = watch::channel(false);
        let intent = watch::Sender::default();
        let http = tokio::spawn(listen::serve(listener, http::routes(app.clone()), http_stopped));
        app.pool.start(&FirstModel::of(app.clone()));
        let mut tasks = vec![
            tokio::spawn(upkeep(app.clone())),
            tokio::spawn(reload::keep_keys_up_to_date(app.clone())),
            tokio::spawn(reload::keep_workers_up_to_date(app.clone())),
        ];
        tasks.extend(follow_names(&app));
        tasks.extend(follow_services(&app));
        let (mut phases, mut supervisors) = (Vec::new(), JoinSet::new());
        if let Source::Local(worker) = &app.config.source {
            for (slot, &role) in app.pool.slots().iter().zip(&worker.roles) {
                let (command, drain_timeout) = (worker.command_of(role), app.config.drain_timeout);
                let child = Supervisor::new(command, slot.clone(), intent.subscribe(), drain_timeout);
                phases.push(child.phases());
                supervisors.spawn(child.run());
            }
        }
        Self { app, stop_http, http, intent, phases, supervisors, tasks }
    }

    /// Shows progress until a worker is ready.
    ///
    /// # Errors
    /// The local worker cannot be started, or cannot be used.
    pub async fn until_ready(&mut self) -> Result<(), ServeError> {
        // One line cannot show the progress of several.
        let single = self.phases.first().filter(|_| self.phases.len() == 1).cloned();
        let progress = single.map(|phases| tokio::spawn(banner::show_progress(phases)));
        let ready = wait_until_ready(self.app.clone());
        match self.supervisors.is_empty() {
            true => ready.await,
            false => tokio::select! {
                () = ready => {}
                Some(ended) = self.supervisors.join_next() => return ended?.map_err(ServeError::Worker),
                unusable = unusable(self.app.clone()) => {
                    return Err(ServeError::Unusable(unusable));
                }
            },
        }
        if let Some(progress) = progress {
            progress.await?;
        }
        Ok(())
    }

    /// Shows progress and the banner; then waits, and returns only if the worker cannot be started.
    async fn run(&mut self, mut start: banner::Start) -> Result<(), ServeError> {
        self.until_ready().await?;
        if let [phases] = self.phases.as_slice()
            && let Phase::Ready(report) = phases.borrow().clone()
        {
            start.report = Some(report);
        }
        start.unpaired = self.app.pool.unpaired();
        if let Some(model) = self.app.model() {
            banner::print(&start, model);
        }
        match self.supervisors.join_next().await {
            None => std::future::pending().await,
            Some(ended) => ended?.map_err(ServeError::Worker),
        }
    }

    /// Turns new requests away and waits, within the configured time, for those in progress.
    pub async fn drain(&self) {
        self.app.start_draining();
        self.intent.send_replace(Intent::Drain);
        let present = || self.app.admission.active() + self.app.admission.waiting();
        let active = present();
        if active > 0 {
            info!(active, "finishing the requests in progress; a second signal ends them");
        }
        let deadline = tokio::time::Instant::now() + self.app.config.drain_timeout;
        while present() > 0 {
            if tokio::time::Instant::now() >= deadline {
                warn!(active = present(), "requests in progress are cut: the time to drain is over");
                return;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }

    /// Ends everything at once, the worker included.
    pub async fn stop(mut self) {
        self.app.start_draining();
        // First the streams to the workers: what is still in flight ends with an error its client can read.
        self.app.pool.stop();
        self.tasks.iter().for_each(JoinHandle::abort);
        self.stop_http.send_replace(true);
        self.intent.send_replace(Intent::Stop);
        // Each of the two ends by itself within its own bound; a panic in one must not keep the other from ending.
        let _ = self.http.await;
        while self.supervisors.join_next().await.is_some() {}
    }
}

/// One task for each name in DNS.
fn follow_names(app: &Arc<App>) -> Vec<JoinHandle<()>> {
    if app.config.names.is_empty() {
        return Vec::new();
    }
    let resolver = match dns::resolver(app.config.dns_server) {
        Ok(resolver) => resolver,
        Err(reason) => {
            error!(reason, "workers given by names cannot be found");
            return Vec::new();
        }
    };
    let follow = |name: &Name| {
        let keep =
            dns::keep_up_to_date(app.pool.clone(), resolver.clone(), name.clone(), app.config.dns_least_interval);
        tokio::spawn(keep)
    };
    app.config.names.iter().map(follow).collect()
}

/// One task for each Kubernetes Service.
#[cfg(feature = "kubernetes")]
fn follow_services(app: &Arc<App>) -> Vec<JoinHandle<()>> {
    use crate::discovery::kubernetes;

    let config = &app.config;
    let follow = |service: &Service| {
        let (pool, kubeconfig) = (app.pool.clone(), config.kubeconfig.clone());
        tokio::spawn(kubernetes::keep_up_to_date(pool, service.clone(), kubeconfig, config.kubernetes_least_pause))
    };
    config.services.iter().map(follow).collect()
}

/// None can be given: the command line refuses them.
#[cfg(not(feature = "kubernetes"))]
fn follow_services(_: &Arc<App>) -> Vec<JoinHandle<()>> {
    Vec::new()
}

async fn wait_until_ready(app: Arc<App>) {
    let mut changes = app.pool.changes();
    while !app.pool.is_serving() {
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Why a local worker that runs cannot be used: its tokenizer is not one this gateway can read, for example.
async fn unusable(app: Arc<App>) -> String {
    let mut changes = app.pool.changes();
    loop {
        let refused = app.pool.slots().iter().find_map(|slot| match slot.condition() {
            Condition::Refused(reason) => Some(reason),
            _ => None,
        });
        if let Some(reason) = refused {
            return reason;
        }
        if changes.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn upkeep(app: Arc<App>) {
    let handle = app.metrics.handle();
    let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        handle.run_upkeep();
    }
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next one of either.
    async fn first(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
