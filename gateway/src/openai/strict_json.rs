//! Rules on a JSON text that its grammar does not have: no object repeats a key, nothing is nested too deep, and there
//! are not too many things in it. One pass over the bytes, without a tree and, in the common case, without allocating.
//!
//! A text that is no JSON passes or fails here by chance; the parser that reads it afterwards says what is wrong.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;

use memchr::memchr2;

/// Containers within containers.
pub const MAX_DEPTH: usize = 64;
/// Containers and members of objects in total. Strings and numbers in lists cost little and are not counted.
pub const MAX_NODES: usize = 100_000;
/// Keys of an object that are compared one by one; more go into a set.
const FEW_KEYS: usize = 16;

/// Which rule is broken, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("stands twice in one object")]
    RepeatedKey { path: String },
    #[error("is nested more than {MAX_DEPTH} levels deep")]
    TooDeep { path: String },
    #[error("holds more than {MAX_NODES} objects, lists and members")]
    TooMany { path: String },
}

impl Fault {
    /// Where it is, as in `messages[0].content`; empty for the text as a whole.
    pub fn path(&self) -> &str {
        match self {
            Self::RepeatedKey { path } | Self::TooDeep { path } | Self::TooMany { path } => path,
        }
    }
}

/// Checks a text. Time is linear in it.
///
/// # Errors
/// The first rule that is broken.
pub fn check(text: &[u8]) -> Result<(), Fault> {
    Scan { text, at: 0, levels: Vec::with_capacity(8), keys: Vec::with_capacity(32), num_nodes: 0 }.run()
}

/// An object or list that is open.
struct Level {
    is_object: bool,
    /// Where the keys of this object begin among all that are kept.
    keys_from: usize,
    /// Keys of an object that has many.
    many: Option<HashSet<Box<[u8]>>>,
    /// Elements of a list that are complete.
    index: usize,
    expects_key: bool,
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    levels: Vec<Level>,
    /// Keys of all open objects, the innermost object's last.
    keys: Vec<Cow<'a, [u8]>>,
    num_nodes: usize,
}

impl<'a> Scan<'a> {
    fn run(mut self) -> Result<(), Fault> {
        while let Some(&byte) = self.text.get(self.at) {
            self.at += 1;
            match byte {
                b'"' => {
                    let Some(string) = self.string() else { return Ok(()) };
                    if self.levels.last().is_some_and(|level| level.is_object && level.expects_key) {
                        self.key(string)?;
                    }
                }
                b'{' | b'[' => self.open(byte == b'{')?,
                b'}' | b']' => {
                    let Some(closed) = self.levels.pop() else { return Ok(()) };
                    self.keys.truncate(closed.keys_from);
                }
                b',' => {
                    if let Some(level) = self.levels.last_mut() {
                        level.index += 1;
                        level.expects_key = true;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What stands between the quotes; `None` where the text ends before.
    fn string(&mut self) -> Option<&'a [u8]> {
        let start = self.at;
        loop {
            self.at += memchr2(b'"', b'\\', self.text.get(self.at..)?)?;
            if self.text[self.at] == b'"' {
                self.at += 1;
                return Some(&self.text[start..self.at - 1]);
            }
            self.at += 2;
        }
    }

    fn open(&mut self, is_object: bool) -> Result<(), Fault> {
        if self.levels.len() == MAX_DEPTH {
            return Err(Fault::TooDeep { path: self.path() });
        }
        self.count()?;
        let keys_from = self.keys.len();
        self.levels.push(Level { is_object, keys_from, many: None, index: 0, expects_key: true });
        Ok(())
    }

    fn count(&mut self) -> Result<(), Fault> {
        self.num_nodes += 1;
        if self.num_nodes > MAX_NODES {
            // What is too much is the whole.
            return Err(Fault::TooMany { path: String::new() });
        }
        Ok(())
    }

    fn key(&mut self, raw: &'a [u8]) -> Result<(), Fault> {
        self.count()?;
        let key = unescaped(raw);
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        level.expects_key = false;
        let own = &self.keys[level.keys_from..];
        let is_repeated = if let Some(many) = &mut level.many {
            !many.insert((*key).into())
        } else {
            if own.len() == FEW_KEYS {
                level.many = Some(own.iter().chain([&key]).map(|key| (**key).into()).collect());
            }
            own.contains(&key)
        };
        if is_repeated {
            let key = String::from_utf8_lossy(&key);
            return Err(Fault::RepeatedKey { path: self.path_to(self.levels.len() - 1, &key) });
        }
        if level.many.is_some() && self.keys.len() > level.keys_from {
            // Only the last one is needed, for paths.
            self.keys.truncate(level.keys_from);
        }
        self.keys.push(key);
        Ok(())
    }

    fn path(&self) -> String {
        self.path_to(self.levels.len(), "")
    }

    /// The path of the place in level `depth`, or of its member `key`.
    fn path_to(&self, depth: usize, key: &str) -> String {
        let mut path = String::new();
        let member = |path: &mut String, key: &str| {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(key);
        };
        for (place, level) in self.levels[..depth].iter().enumerate() {
            if level.is_object {
                let end = self.levels.get(place + 1).map_or(self.keys.len(), |next| next.keys_from);
                if let Some(key) = self.keys[level.keys_from..end].last() {
                    member(&mut path, &String::from_utf8_lossy(key));
                }
            } else {
                let _ = write!(path, "[{}]", level.index);
            }
        }
        if !key.is_empty() {
            member(&mut path, key);
        }
        path
    }
}

/// A key with its escapes resolved, so that two spellings of one key are one key.
fn unescaped(raw: &[u8]) -> Cow<'_, [u8]> {
    if !raw.contains(&b'\\') {
        return Cow::Borrowed(raw);
    }
    let quoted = [b"\"", raw, b"\""].concat();
    match serde_json::from_slice::<String>(&quoted) {
        Ok(key) => Cow::Owned(key.into_bytes()),
        Err(_) => Cow::Borrowed(raw),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::{Fault, MAX_DEPTH, MAX_NODES, check};

    fn repeated(text: &str) -> Option<String> {
        let fault = check(text.as_bytes()).err()?;
        assert!(matches!(fault, Fault::RepeatedKey { .. }), "{fault:?}");
        Some(fault.path().to_owned())
    }

    #[test]
    fn a_repeated_key_is_named_with_its_path() {
        let cases = [
            (r#"{"a": 1, "a": 2}"#, "a"),
            (r#"{"a": {"b": 1, "c": [{}, {"d": 1, "d": 2}]}}"#, "a.c[1].d"),
            (r#"{"a": 1, "\u0061": 2}"#, "a"),
            (r#"[{"x": {}}, {"x": {"y": [], "y": 0}}]"#, "[1].x.y"),
            (r#"{"q\"": 1, "q\"": 2}"#, "q\""),
        ];
        for (text, path) in cases {
            assert_eq!(repeated(text).as_deref(), Some(path), "{text}");
        }
        let many: Vec<String> = (0..400).map(|key| format!("\"k{key}\": [{{\"z\": 0}}]")).collect();
        assert_eq!(repeated(&format!("{{\"o\": {{{}}}}}", many.join(","))), None);
        for again in [0, 15, 16, 17, 399] {
            let text = format!("{{\"o\": {{{}, \"k{again}\": 0}}}}", many.join(","));
            assert_eq!(repeated(&text), Some(format!("o.k{again}")));
        }
    }

    #[test]
    fn one_key_in_several_objects_and_in_strings_is_not_repeated() {
        let texts = [
            r#"{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]}"#,
            r#"{"a": {"b": 1}, "b": 2}"#,
            r#"{"a": "\"a\": 1, \"a\": 2", "b": "a"}"#,
            r#"{"a": ["a", "a", "a"], "b": "{\"a\"", "c": "\\"}"#,
            "",
            "{",
            r#"{"a"#,
            r#"{"a\"#,
            "]]]]",
            "}{",
            "[,,,]",
        ];
        for text in texts {
            assert_eq!(repeated(text), None, "{text}");
        }
    }

    #[test]
    fn depth_and_number_are_bounded() {
        let nested = |depth: usize| format!("{{\"a\": {}1{}}}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(check(nested(MAX_DEPTH - 1).as_bytes()), Ok(()));
        let fault = check(nested(MAX_DEPTH).as_bytes()).unwrap_err();
        assert!(fault.path().starts_with("a[0][0]"), "{}", fault.path());
        let lists = |number: usize| format!("[{}]", vec!["[]"; number].join(","));
        assert_eq!(check(lists(MAX_NODES - 1).as_bytes()), Ok(()));
        assert!(matches!(check(lists(MAX_NODES).as_bytes()), Err(Fault::TooMany { .. })));
        let members = |number: usize| {
            let members: Vec<String> = (0..number).map(|key| format!("\"{key}\":0")).collect();
            format!("{{{}}}", members.join(","))
        };
        assert_eq!(check(members(MAX_NODES - 1).as_bytes()), Ok(()));
        assert!(matches!(check(members(MAX_NODES).as_bytes()), Err(Fault::TooMany { .. })));
        let ids = format!("[{}]", vec!["1"; 2 * MAX_NODES].join(","));
        assert_eq!(check(ids.as_bytes()), Ok(()));
    }

    proptest::proptest! {
        /// Against a parser that keeps every key.
        #[test]
        fn it_finds_what_a_tree_of_all_keys_shows(text in r#"(\{("[ab]": ?(1|"x"|\[\]|\{("[ab]":1,?){0,2}\}),?){0,3}\})"#) {
            let well_formed = serde_json::from_str::<serde_json::Value>(&text).is_ok();
            if well_formed {
                let compact = text.replace(' ', "");
                let num_keys = compact.matches("\":").count();
                let kept = serde_json::from_str::<serde_json::Value>(&text).unwrap().to_string().matches("\":").count();
                proptest::prop_assert_eq!(check(text.as_bytes()).is_err(), kept != num_keys, "{}", text);
            }
        }
    }
}
