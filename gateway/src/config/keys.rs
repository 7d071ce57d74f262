//! The file of API keys: who may come in, and how much each may ask for.
//!
//! It holds digests and never keys, so that whoever reads it cannot use them. No message of this module repeats a line
//! of the file: a key that was pasted there by mistake must not reach a log.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::ConfigError;

/// Every key is compared with at each request, so that the time it takes says nothing: this bounds that time.
const MAX_KEYS: usize = 1024;
const MAX_NAME_LEN: usize = 64;
/// The name of the key given by `--api-key`.
pub const SINGLE_KEY_NAME: &str = "default";

/// SHA-256 of a key: what is kept and compared. Keys are long random strings, which need no slow hash.
pub type KeyDigest = [u8; 32];

/// The digest of `key`.
#[must_use]
pub fn digest(key: &str) -> KeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

/// What one key may do.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySpec {
    /// Names its holder in metrics and logs.
    pub name: String,
    pub digest: KeyDigest,
    /// Whether it opens the operator's routes as well.
    pub operator: bool,
    /// A key that is not enabled is known and refused.
    pub enabled: bool,
    /// Requests in progress or waiting at one time; `None` is no limit of its own.
    pub max_concurrent_requests: Option<u32>,
    /// Prompt and generated tokens a minute; `None` is no limit.
    pub tokens_per_minute: Option<u32>,
}

impl KeySpec {
    /// The key of `--api-key`: an operator's, without limits.
    #[must_use]
    pub fn single(digest: KeyDigest) -> Self {
        Self {
            name: SINGLE_KEY_NAME.into(),
            digest,
            operator: true,
            enabled: true,
            max_concurrent_requests: None,
            tokens_per_minute: None,
        }
    }
}

impl fmt::Debug for KeySpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("KeySpec").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A file of keys as it was last read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    pub path: PathBuf,
    pub keys: Vec<KeySpec>,
}

impl KeyFile {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// One sentence that names the file, and the line or the key at fault.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let wrong = |reason: String| ConfigError(format!("--api-keys {}: {reason}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let keys = parse(&text).map_err(wrong)?;
        Ok(Self { path: path.to_owned(), keys })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    sha256: String,
    #[serde(default)]
    operator: bool,
    #[serde(default = "yes")]
    enabled: bool,
    max_concurrent_requests: Option<u32>,
    tokens_per_minute: Option<u32>,
}

fn yes() -> bool {
    true
}

fn parse(text: &str) -> Result<Vec<KeySpec>, String> {
    let document: Document = toml::from_str(text).map_err(|error| located(text, &error))?;
    if document.key.is_empty() {
        return Err("it lists no key; give one as a [[key]] table with `name` and `sha256`".into());
    }
    if document.key.len() > MAX_KEYS {
        return Err(format!("it lists {} keys, and at most {MAX_KEYS} are taken", document.key.len()));
    }
    let (mut names, mut digests) = (HashSet::new(), HashSet::new());
    let mut keys = Vec::with_capacity(document.key.len());
    for (index, entry) in document.key.into_iter().enumerate() {
        let key = checked(entry, index + 1)?;
        if !names.insert(key.name.clone()) {
            return Err(format!("two keys have the name {:?}", key.name));
        }
        if !digests.insert(key.digest) {
            return Err(format!("key {:?} has the digest of another", key.name));
        }
        keys.push(key);
    }
    Ok(keys)
}

/// The parser's message and its line; not the excerpt that it would print.
fn located(text: &str, error: &toml::de::Error) -> String {
    let line =
        error.span().map_or(1, |span| text.as_bytes()[..span.start.min(text.len())].split(|&b| b == b'\n').count());
    let message = error.message();
    // Messages about a value of the wrong type repeat the value.
    let message = message.split(['"', '`']).next().unwrap_or(message).trim_end_matches([' ', ',', ':']);
    format!("line {line}: {message}")
}

fn checked(entry: Entry, number: usize) -> Result<KeySpec, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
    let name = entry.name;
    if name.is_empty() || name.len() > MAX_NAME_LEN || !name.chars().all(is_plain) {
        return Err(format!(
            "key {number}: `name` should have 1 to {MAX_NAME_LEN} letters, digits, or characters of -_.@"
        ));
    }
    if name == SINGLE_KEY_NAME {
        return Err(format!("key {number}: the name {SINGLE_KEY_NAME:?} belongs to the key of --api-key"));
    }
    let digest = hex_digest(&entry.sha256).ok_or_else(|| {
        format!("key {name:?}: `sha256` is not 64 hexadecimal digits; `printf %s \"$KEY\" | sha256sum` prints them")
    })?;
    for (field, value) in
        [("max_concurrent_requests", entry.max_concurrent_requests), ("tokens_per_minute", entry.tokens_per_minute)]
    {
        if value == Some(0) {
            return Err(format!("key {name:?}: `{field}` is 0; leave it out for no limit, or set `enabled = false`"));
        }
    }
    let (operator, enabled) = (entry.operator, entry.enabled);
    let (max_concurrent_requests, tokens_per_minute) = (entry.max_concurrent_requests, entry.tokens_per_minute);
    Ok(KeySpec { name, digest, operator, enabled, max_concurrent_requests, tokens_per_minute })
}

fn hex_digest(text: &str) -> Option<KeyDigest> {
    let digits = text.as_bytes();
    let mut digest = KeyDigest::default();
    if digits.len() != 2 * digest.len() {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::fmt::Write as _;

    use super::*;

    fn hex(key: &str) -> String {
        digest(key).iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    }

    #[test]
    fn a_file_gives_each_key_its_limits() {
        let text = format!(
            "[[key]]\nname = 'alice'\nsha256 = '{}'\nmax_concurrent_requests = 4\ntokens_per_minute = 60_000\n\
             [[key]]\nname = 'ops@example.org'\nsha256 = '{}'\noperator = true\nenabled = false\n",
            hex("a"),
            hex("b").to_uppercase(),
        );
        let keys = parse(&text).unwrap();
        assert_eq!(keys[0].digest, digest("a"));
        assert_eq!((keys[0].max_concurrent_requests, keys[0].tokens_per_minute), (Some(4), Some(60_000)));
        assert!(keys[0].enabled && !keys[0].operator);
        assert_eq!((keys[1].digest, keys[1].operator, keys[1].enabled), (digest("b"), true, false));
        assert_eq!((keys[1].max_concurrent_requests, keys[1].tokens_per_minute), (None, None));
    }

    #[test]
    fn what_is_wrong_is_named_and_no_secret_repeated() {
        let (a, b) = (hex("a"), hex("b"));
        let entry = |more: &str| format!("[[key]]\nname = 'alice'\nsha256 = '{a}'\n{more}\n");
        for (text, expected) in [
            (String::new(), "no key"),
            ("[[key]]\nname = 'alice'\nsha256 = 'sk-secret'\n".into(), "64 hexadecimal digits"),
            (format!("[[key]]\nname = 'alice'\nsha256 = '{}'\n", "sk-secret".repeat(8)), "64 hexadecimal digits"),
            (format!("[[key]]\nname = 'a b'\nsha256 = '{a}'\n"), "`name`"),
            (format!("[[key]]\nname = 'default'\nsha256 = '{a}'\n"), "--api-key"),
            ("[[key]]\nname = 'alice'\n".into(), "line 1: missing field"),
            (entry("secret = 'sk-secret'"), "line 4: unknown field"),
            (entry("tokens_per_minute = 'sk-secret'"), "line 4: invalid type"),
            (entry("tokens_per_minute = -1"), "line 4: invalid value"),
            (entry("tokens_per_minute = 0"), "`tokens_per_minute` is 0"),
            (entry("sk-secret"), "line 4"),
            (entry(&entry("").replace(&a, &b)), "two keys have the name"),
            (entry(&entry("").replace("alice", "bob")), "the digest of another"),
        ] {
            let sentence = parse(&text).unwrap_err();
            assert!(sentence.contains(expected), "{sentence:?} should say {expected:?}");
            assert!(!sentence.contains("secret") && !sentence.contains(&a), "{sentence}");
        }
    }
}
