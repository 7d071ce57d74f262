//! Where the API server is, who asks it, and what its refusals mean to an operator.

use std::error::Error as _;
use std::path::Path;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Client, Config, Error};

/// A pod has this set by its kubelet.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";
/// Where this repository grants what is missing.
const ROLE_FILE: &str = "deploy/kubernetes/base/rbac.yaml";

/// A client with what the files say now: certificates, and the token, which is replaced in place when it nears its end.
///
/// # Errors
/// One sentence: a file is missing or malformed.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, String> {
    let options = KubeConfigOptions::default();
    let config = match kubeconfig {
        Some(path) => match Kubeconfig::read_from(path) {
            Ok(read) => Config::from_custom_kubeconfig(read, &options).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
        .map_err(|reason| format!("--kubeconfig {}: {reason}", path.display())),
        None if std::env::var_os(IN_CLUSTER).is_some() => Config::incluster()
            .map_err(|error| format!("the pod's service account cannot be used ({error}): is its token mounted?")),
        None => Config::from_kubeconfig(&options)
            .await
            .map_err(|error| format!("this is no pod, and there is no kubeconfig: {error}; give one by --kubeconfig")),
    };
    let mut config = config?;
    // When to ask again is decided by `watch`.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| explain(&error))
}

/// What the API server has refused, for the operator; `doing` is the verb of the call.
pub fn refusal(status: &Status, doing: &str, namespace: &str) -> String {
    let said = if status.message.is_empty() { &status.reason } else { &status.message };
    match status.code {
        401 => format!("the API server does not know who asks (401 {said}): is the token or certificate still valid?"),
        403 => format!(
            "the API server does not let this gateway {doing} endpointslices in the namespace {namespace}: allow its \
             service account get, list and watch on endpointslices of discovery.k8s.io, as {ROLE_FILE} does ({said})"
        ),
        code => format!("the API server answers {code} {said}"),
    }
}

/// The innermost cause, which says more than what is wrapped around it.
pub fn explain(error: &Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        words = inner.to_string();
        cause = inner.source();
    }
    format!("the API server cannot be asked: {words}")
}
