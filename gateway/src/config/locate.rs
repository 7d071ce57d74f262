//! Finds what the gateway needs on this machine: the built-in model, the worker's package and its interpreter.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::ConfigError;

/// What `pip install` puts beside `bin`.
const INSTALLED_DATA: &str = "share/baleen";

/// Where the gateway stands: everything the search reads, so that a test can make it up.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The executable as it was called and as it really is. A checkout's command may be a link into a build folder.
    pub executables: Vec<PathBuf>,
    pub current_dir: PathBuf,
    pub virtual_env: Option<PathBuf>,
    pub search_path: Vec<PathBuf>,
    pub python_path: Option<OsString>,
}

impl Surroundings {
    /// This process's surroundings.
    #[must_use]
    pub fn of_this_process() -> Self {
        let search_path: Vec<PathBuf> =
            env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
        let current_dir = env::current_dir().unwrap_or_default();
        let called = env::args_os().next().map(PathBuf::from).and_then(|name| {
            if name.components().count() > 1 {
                return Some(current_dir.join(name));
            }
            search_path.iter().map(|folder| folder.join(&name)).find(|candidate| candidate.is_file())
        });
        Self {
            executables: called.into_iter().chain(env::current_exe().ok()).collect(),
            current_dir,
            virtual_env: env::var_os("VIRTUAL_ENV").map(PathBuf::from),
            search_path,
            python_path: env::var_os("PYTHONPATH"),
        }
    }

    /// The checkout this gateway belongs to: the nearest folder above it that holds the worker's source, or, for a
    /// gateway that was not installed with its data, the current folder.
    #[must_use]
    pub fn checkout(&self) -> Option<PathBuf> {
        let above = self.executables.iter().flat_map(|executable| executable.ancestors().skip(1));
        let own = above.into_iter().find(|folder| is_checkout(folder)).map(Path::to_owned);
        own.or_else(|| {
            let installed = self.prefixes().any(|prefix| prefix.join(INSTALLED_DATA).is_dir());
            (!installed && is_checkout(&self.current_dir)).then(|| self.current_dir.clone())
        })
    }

    /// The small model that comes with the gateway.
    ///
    /// # Errors
    /// It is in none of its places; the message lists them.
    pub fn default_model(&self) -> Result<PathBuf, ConfigError> {
        let in_checkout = self.checkout().map(|checkout| checkout.join("models/micro"));
        let installed = self.prefixes().map(|prefix| prefix.join(INSTALLED_DATA).join("models/micro"));
        let candidates: Vec<PathBuf> = in_checkout.into_iter().chain(installed).collect();
        if let Some(found) = candidates.iter().find(|folder| folder.join("config.json").is_file()) {
            return Ok(found.clone());
        }
        let mut tried: Vec<String> = candidates.iter().map(|folder| folder.display().to_string()).collect();
        tried.dedup();
        Err(ConfigError(format!(
            "no model was named and the built-in one was not found (tried {}): give MODEL_DIR",
            tried.join(", ")
        )))
    }

    /// The worker's interpreter: as asked for, else beside the gateway, in `$VIRTUAL_ENV`, in the checkout, on PATH.
    ///
    /// # Errors
    /// There is none.
    pub fn python(&self, asked: Option<&Path>) -> Result<PathBuf, ConfigError> {
        if let Some(asked) = asked {
            let on_path = || self.search_path.iter().map(|folder| folder.join(asked)).find(|path| path.is_file());
            let found = if asked.components().count() == 1 { on_path() } else { None };
            return found
                .or_else(|| asked.is_file().then(|| asked.to_owned()))
                .ok_or_else(|| ConfigError(format!("--python {}: there is no such program", asked.display())));
        }
        let beside = self.executables.iter().filter_map(|executable| executable.parent()).map(Path::to_owned);
        let environment = self.virtual_env.iter().map(|folder| folder.join("bin"));
        let own = self.checkout().map(|checkout| checkout.join(".venv/bin"));
        let folders = beside.chain(environment).chain(own).chain(self.search_path.iter().cloned());
        let found = folders.map(|folder| folder.join("python3")).find(|path| path.is_file());
        found.ok_or_else(|| {
            ConfigError("python3 was not found: install Python 3.11 or later, or name it with --python".into())
        })
    }

    /// Variables the worker needs beyond the gateway's own: a checkout's packages are used without being installed.
    #[must_use]
    pub fn worker_environment(&self) -> Vec<(OsString, OsString)> {
        let Some(checkout) = self.checkout() else { return Vec::new() };
        let mut folders = vec![checkout.join("worker"), checkout.join("kernels")];
        folders.extend(self.python_path.iter().flat_map(env::split_paths));
        match env::join_paths(folders) {
            Ok(joined) => vec![("PYTHONPATH".into(), joined)],
            Err(_) => Vec::new(),
        }
    }

    /// `<prefix>` of each `<prefix>/bin/gateway`.
    fn prefixes(&self) -> impl Iterator<Item = PathBuf> + '_ {
        self.executables.iter().filter_map(|executable| executable.parent()?.parent()).map(Path::to_owned)
    }
}

fn is_checkout(folder: &Path) -> bool {
    folder.join("worker/baleen_worker").is_dir()
}
