//! Markers: the control tokens that give an output its structure, apart from its text.
//!
//! With token ids at hand a marker is known by its id, and text that merely spells one stays text. Recorded output
//! has no ids; there [`Lexer`] finds markers by their spelling.

use crate::chat::control::{DSML, END_OF_SENTENCE, THINK_CLOSE, THINK_OPEN};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Marker {
    /// In every tag of V3.2's tool-call markup.
    Dsml,
    ThinkOpen,
    ThinkClose,
    EndOfSentence,
    /// The tool tokens of V3, R1, V3.1 and V3.2-Exp.
    CallsBegin,
    CallsEnd,
    CallBegin,
    CallEnd,
    Separator,
}

impl Marker {
    /// What V3.2's output may hold.
    pub const DSML_SET: &[Self] = &[Self::Dsml, Self::ThinkOpen, Self::ThinkClose, Self::EndOfSentence];
    /// What an output without calls may hold.
    pub const THINK_SET: &[Self] = &[Self::ThinkOpen, Self::ThinkClose, Self::EndOfSentence];
    /// What the calls of the family's earlier models are made of.
    pub const TOOL_SET: &[Self] = &[Self::CallsBegin, Self::CallsEnd, Self::CallBegin, Self::CallEnd, Self::Separator];
    /// What the output of the family's earlier models may hold.
    pub const LEGACY_SET: &[Self] = &[
        Self::CallsBegin,
        Self::CallsEnd,
        Self::CallBegin,
        Self::CallEnd,
        Self::Separator,
        Self::ThinkOpen,
        Self::ThinkClose,
        Self::EndOfSentence,
    ];

    /// The token's text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Dsml => DSML,
            Self::ThinkOpen => THINK_OPEN,
            Self::ThinkClose => THINK_CLOSE,
            Self::EndOfSentence => END_OF_SENTENCE,
            Self::CallsBegin => "<｜tool▁calls▁begin｜>",
            Self::CallsEnd => "<｜tool▁calls▁end｜>",
            Self::CallBegin => "<｜tool▁call▁begin｜>",
            Self::CallEnd => "<｜tool▁call▁end｜>",
            Self::Separator => "<｜tool▁sep｜>",
        }
    }
}

/// A stretch of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a str),
    Marker(Marker),
}

/// Finds markers by their spelling in text that comes in chunks of any size. Holds back at most an unfinished marker.
#[derive(Debug)]
pub struct Lexer {
    markers: &'static [Marker],
    held: String,
}

/// What may begin at a place of the text.
enum Begins {
    Marker(Marker),
    /// A marker, if the text goes on so.
    Perhaps,
    Nothing,
}

impl Lexer {
    pub fn new(markers: &'static [Marker]) -> Self {
        Self { markers, held: String::new() }
    }

    /// Hands on the pieces that `text` makes certain. Time is linear in the text.
    pub fn push(&mut self, text: &str, mut take: impl FnMut(Piece<'_>)) {
        if self.held.is_empty() {
            let held = self.scan(text, &mut take);
            self.held.push_str(&text[held..]);
        } else {
            let mut joined = std::mem::take(&mut self.held);
            joined.push_str(text);
            let held = self.scan(&joined, &mut take);
            joined.drain(..held);
            self.held = joined;
        }
    }

    /// Ends the text: what was held back is no marker.
    pub fn finish(&mut self, mut take: impl FnMut(Piece<'_>)) {
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            take(Piece::Text(&held));
        }
    }

    /// Hands on `text` up to the place, which is returned, where an unfinished marker begins.
    fn scan(&self, text: &str, take: &mut impl FnMut(Piece<'_>)) -> usize {
        let mut done = 0;
        let mut at = 0;
        let until = |take: &mut dyn FnMut(Piece<'_>), from: usize, to: usize| {
            if from < to {
                take(Piece::Text(&text[from..to]));
            }
        };
        // Every marker begins with `<` or with the first byte of `｜`.
        while let Some(offset) = memchr::memchr2(b'<', 0xEF, &text.as_bytes()[at..]) {
            at += offset;
            match self.begins(&text[at..]) {
                Begins::Marker(marker) => {
                    until(take, done, at);
                    take(Piece::Marker(marker));
                    at += marker.text().len();
                    done = at;
                }
                Begins::Perhaps => {
                    until(take, done, at);
                    return at;
                }
                // Perhaps inside a character, where neither byte can be.
                Begins::Nothing => at += 1,
            }
        }
        until(take, done, text.len());
        text.len()
    }

    fn begins(&self, text: &str) -> Begins {
        for marker in self.markers {
            if text.starts_with(marker.text()) {
                return Begins::Marker(*marker);
            }
            if marker.text().starts_with(text) {
                return Begins::Perhaps;
            }
        }
        Begins::Nothing
    }
}
