//! Asks DNS where workers are, again whenever an answer has run out, and has the pool follow.
//!
//! An answer that fails, or that names nobody, changes nothing: the workers that were known stay.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, Record};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info, warn};

use super::follow::Follower;
use crate::config::names::{Name, Question};
use crate::worker::pool::{Pool, WorkerSpec};

/// However long its answers live, a name is asked for at least as often.
const MOST_INTERVAL: Duration = Duration::from_secs(300);
/// How often it is looked at whether a worker that leaves is done.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Where one name leads, `host:port` each, and for how long that holds.
struct Found {
    addresses: BTreeSet<String>,
    ttl: Duration,
}

/// Asks `server`, or the servers of this machine's configuration.
///
/// # Errors
/// One sentence: this machine's configuration cannot be read.
pub fn resolver(server: Option<SocketAddr>) -> Result<TokioResolver, String> {
    let builder = match server {
        None => TokioResolver::builder_tokio(),
        Some(address) => {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            server.connections.iter_mut().for_each(|connection| connection.port = address.port());
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
            Ok(TokioResolver::builder_with_config(config, TokioRuntimeProvider::default()))
        }
    };
    let mut builder = builder.map_err(|error| format!("this machine's DNS settings cannot be read: {error}"))?;
    let options = builder.options_mut();
    // When to ask again is decided here.
    options.cache_size = 0;
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    builder.build().map_err(|error| format!("DNS cannot be asked: {error}"))
}

/// Keeps the workers of `name` up to date; never returns. `least_interval` passes between two
/// questions, however short answers live.
pub async fn keep_up_to_date(pool: Arc<Pool>, resolver: TokioResolver, name: Name, least_interval: Duration) {
    let mut follower = Follower::of_its_own(pool);
    let mut looks = interval(LOOK_INTERVAL.min(least_interval));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ask_at = Instant::now();
    let mut complaint: Option<String> = None;
    loop {
        looks.tick().await;
        follower.release();
        if Instant::now() < ask_at {
            continue;
        }
        match find(&resolver, &name.question).await {
            Ok(found) => {
                if complaint.take().is_some() {
                    info!(%name, "the name is resolved again");
                }
                let spec = |address: &String| WorkerSpec {
                    transfer_port: name.transfer_port,
                    ..WorkerSpec::at(address.clone(), name.role)
                };
                follower.follow(&found.addresses.iter().map(spec).collect::<Vec<_>>());
                ask_at = Instant::now() + found.ttl.clamp(least_interval, MOST_INTERVAL.max(least_interval));
            }
            Err(reason) => {
                if complaint.as_ref() != Some(&reason) {
                    warn!(%name, reason, "the name is not resolved: its workers stay as they were");
                    complaint = Some(reason);
                }
                ask_at = Instant::now() + least_interval;
            }
        }
    }
}

async fn find(resolver: &TokioResolver, question: &Question) -> Result<Found, String> {
    let mut found = Found { addresses: BTreeSet::new(), ttl: MOST_INTERVAL };
    match question {
        Question::Host { host, port } => found.add_host(resolver, host, *port).await?,
        Question::Service(name) => {
            let answer = resolver.srv_lookup(name.as_str()).await.map_err(|error| error.to_string())?;
            found.live(answer.answers());
            let targets: Vec<_> = answer.answers().iter().filter_map(target).collect();
            // Those of a higher number stand in for these, which a client is to use alone while they are there.
            let first = targets.iter().map(|target| target.0).min();
            for (_, host, port) in targets.into_iter().filter(|target| Some(target.0) == first) {
                found.add_host(resolver, &host, port).await?;
            }
        }
    }
    if found.addresses.is_empty() { Err("the answer names nobody".into()) } else { Ok(found) }
}

impl Found {
    async fn add_host(&mut self, resolver: &TokioResolver, host: &str, port: u16) -> Result<(), String> {
        let answer = resolver.lookup_ip(host).await.map_err(|error| error.to_string())?;
        self.live(answer.as_lookup().answers());
        self.addresses.extend(answer.iter().map(|ip: IpAddr| SocketAddr::new(ip, port).to_string()));
        Ok(())
    }

    /// The whole lives no longer than any of its records.
    fn live(&mut self, records: &[Record]) {
        let shortest = records.iter().map(|record| Duration::from_secs(record.ttl.into())).min();
        self.ttl = self.ttl.min(shortest.unwrap_or_default());
    }
}

/// Priority, host and port of a service record.
fn target(record: &Record) -> Option<(u16, String, u16)> {
    match &record.data {
        RData::SRV(service) => Some((service.priority, service.target.to_string(), service.port)),
        _ => None,
    }
}
