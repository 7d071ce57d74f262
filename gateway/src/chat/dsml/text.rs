//! The character level of the parser: where tags begin and end, and what is held back until that is known.

use super::tag::{TagName, ends_tag};
use super::{DsmlParser, Mode, Stage};
use crate::chat::control::DSML;
use crate::chat::delta::Delta;

/// Blanks before a tag on its own line that are taken for indentation.
const MAX_INDENT: usize = 64;
/// Line ends before a block that belong to it.
const MAX_NEWLINES: usize = 2;

impl DsmlParser {
    pub(super) fn text(&mut self, text: &str, out: &mut Delta) {
        let mut rest = text;
        while !rest.is_empty() {
            rest = match self.stage {
                Stage::Text => {
                    self.plain(rest, out);
                    ""
                }
                Stage::Name | Stage::LookaheadName(_) => self.name(rest, out),
                Stage::Opener => self.opener(rest),
                Stage::Confirm => self.confirm(rest, out),
                Stage::Attributes(name) => self.attributes(name, rest, out),
                Stage::Gt => {
                    let trimmed = rest.trim_start_matches(' ');
                    if !trimmed.is_empty() {
                        self.stage = Stage::Text;
                    }
                    trimmed.strip_prefix('>').unwrap_or(trimmed)
                }
                Stage::Lookahead(_) => self.lookahead(rest, out),
            };
        }
    }

    /// The marker that makes a tag of the `<` or `</` before it.
    pub(super) fn marker(&mut self, out: &mut Delta) {
        match self.stage {
            Stage::Text => self.begin_tag(out),
            Stage::Name => {
                self.decide(out);
                self.marker(out);
            }
            Stage::LookaheadName(first) => {
                self.decide_lookahead(first, out);
                self.marker(out);
            }
            Stage::Gt => {
                self.stage = Stage::Text;
                self.begin_tag(out);
            }
            Stage::Opener | Stage::Confirm => self.marker_after_opener(out),
            Stage::Attributes(name) => {
                let opening = tag_suffix(&self.tag.rest);
                let opening = self.tag.rest.split_off(opening);
                self.open(name, false, out);
                self.held = opening;
                self.begin_tag(out);
            }
            Stage::Lookahead(first) => {
                let at = tag_suffix(&self.tag.rest);
                if at == self.tag.rest.len() {
                    self.give_up_tag(out);
                    self.begin_tag(out);
                } else {
                    self.tag.other_at = at;
                    self.tag.is_closing = self.tag.rest.ends_with('/');
                    self.tag.name.clear();
                    self.stage = Stage::LookaheadName(first);
                }
            }
        }
    }

    /// A marker in text: a tag begins if `<` or `</` stands before it.
    fn begin_tag(&mut self, out: &mut Delta) {
        let at = tag_suffix(&self.held);
        let is_closing = self.held.ends_with('/');
        if at == self.held.len() {
            // Alone it means nothing. Content never shows it.
            if self.mode == Mode::Content {
                self.content.leave_out();
            } else {
                let text = std::mem::take(&mut self.held) + DSML;
                self.release(&text, out);
            }
            return;
        }
        self.held.truncate(at);
        self.tag.is_closing = is_closing;
        self.tag.name.clear();
        self.tag.rest.clear();
        self.tag.has_quote = false;
        self.stage = Stage::Name;
        if matches!(self.mode, Mode::Value(_)) && !is_closing {
            self.give_up_tag(out);
        }
    }

    /// The tag at hand is text after all.
    pub(super) fn give_up_tag(&mut self, out: &mut Delta) {
        let mut text = std::mem::take(&mut self.held);
        match self.stage {
            Stage::Text => {
                self.held = text;
                return;
            }
            Stage::Opener | Stage::Confirm => {
                text += &self.literal();
                text += &self.tag.rest;
            }
            Stage::Lookahead(_) => text += &self.tag.rest,
            _ => text += &self.literal(),
        }
        self.tag.rest.clear();
        self.stage = Stage::Text;
        self.plain(&text, out);
    }

    /// The tag at hand as text, as far as its name.
    pub(super) fn literal(&self) -> String {
        let opening = if self.tag.is_closing { "</" } else { "<" };
        [opening, DSML, &self.tag.name].concat()
    }

    fn name<'a>(&mut self, text: &'a str, out: &mut Delta) -> &'a str {
        let end = text.bytes().position(|byte| !(byte.is_ascii_alphabetic() || byte == b'_'));
        let (name, rest) = text.split_at(end.unwrap_or(text.len()));
        self.tag.name.push_str(name);
        if !rest.is_empty() {
            match self.stage {
                Stage::LookaheadName(first) => self.decide_lookahead(first, out),
                _ => self.decide(out),
            }
        }
        rest
    }

    fn opener<'a>(&mut self, text: &'a str) -> &'a str {
        let mut rest = text.trim_start_matches(' ');
        if !rest.is_empty() {
            self.stage = Stage::Confirm;
            rest = rest.strip_prefix('>').unwrap_or(rest);
        }
        self.tag.rest.push_str(&text[..text.len() - rest.len()]);
        rest
    }

    /// Between a block's opening tag and the tag that proves it one. Prose there makes it text of reasoning; in
    /// content the tag alone is left out.
    fn confirm<'a>(&mut self, text: &'a str, out: &mut Delta) -> &'a str {
        let rest = self.take_gap(text);
        if !rest.is_empty() {
            self.give_up_opener(out);
        }
        rest
    }

    fn give_up_opener(&mut self, out: &mut Delta) {
        if self.mode == Mode::Content {
            let gap = self.tag.rest.trim_start_matches(' ');
            let text = std::mem::take(&mut self.held) + gap.strip_prefix('>').unwrap_or(gap);
            self.stage = Stage::Text;
            self.content.leave_out();
            self.plain(&text, out);
        } else {
            self.give_up_tag(out);
        }
    }

    fn marker_after_opener(&mut self, out: &mut Delta) {
        let at = tag_suffix(&self.tag.rest);
        let is_closing = self.tag.rest.ends_with("</");
        let is_tag = at < self.tag.rest.len();
        if is_tag && (self.mode == Mode::Content || !is_closing) {
            self.end_content(Mode::Block, out);
            self.held = self.tag.rest.split_off(at);
        } else {
            self.give_up_opener(out);
        }
        self.stage = Stage::Text;
        self.begin_tag(out);
    }

    /// Takes into `tag.rest` whitespace and then what opens a tag, as far as the text is that.
    fn take_gap<'a>(&mut self, text: &'a str) -> &'a str {
        let mut end = 0;
        for byte in text.bytes() {
            let last = text[..end].bytes().next_back().or_else(|| self.tag.rest.bytes().next_back());
            let fits = match (last, byte) {
                (Some(b'/'), _) => false,
                (Some(b'<'), byte) => byte == b'/',
                (_, byte) => byte == b'<' || byte.is_ascii_whitespace(),
            };
            if !fits {
                break;
            }
            end += 1;
        }
        self.tag.rest.push_str(&text[..end]);
        &text[end..]
    }

    fn attributes<'a>(&mut self, name: TagName, text: &'a str, out: &mut Delta) -> &'a str {
        let mut from = 0;
        while let Some(offset) = text[from..].find('>') {
            let before = &text[from..from + offset];
            self.tag.has_quote |= before.contains('"');
            self.tag.rest.push_str(before);
            from += offset + 1;
            if ends_tag(&self.tag.rest, self.tag.has_quote) {
                self.open(name, true, out);
                return &text[from..];
            }
            self.tag.rest.push('>');
        }
        self.tag.has_quote |= text[from..].contains('"');
        self.tag.rest.push_str(&text[from..]);
        ""
    }

    /// After `</…invoke` inside a value: blanks and `>`, then perhaps another tag.
    fn lookahead<'a>(&mut self, text: &'a str, out: &mut Delta) -> &'a str {
        let mut rest = text;
        if let Some(after) = text.trim_start_matches(' ').strip_prefix('>')
            && self.tag.rest[self.tag.other_at..].bytes().all(|byte| byte == b' ')
        {
            self.tag.rest.push_str(&text[..text.len() - after.len()]);
            rest = after;
        }
        let rest = self.take_gap(rest);
        if !rest.is_empty() {
            self.give_up_tag(out);
        }
        rest
    }

    /// Text outside tags: hands on all but the end that may belong to a tag.
    pub(super) fn plain(&mut self, text: &str, out: &mut Delta) {
        let suffix = match self.mode {
            Mode::Reasoning | Mode::Content => prose_suffix,
            Mode::Value(_) => value_suffix,
            Mode::Block | Mode::Invoke => tag_suffix,
        };
        if self.held.is_empty() {
            let cut = suffix(text);
            self.release(&text[..cut], out);
            self.held.push_str(&text[cut..]);
        } else {
            let mut joined = std::mem::take(&mut self.held);
            joined.push_str(text);
            let cut = suffix(&joined);
            self.release(&joined[..cut], out);
            joined.drain(..cut);
            self.held = joined;
        }
    }

    pub(super) fn release(&mut self, text: &str, out: &mut Delta) {
        match self.mode {
            Mode::Reasoning => {
                self.has_reasoned |= !text.is_empty();
                out.reasoning.push_str(text);
            }
            Mode::Content => self.content.push(text, &mut out.content),
            Mode::Value(kind) => self.call.value(kind, text, out),
            Mode::Invoke => self.call.body_text(text),
            Mode::Block => {}
        }
    }
}

/// Where at the end of `text` a tag may begin: `<` or `</`.
fn tag_suffix(text: &str) -> usize {
    let len = text.len();
    if text.ends_with('<') {
        len - 1
    } else if text.ends_with("</") {
        len - 2
    } else {
        len
    }
}

/// Of prose, the line ends and the indentation before a tag belong to the tag.
fn prose_suffix(text: &str) -> usize {
    let at = tag_suffix(text);
    let bytes = &text.as_bytes()[..at];
    let indent = bytes.iter().rev().take(MAX_INDENT).take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let bytes = &bytes[..at - indent];
    let newlines = bytes.iter().rev().take(MAX_NEWLINES).take_while(|byte| **byte == b'\n').count();
    if newlines == 0 { at } else { bytes.len() - newlines }
}

/// Of a value, one line end may belong to a tag that ends the value without being its own.
fn value_suffix(text: &str) -> usize {
    let at = tag_suffix(text);
    if text[..at].ends_with('\n') { at - 1 } else { at }
}
