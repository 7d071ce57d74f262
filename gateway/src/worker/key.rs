//! The key that a gateway shares with its workers, and how a call shows it.
//!
//! The key itself never travels: a digest of it does that serves this contract alone. The worker's side is `keys.py`.

use std::fmt;
use std::path::Path;

use sha2::{Digest, Sha256};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

const LEAST_KEY_BYTES: usize = 16;
const LABEL: &[u8] = b"baleen.worker.v1\0";
const METADATA: &str = "authorization";

/// What is shown to workers.
#[derive(Clone)]
pub struct WorkerKey(MetadataValue<Ascii>);

impl WorkerKey {
    /// The key in a file, without the white space around it.
    ///
    /// # Errors
    /// One sentence: the file cannot be read, or its key can be guessed.
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let key = bytes.trim_ascii();
        if key.len() < LEAST_KEY_BYTES {
            return Err(format!(
                "{} holds {} bytes, which can be guessed: put at least {LEAST_KEY_BYTES} random ones there",
                path.display(),
                key.len()
            ));
        }
        Self::new(key).ok_or_else(|| format!("{} holds no key", path.display()))
    }

    fn new(key: &[u8]) -> Option<Self> {
        let digest = Sha256::new().chain_update(LABEL).chain_update(key).finalize();
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut shown = MetadataValue::try_from(format!("Bearer {hex}")).ok()?;
        shown.set_sensitive(true);
        Some(Self(shown))
    }
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("WorkerKey")
    }
}

/// Shows the key, where there is one, with every call.
#[derive(Clone, Debug, Default)]
pub struct ShowKey(pub Option<WorkerKey>);

impl Interceptor for ShowKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(WorkerKey(shown)) = &self.0 {
            request.metadata_mut().insert(METADATA, shown.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::WorkerKey;

    /// The worker's tests hold the same value (`test_access.py`): either side that drifts turns red.
    #[test]
    fn the_digest_is_the_one_that_workers_expect() {
        let shown = WorkerKey::new(b"0123456789abcdef").unwrap().0;
        assert_eq!(shown.to_str().unwrap(), "Bearer 027d4abafe19615f57df2a3c883c14dbe16b40326026778ec99e97096c6e6ca1");
    }

    #[test]
    fn a_file_holds_a_key_or_is_refused_and_no_secret_is_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(WorkerKey::read(&path).unwrap_err().contains("cannot be read"));
        std::fs::write(&path, " guessed \n").unwrap();
        let refusal = WorkerKey::read(&path).unwrap_err();
        assert!(refusal.contains("7 bytes") && !refusal.contains("guessed "), "{refusal}");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let key = WorkerKey::read(&path).unwrap();
        assert_eq!(key.0, WorkerKey::new(b"0123456789abcdef").unwrap().0);
        assert_eq!(format!("{key:?}"), "WorkerKey");
    }
}
