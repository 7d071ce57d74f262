//! What the gateway was asked to do: arguments, checked once against the machine and then frozen.
//!
//! `args` reads the command line, `keys` the file of API keys, `locate` finds the model and the interpreter, `workers`
//! says which workers there are; everything after `Config` reads plain fields. Flags the gateway does not know belong to
//! the worker and are passed on unchanged.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::net::lookup_host;

pub mod args;
pub mod keys;
pub mod locate;
pub mod names;
pub mod services;
pub mod workers;

pub use args::{Dtype, LogFormat, LogLevel, ServeArgs};
pub use keys::{KeyDigest, KeyFile, KeySpec, digest};
use locate::Surroundings;
use names::{LEAST_INTERVAL, Name};
use services::{LEAST_PAUSE, Service};
pub use workers::{LocalWorker, Source};
use workers::{local_worker, named_workers, remote_workers, served_workers};

use crate::chat::dialect::Dialect;
use crate::chat::style::{StyleChoice, Thinking};
use crate::route::policy::Policies;
use crate::worker::key::WorkerKey;

/// Proxies cut connections that are idle for as little as half a minute.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// A command line that cannot be followed; the message is one sentence for the operator.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// See the module.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub limits: Limits,
    pub source: Source,
    /// What the workers share with this gateway.
    pub worker_key: Option<WorkerKey>,
    /// Names in DNS that stand for further workers.
    pub names: Vec<Name>,
    /// Asked for these names; none for the servers of this machine's configuration.
    pub dns_server: Option<SocketAddr>,
    /// However short answers live, a name is asked for no more often.
    pub dns_least_interval: Duration,
    /// Kubernetes Services whose endpoints are further workers.
    pub services: Vec<Service>,
    /// Says how the API server is reached and who asks; none for what the surroundings say.
    pub kubeconfig: Option<PathBuf>,
    /// The first pause after the API server has failed.
    pub kubernetes_least_pause: Duration,
    /// Names the workers, and is read again when it changes.
    pub workers_file: Option<PathBuf>,
    /// How the workers of a request are chosen.
    pub policies: Policies,
    /// Name clients use; without it the model directory's last component, or the worker's own name for it.
    pub served_model_name: Option<String>,
    /// Read instead of asking a worker.
    pub tokenizer: Option<PathBuf>,
    /// What the operator says about how the model speaks.
    pub style: StyleChoice,
    pub drain_timeout: Duration,
    /// A stream with nothing to say for this long says so.
    pub keep_alive_interval: Duration,
    /// The key of `--api-key`.
    pub api_key_digest: Option<KeyDigest>,
    /// The keys of `--api-keys`, as they were at the start.
    pub api_key_file: Option<KeyFile>,
}

/// What one gateway takes on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_concurrent_requests: usize,
    /// Requests that wait for others to end; more are refused.
    pub queue_size: usize,
    pub queue_timeout: Duration,
    /// Deadline of requests that bring none, and the latest they can ask for.
    pub max_request_time: Duration,
    pub max_body_bytes: usize,
}

impl Config {
    /// Checks `args` against the machine.
    ///
    /// # Errors
    /// One sentence that names the flag or the missing piece.
    pub async fn new(args: ServeArgs, surroundings: &Surroundings) -> Result<Self, ConfigError> {
        let style = style(&args)?;
        let listen = resolve(&args.host, args.port).await?;
        refuse_strangers(&args, listen)?;
        let tokenizer = args.tokenizer.as_deref().map(tokenizer_file).transpose()?;
        let names = named_workers(&args)?;
        if names.is_empty() && args.dns_server.is_some() {
            return Err(ConfigError(
                "--dns-server has no effect without a worker that is given by dns:// or dns+srv://".into(),
            ));
        }
        let services = served_workers(&args)?;
        if services.is_empty() && args.kubeconfig.is_some() {
            return Err(ConfigError("--kubeconfig has no effect without a worker that is given by k8s://".into()));
        }
        let (source, served_model_name) = match remote_workers(&args)? {
            Some(specs) => (Source::Remote(specs), args.served_model_name.clone()),
            None => {
                let worker = local_worker(&args, surroundings)?;
                let name = args.served_model_name.clone().or_else(|| last_component(&worker.model_dir));
                (Source::Local(worker), name)
            }
        };
        Ok(Self {
            listen,
            limits: Limits {
                max_concurrent_requests: args.max_concurrent_requests,
                queue_size: args.queue_size,
                queue_timeout: Duration::from_secs(args.queue_timeout_s),
                max_request_time: Duration::from_secs(args.max_request_time_s),
                max_body_bytes: args.max_body_bytes,
            },
            source,
            names,
            dns_server: args.dns_server,
            dns_least_interval: LEAST_INTERVAL,
            services,
            kubeconfig: args.kubeconfig.clone(),
            kubernetes_least_pause: LEAST_PAUSE,
            worker_key: args.worker_key_file.as_deref().map(worker_key).transpose()?,
            workers_file: args.workers_file.clone(),
            policies: Policies {
                unified: args.policy,
                prefill: args.prefill_policy.unwrap_or(args.policy),
                decode: args.decode_policy.unwrap_or(args.policy),
            },
            served_model_name,
            tokenizer,
            style,
            drain_timeout: Duration::from_secs(args.drain_timeout_s),
            keep_alive_interval: KEEP_ALIVE_INTERVAL,
            api_key_digest: args.api_key.as_deref().map(digest),
            api_key_file: args.api_keys.as_deref().map(KeyFile::read).transpose()?,
        })
    }

    /// Whether clients must show a key.
    #[must_use]
    pub fn needs_key(&self) -> bool {
        self.api_key_digest.is_some() || self.api_key_file.is_some()
    }

    /// Every key that opens this gateway, with `file` as the present content of `--api-keys`.
    #[must_use]
    pub fn keys(&self, file: Option<&KeyFile>) -> Vec<KeySpec> {
        let listed = file.map(|file| file.keys.clone()).unwrap_or_default();
        self.api_key_digest.map(KeySpec::single).into_iter().chain(listed).collect()
    }
}

/// A listener that other machines reach asks for a key, unless the operator says that it need not.
fn refuse_strangers(args: &ServeArgs, listen: SocketAddr) -> Result<(), ConfigError> {
    let needs_key = args.api_key.is_some() || args.api_keys.is_some();
    if listen.ip().is_loopback() || needs_key || args.insecure_listen {
        return Ok(());
    }
    Err(ConfigError(format!(
        "--host {} would let everybody who reaches it use this server: ask for a key by --api-key or --api-keys, or say \
         --insecure-listen where the network keeps strangers away",
        args.host
    )))
}

fn worker_key(path: &Path) -> Result<WorkerKey, ConfigError> {
    WorkerKey::read(path).map_err(|reason| ConfigError(format!("--worker-key-file {reason}")))
}

/// What the operator says about how the model speaks, under the names that other servers use.
fn style(args: &ServeArgs) -> Result<StyleChoice, ConfigError> {
    let by_parser = args.tool_call_parser.as_deref().map(|name| match plain(name).as_str() {
        "deepseekv32" => Ok(Dialect::V32),
        "deepseekv31" => Ok(Dialect::V31),
        "deepseekv3" => Ok(Dialect::V3),
        _ => Err(ConfigError(format!(
            "--tool-call-parser {name} is none of this gateway's: they are deepseekv32, deepseekv31 and deepseekv3"
        ))),
    });
    let by_template = args.chat_template.as_deref().map(template_dialect).transpose()?;
    let thinking = args.reasoning_parser.as_deref().map(|name| match plain(name).as_str() {
        "deepseekv3" | "deepseekv31" | "deepseekv32" => Ok(Thinking::Switched),
        "deepseekr1" => Ok(Thinking::Always),
        _ => Err(ConfigError(format!(
            "--reasoning-parser {name} is none of this gateway's: they are deepseek-v3, where requests switch \
             reasoning, and deepseek-r1, where every answer has it"
        ))),
    });
    let by_parser = by_parser.transpose()?;
    if let (Some(parser), Some(template)) = (by_parser, by_template)
        && parser != template
    {
        return Err(ConfigError(
            "--chat-template and --tool-call-parser name different generations of the model, whose calls are written \
             differently: give one of them"
                .into(),
        ));
    }
    Ok(StyleChoice { dialect: by_parser.or(by_template), thinking: thinking.transpose()? })
}

fn plain(name: &str) -> String {
    name.to_lowercase().replace(['-', '_', '.'], "")
}

/// A template file is never run; its name says which of the built-in dialects it stands for.
fn template_dialect(template: &Path) -> Result<Dialect, ConfigError> {
    let name = template.file_name().unwrap_or_default().to_string_lossy();
    match plain(name.trim_end_matches(".jinja").trim_end_matches(".py")).as_str() {
        "deepseekv32" | "encodingdsv32" => Ok(Dialect::V32),
        // SGLang's template of the last name is V3.2-Exp's.
        "deepseekv31" | "deepseekv32exp" | "toolchattemplatedeepseekv31" | "toolchattemplatedeepseekv32" => {
            Ok(Dialect::V31)
        }
        "deepseekv3" | "deepseekr1" | "toolchattemplatedeepseekv3" | "toolchattemplatedeepseekr1" => Ok(Dialect::V3),
        _ => Err(ConfigError(format!(
            "--chat-template {} names no built-in dialect: templates are not run here, and the dialects are \
             deepseek_v32, deepseek_v31 and deepseek_v3",
            template.display()
        ))),
    }
}

async fn resolve(host: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, port));
    }
    let failed = |reason: String| ConfigError(format!("--host {host} is not an address of this machine: {reason}"));
    let mut addresses = lookup_host((host, port)).await.map_err(|error| failed(error.to_string()))?;
    addresses.next().ok_or_else(|| failed("the name has no address".into()))
}

fn tokenizer_file(path: &Path) -> Result<PathBuf, ConfigError> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if file.is_file() {
        return Ok(file);
    }
    Err(ConfigError(format!("--tokenizer {}: there is no {}", path.display(), file.display())))
}

fn last_component(path: &Path) -> Option<String> {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    // The path as it was typed names the model, unless it ends in a dot: a link may point to a digest.
    let named = path.file_name().or_else(|| absolute.file_name())?;
    Some(named.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
