//! Looks, before an interpreter is given work, whether it has what it needs, so that what is missing is said in one
//! sentence with the command that installs it.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::config::LocalWorker;

/// A cold file system may take a while to find a package.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Prints the version and the modules that cannot be found. Nothing is imported: importing PyTorch takes seconds.
const SCRIPT: &str = "\
import importlib.util, sys
print(*sys.version_info[:2])
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))";

const MIN_PYTHON: (u32, u32) = (3, 11);
const MODULES: [&str; 4] = ["baleen_worker", "msgspec", "zmq", "grpc"];

/// Checks the interpreter of `worker`.
///
/// # Errors
/// One sentence that says what is missing and which command installs it.
pub async fn check(worker: &LocalWorker) -> Result<(), String> {
    check_interpreter(&worker.command.program, &worker.command.envs, worker.needs_torch).await
}

/// Checks an interpreter; `envs` is added to this process's environment.
///
/// # Errors
/// As for `check`.
pub async fn check_interpreter(python: &Path, envs: &[(OsString, OsString)], needs_torch: bool) -> Result<(), String> {
    let mut modules: Vec<&str> = MODULES.to_vec();
    if needs_torch {
        modules.extend(["torch", "baleen_kernels"]);
    }
    let run = Command::new(python)
        .args(["-c", SCRIPT])
        .args(modules)
        .envs(envs.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let python = python.display();
    let output = match tokio::time::timeout(TIMEOUT, run).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(format!("cannot run {python}: {error}; name an interpreter with --python")),
        Err(_) => return Err(format!("{python} did not answer in {} s", TIMEOUT.as_secs())),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("no message");
        return Err(format!("{python} does not work as a Python interpreter ({}): {last}", output.status));
    }
    judge(&python.to_string(), &String::from_utf8_lossy(&output.stdout), in_checkout(envs))
}

fn in_checkout(envs: &[(OsString, OsString)]) -> bool {
    envs.iter().any(|(name, _)| name == "PYTHONPATH")
}

/// Reads what the script printed.
fn judge(python: &str, output: &str, in_checkout: bool) -> Result<(), String> {
    let mut lines = output.lines();
    let version: Vec<u32> = lines.next().unwrap_or_default().split(' ').filter_map(|part| part.parse().ok()).collect();
    let &[major, minor] = version.as_slice() else {
        return Err(format!("{python} does not work as a Python interpreter: it printed {output:?}"));
    };
    let (min_major, min_minor) = MIN_PYTHON;
    if (major, minor) < MIN_PYTHON {
        return Err(format!(
            "{python} is Python {major}.{minor}, and the worker needs {min_major}.{min_minor} or later: name another \
             interpreter with --python"
        ));
    }
    let missing: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    match missing.as_slice() {
        [] => Ok(()),
        ["torch"] => Err(format!(
            "{python} has no PyTorch; install it with: {python} -m pip install 'torch>=2.11' \
             (for a machine without a GPU add --index-url https://download.pytorch.org/whl/cpu)"
        )),
        missing => {
            let names = missing.join(", ");
            let command = if in_checkout { "make setup".to_owned() } else { format!("{python} -m pip install baleen") };
            Err(format!("{python} lacks what the worker needs ({names}); install it with: {command}"))
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::judge;

    #[test]
    fn a_complete_interpreter_passes() {
        assert_eq!(judge("py", "3 11\n\n", true), Ok(()));
        assert_eq!(judge("py", "3 14\n", true), Ok(()));
    }

    #[test]
    fn what_is_missing_is_named_with_the_command_that_installs_it() {
        let cases = [
            ("3 10\n\n", "needs 3.11"),
            ("3 12\ntorch\n", "pip install 'torch>=2.11'"),
            ("3 12\nbaleen_worker torch\n", "make setup"),
            ("oops\n", "does not work"),
        ];
        for (output, expected) in cases {
            let sentence = judge("/usr/bin/python3", output, true).unwrap_err();
            assert!(sentence.contains(expected), "{sentence}");
            assert!(sentence.starts_with("/usr/bin/python3"), "{sentence}");
        }
        assert!(judge("py", "3 12\nzmq\n", false).unwrap_err().contains("py -m pip install baleen"));
    }
}
