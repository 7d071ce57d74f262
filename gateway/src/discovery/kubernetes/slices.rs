//! The endpoint slices of one Service, and which workers they stand for. Pure: no socket, no clock.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use crate::config::services::ServicePort;

/// The slices as the API server last told them, by their names.
#[derive(Clone, Debug, Default)]
pub struct Slices(BTreeMap<String, EndpointSlice>);

/// What becomes of an endpoint. Where two slices have the same one, as while it moves from the one to the other, the
/// greater counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Takes no new requests and finishes what it has.
    Ends,
    /// Its probe fails, or has not succeeded yet.
    NotReady,
    Ready,
}

impl Slices {
    /// Replaces everything that was known.
    #[must_use]
    pub fn listed(slices: Vec<EndpointSlice>) -> Self {
        Self(slices.into_iter().map(|slice| (slice.metadata.name.clone().unwrap_or_default(), slice)).collect())
    }

    /// Takes in a slice that is new or has changed.
    pub fn put(&mut self, slice: EndpointSlice) {
        self.0.insert(slice.metadata.name.clone().unwrap_or_default(), slice);
    }

    /// Forgets a slice.
    pub fn remove(&mut self, slice: &EndpointSlice) {
        self.0.remove(slice.metadata.name.as_deref().unwrap_or_default());
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `host:port` of every worker that is to take requests.
    ///
    /// These are the endpoints that are ready. Where none is, those that `is_known` and only fail their probe go on:
    /// a control plane that has lost sight of its nodes must not empty a fleet that works. What terminates is never
    /// among them.
    ///
    /// # Errors
    /// One sentence: a slice does not say which of its ports is meant.
    pub fn workers(&self, port: &ServicePort, is_known: impl Fn(&str) -> bool) -> Result<Vec<String>, String> {
        let mut endpoints = BTreeMap::new();
        for slice in self.0.values() {
            let several = slice.endpoints.iter().flatten();
            let mut addressed = several.filter_map(|endpoint| Some((endpoint, endpoint.addresses.first()?))).peekable();
            if addressed.peek().is_none() {
                continue;
            }
            let port = port_of(slice, port)?;
            for (endpoint, host) in addressed {
                let (address, standing) = (address(host, port), standing(endpoint));
                // A pod of two address families has one endpoint in each: the lesser address, IPv4, names it.
                let key =
                    endpoint.target_ref.as_ref().and_then(|pod| pod.uid.clone()).unwrap_or_else(|| address.clone());
                let found = endpoints.entry(key).or_insert_with(|| (address.clone(), standing));
                found.1 = found.1.max(standing);
                if is_before(&address, &found.0) {
                    found.0 = address;
                }
            }
        }
        let of = |wanted| {
            let found = endpoints.values().filter(move |(_, standing)| *standing == wanted);
            found.map(|(address, _)| address.clone())
        };
        let ready: Vec<String> = of(Standing::Ready).collect();
        Ok(if ready.is_empty() { of(Standing::NotReady).filter(|address| is_known(address)).collect() } else { ready })
    }
}

/// What is not said counts as the API's documentation has it: ready, and not terminating.
fn standing(endpoint: &Endpoint) -> Standing {
    let conditions = endpoint.conditions.as_ref();
    let says = |condition: Option<bool>, default| condition.unwrap_or(default);
    // First: a Service that publishes what is not ready calls everything ready.
    if conditions.is_some_and(|conditions| says(conditions.terminating, false)) {
        Standing::Ends
    } else if conditions.is_none_or(|conditions| says(conditions.ready, true)) {
        Standing::Ready
    } else {
        Standing::NotReady
    }
}

fn address(host: &str, port: u16) -> String {
    host.parse::<IpAddr>().map_or_else(|_| format!("{host}:{port}"), |ip| SocketAddr::new(ip, port).to_string())
}

/// IPv4 before IPv6 before names; within a family by number.
fn is_before(address: &str, other: &str) -> bool {
    let rank = |address: &str| address.parse::<SocketAddr>().map_or((1, None), |address| (0, Some(address)));
    rank(address) < rank(other)
}

fn port_of(slice: &EndpointSlice, wanted: &ServicePort) -> Result<u16, String> {
    if let ServicePort::Number(number) = wanted {
        return Ok(*number);
    }
    let is_tcp = |protocol: &Option<String>| protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
    let ports: Vec<(&str, u16)> = slice
        .ports
        .iter()
        .flatten()
        .filter(|port| is_tcp(&port.protocol))
        .filter_map(|port| Some((port.name.as_deref().unwrap_or_default(), u16::try_from(port.port?).ok()?)))
        .collect();
    let names = || ports.iter().map(|(name, port)| format!("{name} {port}").trim().to_owned()).collect::<Vec<_>>();
    match wanted {
        ServicePort::Named(wanted) => match ports.iter().find(|(name, _)| name == wanted) {
            Some((_, port)) => Ok(*port),
            None => Err(format!("the Service has no TCP port named {wanted}: it has {}", listed(&names()))),
        },
        _ => match ports.as_slice() {
            [(_, port)] => Ok(*port),
            [] => Err("the Service names no TCP port: say the number, as in k8s://NAMESPACE/SERVICE:30001".into()),
            _ => Err(format!(
                "the Service has several TCP ports, {}: name one, as in k8s://NAMESPACE/SERVICE:{}",
                listed(&names()),
                ports[0].0
            )),
        },
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests;
