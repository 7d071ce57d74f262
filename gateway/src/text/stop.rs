//! Stop strings over streamed text: finds the first one that is complete and holds back only what may become one.
//!
//! The match that ends first wins; of two that end at the same place, the longer. That rule depends on the text
//! alone, so the result is the same for every way of cutting the text into pushes. The text held back is exactly
//! the longest suffix that is a proper prefix of a stop string.

use std::sync::Arc;

/// One stop string with its Knuth–Morris–Pratt failure table.
#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `failure[i]`: length of the longest proper prefix of the pattern that ends at byte `i`.
    failure: Box<[usize]>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut failure = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = failure[matched - 1];
            }
            matched += usize::from(bytes[at] == bytes[matched]);
            failure[at] = matched;
        }
        Self { bytes, failure: failure.into() }
    }

    /// How much of the pattern the text matches after one more byte. `matched` is less than the pattern's length.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.failure[matched - 1];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

/// The stop strings of one request, shared by its choices.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
}

impl StopStrings {
    /// Empty strings are left out: they would stop before the first character.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Self {
        let strings = strings.iter().map(AsRef::as_ref).filter(|text| !text.is_empty());
        Self { patterns: strings.map(Pattern::new).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }
}

/// Watches one choice's text.
#[derive(Debug)]
pub struct StopMatcher {
    stop: StopStrings,
    /// Whether the matched stop string is part of the output.
    include_stop: bool,
    /// Matched length of each pattern.
    matched: Vec<usize>,
    /// Text seen and not yet released; everything before `released` is.
    held: String,
    released: usize,
    found: Option<usize>,
}

impl StopMatcher {
    pub fn new(stop: StopStrings, include_stop: bool) -> Self {
        Self {
            matched: vec![0; stop.patterns.len()],
            stop,
            include_stop,
            held: String::new(),
            released: 0,
            found: None,
        }
    }

    /// Appends to `out` the part of the text so far that can no longer belong to a stop string. Once one is found,
    /// text is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) {
        if self.found.is_some() {
            return;
        }
        if self.stop.is_empty() {
            out.push_str(text);
            return;
        }
        let seen = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            if let Some(index) = self.advance(byte) {
                let end = seen + offset + 1;
                let match_len = self.stop.patterns[index].bytes.len();
                let cut = if self.include_stop { end } else { end - match_len };
                out.push_str(&self.held[self.released..cut]);
                self.found = Some(index);
                self.held = String::new();
                return;
            }
        }
        let possible = self.matched.iter().copied().max().unwrap_or(0);
        self.release(self.held.len() - possible, out);
    }

    /// Ends the text: what was held back did not become a stop string and is released.
    pub fn finish(&mut self, out: &mut String) {
        if self.found.is_none() {
            self.release(self.held.len(), out);
            self.matched.fill(0);
        }
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        let pattern = &self.stop.patterns[self.found?];
        std::str::from_utf8(&pattern.bytes).ok()
    }

    /// Feeds one byte to every pattern; of those complete at this byte, the longest.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut complete: Option<usize> = None;
        for (index, (pattern, matched)) in self.stop.patterns.iter().zip(&mut self.matched).enumerate() {
            *matched = pattern.advance(*matched, byte);
            if *matched == pattern.bytes.len() {
                let longest = complete.map_or(0, |other| self.stop.patterns[other].bytes.len());
                if *matched > longest {
                    complete = Some(index);
                }
            }
        }
        complete
    }

    fn release(&mut self, until: usize, out: &mut String) {
        out.push_str(&self.held[self.released..until]);
        self.released = until;
        // Forgetting the released part only when it is the larger one keeps the copying linear in the text.
        if self.released * 2 >= self.held.len() {
            self.held.drain(..self.released);
            self.released = 0;
        }
    }
}

#[cfg(test)]
mod tests;
