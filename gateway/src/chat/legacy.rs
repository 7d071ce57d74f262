//! Reads the tool calls of the family's earlier models: V3.1 and V3.2-Exp, V3 and R1.
//!
//! Their structure is made of control tokens: calls begin, call begin, separator, call end, calls end. V3.1 puts the
//! function's name before the separator and its arguments behind it; V3 puts the word `function` before it, and
//! behind it the name, a line end and the arguments in a fenced block. A call is sent when it is whole, and only if
//! its arguments are one JSON object.

use serde::de::IgnoredAny;

use crate::chat::delta::Delta;
use crate::chat::markers::{Marker, Piece};
use crate::chat::seams::Seams;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegacyFormat {
    /// Also V3.2-Exp's.
    V31,
    /// Also R1's.
    V3,
}

/// The state of one answer.
#[derive(Debug)]
pub struct LegacyParser {
    format: LegacyFormat,
    mode: Mode,
    /// Line ends before the calls belong to them.
    held: String,
    content: Seams,
    has_reasoned: bool,
    /// Before the separator.
    header: String,
    /// Behind it.
    body: String,
    num_calls: u32,
    max_calls: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Reasoning,
    Content,
    /// Between calls and behind them: text is discarded.
    Between,
    Header,
    Body,
}

impl LegacyParser {
    /// `starts_in_reasoning` comes from the rendered prompt. Calls beyond `max_calls` are discarded.
    pub fn new(format: LegacyFormat, starts_in_reasoning: bool, max_calls: u32) -> Self {
        Self {
            format,
            mode: if starts_in_reasoning { Mode::Reasoning } else { Mode::Content },
            held: String::new(),
            content: Seams::new(Marker::TOOL_SET),
            has_reasoned: false,
            header: String::new(),
            body: String::new(),
            num_calls: 0,
            max_calls,
        }
    }

    /// Appends to `out` what this piece makes certain.
    pub fn push(&mut self, piece: Piece<'_>, out: &mut Delta) {
        let marker = match piece {
            Piece::Text(text) => return self.text(text, out),
            Piece::Marker(marker) => marker,
        };
        match marker {
            Marker::ThinkClose if self.mode == Mode::Reasoning => {
                self.flush(out);
                self.mode = Mode::Content;
            }
            Marker::ThinkOpen if self.mode == Mode::Reasoning && !self.has_reasoned && self.held.is_empty() => {}
            Marker::CallsBegin | Marker::CallBegin => {
                self.content.flush(&mut out.content);
                self.held.clear();
                self.header.clear();
                self.body.clear();
                self.mode = if marker == Marker::CallBegin { Mode::Header } else { Mode::Between };
            }
            Marker::Separator if self.mode == Mode::Header => self.mode = Mode::Body,
            Marker::CallEnd | Marker::CallsEnd => {
                self.end_call(out);
                self.content.leave_out();
                if !matches!(self.mode, Mode::Reasoning | Mode::Content) {
                    self.mode = Mode::Between;
                }
            }
            // Alone it means nothing, and content never shows it.
            Marker::Separator => self.content.leave_out(),
            Marker::ThinkOpen | Marker::ThinkClose | Marker::Dsml | Marker::EndOfSentence => {
                self.text(marker.text(), out);
            }
        }
    }

    /// Ends the answer. Unless it was cut, a last call that lacks only its end is complete.
    pub fn finish(&mut self, is_cut: bool, out: &mut Delta) {
        if !is_cut {
            self.end_call(out);
        }
        self.flush(out);
        self.content.flush(&mut out.content);
        self.mode = Mode::Between;
    }

    pub fn in_reasoning(&self) -> bool {
        self.mode == Mode::Reasoning
    }

    pub fn num_calls(&self) -> u32 {
        self.num_calls
    }

    fn text(&mut self, text: &str, out: &mut Delta) {
        match self.mode {
            Mode::Reasoning | Mode::Content => {
                let mut joined = std::mem::take(&mut self.held);
                joined.push_str(text);
                let newlines = joined.bytes().rev().take(2).take_while(|byte| *byte == b'\n').count();
                self.held = joined.split_off(joined.len() - newlines);
                self.release(&joined, out);
            }
            Mode::Header => self.header.push_str(text),
            Mode::Body => self.body.push_str(text),
            Mode::Between => {}
        }
    }

    fn flush(&mut self, out: &mut Delta) {
        let held = std::mem::take(&mut self.held);
        self.release(&held, out);
    }

    fn release(&mut self, text: &str, out: &mut Delta) {
        match self.mode {
            Mode::Reasoning => {
                self.has_reasoned |= !text.is_empty();
                out.reasoning.push_str(text);
            }
            Mode::Content => self.content.push(text, &mut out.content),
            Mode::Between | Mode::Header | Mode::Body => {}
        }
    }

    fn end_call(&mut self, out: &mut Delta) {
        if self.mode != Mode::Body || self.num_calls >= self.max_calls {
            return;
        }
        let (name, arguments) = match self.format {
            LegacyFormat::V31 => (self.header.trim(), self.body.trim()),
            LegacyFormat::V3 => {
                let (name, block) = self.body.trim_start().split_once('\n').unwrap_or((&self.body, ""));
                let block = block.trim();
                let block = block.strip_prefix("```json").or_else(|| block.strip_prefix("```")).unwrap_or(block);
                (name.trim(), block.strip_suffix("```").unwrap_or(block).trim())
            }
        };
        let is_object = arguments.starts_with('{') && serde_json::from_str::<IgnoredAny>(arguments).is_ok();
        if !name.is_empty() && is_object {
            out.begin_call(self.num_calls, name.to_owned());
            out.arguments(self.num_calls).push_str(arguments);
            self.num_calls += 1;
        }
    }
}
