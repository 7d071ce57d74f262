//! The command line of `gateway serve`, as typed. Nothing here looks at the machine.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, Command, ValueEnum};

use crate::route::policy::Policy;

/// What `gateway serve` takes.
#[derive(Clone, Debug, Args)]
pub struct ServeWords {
    /// Folder with config.json, tokenizer.json and safetensors files [default: the small built-in model]
    pub model_dir: Option<PathBuf>,
    #[command(flatten)]
    pub flags: ServeFlags,
}

#[derive(Clone, Debug, Args)]
pub struct ServeFlags {
    /// The same as MODEL_DIR
    #[arg(long = "model", alias = "model-path", value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Front a worker that runs already, [grpc://]host:port, or all that a name in DNS stands for, dns+srv://NAME or
    /// dns://HOST:PORT, or all endpoints of a Kubernetes Service, k8s://NAMESPACE/SERVICE[:PORT]; repeat for several
    #[arg(long, value_name = "URL")]
    pub worker: Vec<String>,
    /// Front a prefill worker that runs already, with the port its pages are read at if it should be checked; repeat
    /// for several
    #[arg(long, value_names = ["URL", "PORT"], num_args = 1..=2, action = ArgAction::Append)]
    pub prefill: Vec<String>,
    /// Front a decode worker that runs already; repeat for several
    #[arg(long, value_name = "URL")]
    pub decode: Vec<String>,
    /// File that names workers which run already, one a line: unified|prefill|decode HOST:PORT; read again when it
    /// changes
    #[arg(long, value_name = "FILE")]
    pub workers_file: Option<PathBuf>,
    /// Server to ask for names in DNS, ip:port [default: this machine's]
    #[arg(long, value_name = "ADDRESS")]
    pub dns_server: Option<SocketAddr>,
    /// How to reach the API server of k8s:// workers [default: the service account in a pod, $KUBECONFIG or
    /// ~/.kube/config elsewhere]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Said by --prefill and --decode already
    #[arg(long)]
    pub pd_disaggregation: bool,
    /// Start this many prefill workers for MODEL_DIR here; goes with --decode-workers
    #[arg(long, value_parser = positive, value_name = "N", requires = "decode_workers")]
    pub prefill_workers: Option<usize>,
    /// Start this many decode workers for MODEL_DIR here; goes with --prefill-workers
    #[arg(long, value_parser = positive, value_name = "N", requires = "prefill_workers")]
    pub decode_workers: Option<usize>,
    /// File with a secret that the workers share: every call shows it, and workers started here ask for it
    #[arg(long, env = "BALEEN_WORKER_KEY_FILE", value_name = "FILE")]
    pub worker_key_file: Option<PathBuf>,
    /// How a request's worker is chosen among several
    #[arg(long, value_enum, default_value_t, value_name = "NAME")]
    pub policy: Policy,
    /// The same for prefill workers alone [default: --policy]
    #[arg(long, value_enum, value_name = "NAME")]
    pub prefill_policy: Option<Policy>,
    /// The same for decode workers alone [default: --policy]
    #[arg(long, value_enum, value_name = "NAME")]
    pub decode_policy: Option<Policy>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", help_heading = "Serving")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000, help_heading = "Serving")]
    pub port: u16,
    /// Name of the model for clients [default: the last component of MODEL_DIR]
    #[arg(long, value_name = "NAME", help_heading = "Serving")]
    pub served_model_name: Option<String>,
    /// Key that clients must send as a bearer token
    #[arg(long, env = "BALEEN_API_KEY", hide_env_values = true, value_name = "KEY", help_heading = "Serving")]
    pub api_key: Option<String>,
    /// Let other machines reach listeners that ask for no key, since the network keeps strangers away
    #[arg(long, help_heading = "Serving")]
    pub insecure_listen: bool,
    /// File of keys with limits of their own, a [[key]] table each; read again when it changes and on SIGHUP
    #[arg(long, value_name = "FILE", help_heading = "Serving")]
    pub api_keys: Option<PathBuf>,
    /// Requests in progress at one time; more wait in line
    #[arg(long, default_value_t = 1024, value_parser = positive, value_name = "N", help_heading = "Serving")]
    pub max_concurrent_requests: usize,
    /// Requests in line for their turn; more are answered with 429
    #[arg(long, default_value_t = 1024, value_name = "N", help_heading = "Serving")]
    pub queue_size: usize,
    /// Longest wait in line, after which a request is answered with 429
    #[arg(long, default_value_t = 30, value_parser = seconds, value_name = "S", help_heading = "Serving")]
    pub queue_timeout_s: u64,
    /// Longest time from a request's arrival to its last token; it may ask for less, by `deadline_ms` or by the header
    /// x-request-timeout-ms
    #[arg(long, default_value_t = 1800, value_parser = seconds, value_name = "S", help_heading = "Serving")]
    pub max_request_time_s: u64,
    /// Largest request body
    #[arg(long, default_value_t = 8 * 1024 * 1024, value_parser = positive, value_name = "N", help_heading = "Serving")]
    pub max_body_bytes: usize,
    /// What running requests get to finish in after SIGTERM or SIGINT
    #[arg(long, default_value_t = 60, value_name = "S", help_heading = "Serving")]
    pub drain_timeout_s: u64,
    /// Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU
    #[arg(long, help_heading = "Model")]
    pub dtype: Option<Dtype>,
    /// tokenizer.json, or a folder that holds it [default: the worker's]
    #[arg(long, alias = "tokenizer-path", value_name = "PATH", help_heading = "Model")]
    pub tokenizer: Option<PathBuf>,
    /// Dialect of chat prompts, by the name of its template file: deepseek_v32, deepseek_v31, deepseek_v3 [default: the
    /// model's]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub chat_template: Option<PathBuf>,
    /// Accepted for compatibility: code in a model folder is never run
    #[arg(long, help_heading = "Model")]
    pub trust_remote_code: bool,
    /// Python interpreter of the worker
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub python: Option<PathBuf>,
    /// What to log, for the gateway and its worker; RUST_LOG refines it
    #[arg(long, ignore_case = true, help_heading = "Logging")]
    pub log_level: Option<LogLevel>,
    #[arg(long, default_value = "text", ignore_case = true, help_heading = "Logging")]
    pub log_format: LogFormat,
    /// How prompts and answers write tool calls: deepseekv32, deepseekv31, deepseekv3 [default: the model's]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub tool_call_parser: Option<String>,
    /// Whether reasoning is switched (deepseek-v3) or always there (deepseek-r1) [default: the model's]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub reasoning_parser: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    Auto,
    Float32,
    Bfloat16,
}

impl Dtype {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    Error,
    #[value(alias = "warning")]
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// The nearest level that a worker knows.
    #[must_use]
    pub fn worker_name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warning",
            Self::Info => "info",
            Self::Debug | Self::Trace => "debug",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// A parsed command line: flags of the gateway, and what is passed on to the worker.
#[derive(Clone, Debug)]
pub struct ServeArgs {
    pub model_dir: Option<PathBuf>,
    pub flags: ServeFlags,
    pub worker_flags: Vec<OsString>,
}

impl std::ops::Deref for ServeArgs {
    type Target = ServeFlags;

    fn deref(&self) -> &ServeFlags {
        &self.flags
    }
}

impl ServeArgs {
    /// Puts together what was typed for the gateway and what is for its worker.
    ///
    /// # Errors
    /// The model is named twice, differently.
    pub fn new(words: ServeWords, worker_flags: Vec<OsString>) -> Result<Self, String> {
        let ServeWords { model_dir, flags } = words;
        if let (Some(positional), Some(flag)) = (&model_dir, &flags.model)
            && positional != flag
        {
            return Err(format!("the model is named twice, as {} and as {}", positional.display(), flag.display()));
        }
        Ok(Self { model_dir, flags, worker_flags })
    }

    /// The model directory as typed, if any.
    #[must_use]
    pub fn model(&self) -> Option<&Path> {
        self.model_dir.as_deref().or(self.flags.model.as_deref())
    }
}

/// Separates what the gateway knows from what the worker may know.
///
/// An unknown `--flag` takes the words after it up to the next flag, unless its name says that it is a switch
/// (`--enable-…`, `--disable-…`, `--skip-…`); so MODEL_DIR comes before such flags or after a switch.
pub(crate) fn split(command_line: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Vec<OsString>) {
    let known = known_flags();
    let mut words = command_line.into_iter().peekable();
    let (mut own, mut passed) = (Vec::new(), Vec::new());
    own.extend(words.next());
    while let Some(word) = words.next() {
        if word == "--" {
            passed.extend(words);
            break;
        }
        let Some(name) = flag_name(&word) else {
            own.push(word);
            continue;
        };
        let has_value = word.to_string_lossy().contains('=');
        if let Some(&takes_value) = known.get(name.as_str()) {
            own.push(word);
            if takes_value && !has_value {
                own.extend(words.next());
            }
            continue;
        }
        passed.push(word);
        if !has_value && !is_switch(&name) {
            while let Some(value) = words.next_if(|next| flag_name(next).is_none() && next != "--") {
                passed.push(value);
            }
        }
    }
    if own.len() == 1 && !passed.is_empty() {
        own.push("serve".into());
    }
    (own, passed)
}

/// `--name` of `--name` or `--name=value`; short flags are named as they are. Negative numbers are values.
fn flag_name(word: &OsStr) -> Option<String> {
    let word = word.to_string_lossy();
    let second = word.strip_prefix('-')?.chars().next()?;
    if second.is_ascii_digit() || second == '.' {
        return None;
    }
    Some(word.split('=').next().unwrap_or(&word).to_owned())
}

fn is_switch(name: &str) -> bool {
    ["--enable-", "--disable-", "--skip-", "--no-"].iter().any(|prefix| name.starts_with(prefix))
        || name == "--speculative-use-rejection-sampling"
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(value) => Ok(value),
        Err(_) => Err("it is not a whole number".into()),
    }
}

/// A day is the longest deadline that a worker takes.
fn seconds(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(value @ 1..=86_400) => Ok(value),
        Ok(_) => Err("it must be from 1 to 86400".into()),
        Err(_) => Err("it is not a whole number".into()),
    }
}

/// Every flag the gateway answers to, and whether a value follows it.
fn known_flags() -> HashMap<String, bool> {
    let mut known: HashMap<String, bool> =
        ["-h", "--help", "-V", "--version"].into_iter().map(|name| (name.to_owned(), false)).collect();
    for arg in ServeFlags::augment_args(Command::new("serve")).get_arguments() {
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        let names = arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default());
        known.extend(names.map(|name| (format!("--{name}"), takes_value)));
    }
    known
}
