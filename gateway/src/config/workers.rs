//! Which workers there are: those that run already, and those to be started here.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::locate::Surroundings;
use super::names::{Name, question};
use super::services::{Service, service};
use super::{ConfigError, ServeArgs};
use crate::supervisor::WorkerCommand;
use crate::worker::Role;
use crate::worker::pool::WorkerSpec;

/// Where tokens come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Workers that this gateway starts and stops.
    Local(LocalWorker),
    /// Workers that run on their own.
    Remote(Vec<WorkerSpec>),
}

impl Source {
    /// The workers as the pool takes them in.
    #[must_use]
    pub fn specs(&self) -> Vec<WorkerSpec> {
        match self {
            Self::Local(worker) => worker.specs(),
            Self::Remote(specs) => specs.clone(),
        }
    }
}

/// What is to be started here: one worker, or several of one model that differ in their roles.
#[derive(Clone, Debug)]
pub struct LocalWorker {
    pub model_dir: PathBuf,
    /// What all of them have in common.
    pub command: WorkerCommand,
    /// One entry a worker.
    pub roles: Vec<Role>,
    /// The fake runner does without PyTorch.
    pub needs_torch: bool,
}

impl LocalWorker {
    fn specs(&self) -> Vec<WorkerSpec> {
        let name = |(number, &role): (usize, &Role)| match role {
            Role::Unified => "local".to_owned(),
            role => format!("{role}-{}", self.roles[..number].iter().filter(|&&other| other == role).count()),
        };
        let spec = |worker| WorkerSpec { name: name(worker), address: None, role: *worker.1, transfer_port: None };
        self.roles.iter().enumerate().map(spec).collect()
    }

    /// How a worker of this role is started.
    #[must_use]
    pub fn command_of(&self, role: Role) -> WorkerCommand {
        let mut command = self.command.clone();
        if role != Role::Unified {
            command.args.extend(["--disaggregation-mode", &role.to_string()].map(OsString::from));
        }
        if role == Role::Prefill {
            // Several share this host, so each takes a free port for its pages.
            command.args.extend(["--disaggregation-bootstrap-port", "0"].map(OsString::from));
        }
        command
    }
}

/// The workers that run already; None where one is to be started here.
pub(super) fn remote_workers(args: &ServeArgs) -> Result<Option<Vec<WorkerSpec>>, ConfigError> {
    check_pairing(args)?;
    if let Some(path) = &args.workers_file {
        if !args.worker.is_empty() || !args.prefill.is_empty() || args.prefill_workers.is_some() {
            return Err(ConfigError(
                "--workers-file names all workers: leave out --worker, --prefill, --decode and the flags that start \
                 workers here"
                    .into(),
            ));
        }
        refuse_flags_of_local_workers(args)?;
        return read_workers_file(path).map(Some);
    }
    let mut specs = Vec::new();
    for url in addresses(&args.worker) {
        specs.push(WorkerSpec::at(worker_address("--worker", url)?, Role::Unified));
    }
    for (url, transfer_port) in with_ports(&args.prefill)?.into_iter().filter(|(url, _)| !is_followed(url)) {
        specs.push(WorkerSpec { transfer_port, ..WorkerSpec::at(worker_address("--prefill", url)?, Role::Prefill) });
    }
    for url in addresses(&args.decode) {
        specs.push(WorkerSpec::at(worker_address("--decode", url)?, Role::Decode));
    }
    refuse_twins(&specs)?;
    if specs.is_empty() && named_workers(args)?.is_empty() && served_workers(args)?.is_empty() {
        return Ok(None);
    }
    refuse_flags_of_local_workers(args)?;
    Ok(Some(specs))
}

/// Workers that are given by names in DNS.
pub(super) fn named_workers(args: &ServeArgs) -> Result<Vec<Name>, ConfigError> {
    let name = |(question, role, transfer_port)| Name { question, role, transfer_port };
    Ok(given(args, question)?.into_iter().map(name).collect())
}

/// Workers that are the endpoints of Services.
pub(super) fn served_workers(args: &ServeArgs) -> Result<Vec<Service>, ConfigError> {
    let service_of = |(place, role, transfer_port)| Service { place, role, transfer_port };
    Ok(given(args, service)?.into_iter().map(service_of).collect())
}

/// What a reader of flags and URLs makes of those that are its own: with the role, and the port of pages if named.
fn given<T>(
    args: &ServeArgs,
    read: impl Fn(&str, &str) -> Result<Option<T>, ConfigError>,
) -> Result<Vec<(T, Role, Option<u16>)>, ConfigError> {
    let of = |flag: &'static str, role| {
        let read = &read;
        move |(url, port): (&str, Option<u16>)| Ok(read(flag, url)?.map(|what| (what, role, port)))
    };
    let unified = without_ports(&args.worker).map(of("--worker", Role::Unified));
    let prefill = with_ports(&args.prefill)?.into_iter().map(of("--prefill", Role::Prefill));
    let decode = without_ports(&args.decode).map(of("--decode", Role::Decode));
    unified.chain(prefill).chain(decode).filter_map(Result::transpose).collect()
}

fn without_ports(urls: &[String]) -> impl Iterator<Item = (&str, Option<u16>)> {
    urls.iter().map(|url| (url.as_str(), None))
}

/// Those that are addresses.
fn addresses(urls: &[String]) -> impl Iterator<Item = &String> {
    urls.iter().filter(|url| !is_followed(url))
}

/// Whether workers come and go behind it.
fn is_followed(url: &str) -> bool {
    ["dns://", "dns+srv://", "k8s://"].iter().any(|scheme| url.starts_with(scheme))
}

fn refuse_twins(specs: &[WorkerSpec]) -> Result<(), ConfigError> {
    let mut names = HashSet::new();
    match specs.iter().find(|spec| !names.insert(&spec.name)) {
        Some(twice) => Err(ConfigError(format!("the worker {} is given twice", twice.name))),
        None => Ok(()),
    }
}

/// The workers that a file names, one a line: its role, its address, and for a prefill worker the port of its pages
/// where that should be checked. What follows a `#` is a comment.
///
/// # Errors
/// One sentence that names the file, the line and what is wrong with it.
pub fn read_workers_file(path: &Path) -> Result<Vec<WorkerSpec>, ConfigError> {
    let named = |reason: String| ConfigError(format!("--workers-file {}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    let specs = parse_workers(&text).map_err(|error| named(error.0))?;
    refuse_twins(&specs).map_err(|error| named(error.0))?;
    if specs.iter().any(|spec| spec.role == Role::Unified) && specs.iter().any(|spec| spec.role != Role::Unified) {
        return Err(named("unified workers and workers of pairs are not served side by side".into()));
    }
    Ok(specs)
}

fn parse_workers(text: &str) -> Result<Vec<WorkerSpec>, ConfigError> {
    let mut specs = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        let wrong = |what: &str| {
            ConfigError(format!("line {number}: {what}, expected `unified|prefill|decode HOST:PORT [PORT OF PAGES]`"))
        };
        let Some((&role, rest)) = words.split_first() else { continue };
        let role = match role {
            "unified" => Role::Unified,
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            _ => return Err(wrong("no role")),
        };
        let (address, port) = match *rest {
            [address] => (address, None),
            [address, port] if role == Role::Prefill => {
                (address, Some(port.parse::<u16>().ok().filter(|&port| port > 0).ok_or_else(|| wrong("no port"))?))
            }
            _ => return Err(wrong("too many or too few words")),
        };
        let address = worker_address(&format!("line {number}:"), address)?;
        specs.push(WorkerSpec { transfer_port: port, ..WorkerSpec::at(address, role) });
    }
    Ok(specs)
}

/// Prefill and decode workers need each other, and nothing else beside them.
fn check_pairing(args: &ServeArgs) -> Result<(), ConfigError> {
    let refused = |sentence: &str| Err(ConfigError(sentence.to_owned()));
    let (prefill, decode) = (!args.prefill.is_empty(), !args.decode.is_empty());
    if prefill != decode {
        let (given, missing) = if prefill { ("--prefill", "--decode") } else { ("--decode", "--prefill") };
        return Err(ConfigError(format!("{given} takes workers of the other half too: give at least one {missing}")));
    }
    if prefill && !args.worker.is_empty() {
        return refused("--worker is for workers that do all of a request: leave it out beside --prefill and --decode");
    }
    let starts_pairs = args.prefill_workers.is_some();
    let names_pairs = prefill || starts_pairs || args.workers_file.is_some();
    if starts_pairs && (prefill || !args.worker.is_empty()) {
        return refused(
            "--prefill-workers and --decode-workers start workers here: leave them out where others are given by \
             --worker, --prefill or --decode",
        );
    }
    if args.pd_disaggregation && !names_pairs {
        return refused(
            "--pd-disaggregation takes workers: give them by --prefill and --decode, or start them here with \
             --prefill-workers and --decode-workers",
        );
    }
    Ok(())
}

/// Each URL with the port after it. `none` is a port left out, as other routers spell it.
fn with_ports(words: &[String]) -> Result<Vec<(&str, Option<u16>)>, ConfigError> {
    let mut urls: Vec<(&str, Option<u16>)> = Vec::new();
    for word in words {
        let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number && word != "none" {
            urls.push((word, None));
            continue;
        }
        let wrong = || ConfigError(format!("--prefill {word}: expected URL [PORT], with a port from 1 to 65535"));
        let (_, port) = urls.last_mut().filter(|(_, port)| port.is_none()).ok_or_else(wrong)?;
        if is_number {
            *port = Some(word.parse().ok().filter(|&port| port > 0).ok_or_else(wrong)?);
        }
    }
    Ok(urls)
}

fn refuse_flags_of_local_workers(args: &ServeArgs) -> Result<(), ConfigError> {
    if let Some(model) = args.model() {
        return Err(ConfigError(format!(
            "--worker, --prefill and --decode front workers that run already, so {} would not be used: leave one of \
             them out",
            model.display()
        )));
    }
    if let Some(flag) = args.worker_flags.first() {
        return Err(ConfigError(format!(
            "{} is not a flag of the gateway, and a worker given by its address takes its flags where it is started",
            flag.to_string_lossy()
        )));
    }
    if args.dtype.is_some() {
        return Err(ConfigError(
            "--dtype is for a worker started here: leave it out beside --worker, --prefill and --decode".into(),
        ));
    }
    Ok(())
}

/// `host:port` of a worker's URL; `flag` is named where it is none.
///
/// # Errors
/// One sentence that says what is wrong with it.
pub fn worker_address(flag: &str, url: &str) -> Result<String, ConfigError> {
    let rest = url.strip_prefix("grpc://").or_else(|| url.strip_prefix("http://")).unwrap_or(url);
    let address = rest.trim_end_matches('/');
    let wrong = |reason: &str| ConfigError(format!("{flag} {url}: {reason}, expected [grpc://]host:port"));
    if address.contains("://") {
        return Err(wrong("this scheme is not spoken"));
    }
    let (host, port) = address.rsplit_once(':').ok_or_else(|| wrong("the port is missing"))?;
    if host.is_empty() || host.contains(['/', '@', ' ']) || (host.contains(':') && !host.starts_with('[')) {
        return Err(wrong("the host is malformed"));
    }
    match port.parse::<u16>() {
        Ok(1..) => Ok(address.to_owned()),
        _ => Err(wrong("the port is not a number from 1 to 65535")),
    }
}

/// Roles of the workers to be started here.
fn local_roles(args: &ServeArgs) -> Result<Vec<Role>, ConfigError> {
    let (Some(prefill), Some(decode)) = (args.prefill_workers, args.decode_workers) else {
        return Ok(vec![Role::Unified]);
    };
    let names_role = |flag: &&OsString| {
        ["--disaggregation-mode", "--disaggregation-bootstrap-port"].iter().any(|&name| **flag == name)
    };
    if let Some(flag) = args.worker_flags.iter().find(names_role) {
        return Err(ConfigError(format!(
            "{} is given to each worker by --prefill-workers and --decode-workers: leave it out",
            flag.to_string_lossy()
        )));
    }
    Ok([vec![Role::Prefill; prefill], vec![Role::Decode; decode]].concat())
}

pub(super) fn local_worker(args: &ServeArgs, surroundings: &Surroundings) -> Result<LocalWorker, ConfigError> {
    let roles = local_roles(args)?;
    let model_dir = match args.model() {
        Some(path) => checked_model_dir(path)?,
        None => surroundings.default_model()?,
    };
    let program = surroundings.python(args.python.as_deref())?;
    let mut worker_args: Vec<OsString> = ["-m", "baleen_worker"].map(Into::into).into();
    worker_args.push(model_dir.clone().into_os_string());
    worker_args.extend(["--host", "127.0.0.1", "--port", "0", "--supervised"].map(Into::into));
    if let Some(dtype) = args.dtype {
        worker_args.extend(["--dtype".into(), dtype.name().into()]);
    }
    if let Some(name) = &args.served_model_name {
        worker_args.extend(["--served-model-name".into(), name.into()]);
    }
    if let Some(level) = args.log_level {
        worker_args.extend(["--log-level".into(), level.worker_name().into()]);
    }
    if let Some(file) = &args.worker_key_file {
        // The worker runs in another folder.
        let file = std::path::absolute(file).unwrap_or_else(|_| file.clone());
        worker_args.extend(["--worker-key-file".into(), file.into_os_string()]);
    }
    if args.insecure_listen {
        worker_args.push("--insecure-listen".into());
    }
    worker_args.extend(args.worker_flags.iter().cloned());
    let needs_torch = !has_fake_runner(&args.worker_flags);
    let envs = surroundings.worker_environment();
    let command = WorkerCommand { program, args: worker_args, envs, own_process_group: false };
    Ok(LocalWorker { model_dir, command, roles, needs_torch })
}

fn has_fake_runner(flags: &[OsString]) -> bool {
    flags.iter().any(|flag| flag == "--runner=fake")
        || flags.windows(2).any(|pair| pair[0] == "--runner" && pair[1] == "fake")
}

fn checked_model_dir(path: &Path) -> Result<PathBuf, ConfigError> {
    if path.join("config.json").is_file() {
        return Ok(path.to_owned());
    }
    let path = path.display();
    Err(ConfigError(format!(
        "{path} is not a model directory: it should hold config.json, tokenizer.json and safetensors files; \
         a model from the Hugging Face hub is fetched first, e.g. with `hf download NAME --local-dir DIR`"
    )))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_file_names_a_worker_a_line() {
        let text = "# ours\nprefill http://a:1 8998\n\n  decode b:2 # the new one\nprefill c:3\n";
        let prefill = WorkerSpec::at("a:1".into(), Role::Prefill);
        let expected = [
            WorkerSpec { transfer_port: Some(8998), ..prefill },
            WorkerSpec::at("b:2".into(), Role::Decode),
            WorkerSpec::at("c:3".into(), Role::Prefill),
        ];
        assert_eq!(parse_workers(text).unwrap(), expected);
        assert_eq!(parse_workers("").unwrap(), []);
        for (text, expected) in [
            ("unified a:1\nother b:2", "line 2: no role"),
            ("unified", "too few"),
            ("decode a:1 8998", "too many"),
            ("prefill a:1 x", "no port"),
            ("unified a", "line 1: a: the port is missing"),
        ] {
            let sentence = parse_workers(text).unwrap_err().to_string();
            assert!(sentence.contains(expected), "{sentence}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_followed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers");
        let refusal = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_workers_file(&path).unwrap_err().to_string()
        };
        assert!(refusal("unified a:1\nunified grpc://a:1").contains("given twice"));
        assert!(refusal("unified a:1\ndecode b:1").contains("side by side"));
        std::fs::remove_file(&path).unwrap();
        let sentence = read_workers_file(&path).unwrap_err().to_string();
        assert!(sentence.starts_with("--workers-file ") && sentence.contains("No such file"), "{sentence}");
    }
}
