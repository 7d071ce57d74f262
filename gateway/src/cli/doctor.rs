//! `gateway doctor`: what this machine can run, told by the kernels themselves in the interpreter of a worker.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::Args;

use super::probe;
use crate::config::locate::Surroundings;

/// What `gateway doctor` takes.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Python interpreter of the worker; before other flags
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Flags of `python -m baleen_kernels doctor`: --device cpu, --kv-cache-dtype DTYPE, --no-check
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    flags: Vec<OsString>,
}

impl DoctorArgs {
    /// Finds the interpreter as `gateway serve` does and has the kernels report. The exit code is theirs.
    ///
    /// # Errors
    /// There is no interpreter, or it lacks what a worker needs.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let surroundings = Surroundings::of_this_process();
        let python = surroundings.python(self.python.as_deref())?;
        let envs = surroundings.worker_environment();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(probe::check_interpreter(&python, &envs, true)).map_err(anyhow::Error::msg)?;
        let mut out = std::io::stdout();
        writeln!(out, "gateway {}; workers run on {}", env!("CARGO_PKG_VERSION"), python.display())?;
        out.flush()?;
        let mut report = Command::new(&python);
        report.args(["-m", "baleen_kernels", "doctor"]).args(&self.flags).envs(envs);
        let ended = report.status().with_context(|| format!("cannot run {}", python.display()))?;
        Ok(ended.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
    }
}
