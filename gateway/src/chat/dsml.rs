//! Reads V3.2's tool-call markup out of a model's output, as it comes.
//!
//! A total state machine over text and markers: every output has a defined reading, any division into chunks gives
//! the same one, and time is linear. Held back is only what may still turn out to be markup. What becomes of output
//! that breaks the format is decided in `docs/adr/0009-malformed-dsml.md`.
//!
//! [`DsmlParser`] follows the structure: which tag stands where. `tag` reads one tag, `call` builds the arguments.

mod call;
mod tag;
mod text;

use self::call::{Call, ValueKind};
use self::tag::{Attributes, TagName};
use crate::chat::delta::Delta;
use crate::chat::markers::{Marker, Piece};
use crate::chat::seams::Seams;

/// The state of one answer.
#[derive(Debug)]
pub struct DsmlParser {
    mode: Mode,
    stage: Stage,
    tag: Tag,
    /// Text that may belong to markup.
    held: String,
    content: Seams,
    /// Whether reasoning has any text.
    has_reasoned: bool,
    call: Call,
    num_calls: u32,
    num_complete: u32,
    max_calls: u32,
}

/// What the text around the next tag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Reasoning,
    Content,
    /// Between invokes, in one that is not a call, or behind the block: text is discarded.
    Block,
    /// In the body of `call`.
    Invoke,
    /// In a parameter of `call`.
    Value(ValueKind),
}

/// How far the tag at hand has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No tag is begun.
    Text,
    /// In the tag's name.
    Name,
    /// After the name of a block's opening tag, before its `>`.
    Opener,
    /// After that tag: only another tag makes it one.
    Confirm,
    Attributes(TagName),
    /// After the name of a tag of which nothing but `>` is left.
    Gt,
    /// After a closing tag inside a value that would end more than the value: only another tag makes it one.
    Lookahead(TagName),
    /// In the name of that other tag.
    LookaheadName(TagName),
}

/// The tag at hand.
#[derive(Debug, Default)]
struct Tag {
    is_closing: bool,
    name: String,
    /// Text after the name; for the stages that may turn out to be text, everything from `held` on.
    rest: String,
    has_quote: bool,
    /// In a lookahead, where in `rest` the name of the first tag ends, and later where the other tag begins.
    other_at: usize,
}

impl DsmlParser {
    /// `starts_in_reasoning` comes from the rendered prompt. Calls beyond `max_calls` are discarded.
    pub fn new(starts_in_reasoning: bool, max_calls: u32) -> Self {
        Self {
            mode: if starts_in_reasoning { Mode::Reasoning } else { Mode::Content },
            stage: Stage::Text,
            tag: Tag::default(),
            held: String::new(),
            content: Seams::new(&[Marker::Dsml]),
            has_reasoned: false,
            call: Call::default(),
            num_calls: 0,
            num_complete: 0,
            max_calls,
        }
    }

    /// Appends to `out` what this piece makes certain.
    pub fn push(&mut self, piece: Piece<'_>, out: &mut Delta) {
        match piece {
            Piece::Text(text) => self.text(text, out),
            Piece::Marker(Marker::Dsml) => self.marker(out),
            Piece::Marker(Marker::ThinkClose) if self.mode == Mode::Reasoning => {
                self.give_up_tag(out);
                let held = std::mem::take(&mut self.held);
                self.release(&held, out);
                self.mode = Mode::Content;
            }
            Piece::Marker(Marker::ThinkOpen) if self.is_at_start_of_reasoning() => {}
            Piece::Marker(marker) => self.text(marker.text(), out),
        }
    }

    /// Ends the answer. `is_cut` says that the model did not come to its end: then a call stays as unfinished as it
    /// is, and otherwise an invoke whose parameters are all closed is complete.
    pub fn finish(&mut self, is_cut: bool, out: &mut Delta) {
        if self.stage == Stage::Name && !matches!(self.mode, Mode::Reasoning | Mode::Content) {
            let is_text = matches!(self.mode, Mode::Value(_)) && TagName::of(&self.tag.name) == TagName::Other;
            if !is_text {
                self.decide(out);
            }
        }
        match self.stage {
            Stage::Text => match self.mode {
                Mode::Reasoning | Mode::Content => {
                    let held = std::mem::take(&mut self.held);
                    self.release(&held, out);
                }
                Mode::Invoke if !is_cut => self.finish_call(false, out),
                _ => {}
            },
            Stage::Lookahead(_) | Stage::LookaheadName(_) => self.end_value_and_call(out),
            Stage::Gt if self.mode == Mode::Invoke && !is_cut => self.finish_call(false, out),
            // A piece of markup at the end is not shown.
            _ => {}
        }
        self.content.flush(&mut out.content);
        self.stage = Stage::Text;
        self.mode = Mode::Block;
        self.held.clear();
    }

    pub fn in_reasoning(&self) -> bool {
        self.mode == Mode::Reasoning
    }

    /// Whether a call has begun; content is complete then.
    pub fn has_calls(&self) -> bool {
        self.num_calls > 0 || self.call.is_sent
    }

    /// Calls whose arguments are whole.
    pub fn num_complete_calls(&self) -> u32 {
        self.num_complete
    }

    fn is_at_start_of_reasoning(&self) -> bool {
        self.mode == Mode::Reasoning && self.stage == Stage::Text && !self.has_reasoned && self.held.is_empty()
    }

    /// Acts on the name of a tag, now that it is complete.
    fn decide(&mut self, out: &mut Delta) {
        let name = TagName::of(&self.tag.name);
        match self.mode {
            Mode::Reasoning => self.decide_in_reasoning(name, out),
            Mode::Content => self.decide_in_content(name, out),
            Mode::Block => self.decide_in_block(name),
            Mode::Invoke => self.decide_in_invoke(name, out),
            Mode::Value(kind) => self.decide_in_value(kind, name, out),
        }
    }

    /// Reasoning may talk about markup; it ends only where a call begins.
    fn decide_in_reasoning(&mut self, name: TagName, out: &mut Delta) {
        let at_line_start = !self.has_reasoned || self.held.contains('\n');
        match name {
            TagName::Calls if !self.tag.is_closing => self.stage = Stage::Opener,
            TagName::Invoke if !self.tag.is_closing && at_line_start => {
                self.held.clear();
                self.mode = Mode::Block;
                self.stage = Stage::Attributes(name);
            }
            _ => self.give_up_tag(out),
        }
    }

    fn decide_in_content(&mut self, name: TagName, out: &mut Delta) {
        self.stage = match (self.tag.is_closing, name) {
            (false, TagName::Calls) => Stage::Opener,
            (false, TagName::Invoke) => {
                self.end_content(Mode::Block, out);
                Stage::Attributes(name)
            }
            (false, TagName::Parameter) => {
                self.end_content(Mode::Block, out);
                Stage::Text
            }
            (true, TagName::Calls | TagName::Invoke | TagName::Parameter) => {
                self.content.leave_out();
                Stage::Gt
            }
            (_, TagName::Other) => {
                self.content.leave_out();
                Stage::Text
            }
        };
    }

    /// Markup begins. What is held before it belongs to it.
    fn end_content(&mut self, mode: Mode, out: &mut Delta) {
        self.content.flush(&mut out.content);
        self.held.clear();
        self.mode = mode;
    }

    fn decide_in_block(&mut self, name: TagName) {
        self.stage = match (self.tag.is_closing, name) {
            (false, TagName::Invoke) => Stage::Attributes(name),
            (_, TagName::Calls) | (true, TagName::Invoke) => {
                self.mode = Mode::Block;
                Stage::Gt
            }
            (_, TagName::Parameter | TagName::Other) => Stage::Text,
        };
    }

    fn decide_in_invoke(&mut self, name: TagName, out: &mut Delta) {
        match (self.tag.is_closing, name) {
            (false, TagName::Parameter) => self.stage = Stage::Attributes(name),
            (true, TagName::Invoke) => {
                self.finish_call(true, out);
                self.stage = Stage::Gt;
            }
            (_, TagName::Calls) | (false, TagName::Invoke) => {
                self.finish_call(false, out);
                self.decide_in_block(name);
            }
            (true, TagName::Parameter) => self.stage = Stage::Gt,
            (_, TagName::Other) => {
                self.stage = Stage::Text;
                let literal = self.literal();
                self.call.body_text(&literal);
            }
        }
    }

    /// Only closing tags come here. A value may hold the text of any but its own.
    fn decide_in_value(&mut self, kind: ValueKind, name: TagName, out: &mut Delta) {
        match name {
            TagName::Parameter => {
                let held = std::mem::take(&mut self.held);
                self.release(&held, out);
                self.call.close(kind, out);
                self.mode = Mode::Invoke;
                self.stage = Stage::Gt;
            }
            TagName::Calls | TagName::Invoke => {
                self.tag.rest = std::mem::take(&mut self.held) + &self.literal();
                self.tag.other_at = self.tag.rest.len();
                self.stage = Stage::Lookahead(name);
            }
            TagName::Other => self.give_up_tag(out),
        }
    }

    /// Acts on the tag after a closing tag inside a value, as far as its name goes.
    fn decide_lookahead(&mut self, first: TagName, out: &mut Delta) {
        let second = TagName::of(&self.tag.name);
        let ends_call = matches!(
            (first, self.tag.is_closing, second),
            (TagName::Invoke, false, TagName::Invoke)
                | (_, false, TagName::Calls)
                | (TagName::Invoke, true, TagName::Calls)
        );
        if ends_call {
            self.end_value_and_call(out);
            self.tag.rest.clear();
            self.tag.has_quote = false;
            self.decide(out);
            return;
        }
        let mut text = std::mem::take(&mut self.tag.rest);
        text.truncate(self.tag.other_at);
        self.release(&text, out);
        if self.tag.is_closing {
            self.decide(out);
        } else {
            self.give_up_tag(out);
        }
    }

    /// The parameter and its invoke end without the parameter's own tag. The line end before does not belong to it.
    fn end_value_and_call(&mut self, out: &mut Delta) {
        if let Mode::Value(kind) = self.mode {
            self.call.close(kind, out);
        }
        self.finish_call(true, out);
    }

    fn finish_call(&mut self, is_closed: bool, out: &mut Delta) {
        if self.call.finish(is_closed, out) {
            self.num_complete += 1;
        }
        self.num_calls += u32::from(self.call.is_sent);
        self.call = Call::default();
        self.mode = Mode::Block;
    }

    /// Acts on an opening tag that has ended; `is_whole` says that it ended with its `>`.
    fn open(&mut self, name: TagName, is_whole: bool, out: &mut Delta) {
        self.stage = Stage::Text;
        let rest = std::mem::take(&mut self.tag.rest);
        let attributes = if is_whole { Attributes::parse(&rest) } else { Attributes::default() };
        if name == TagName::Invoke {
            self.open_invoke(&attributes, out);
        } else {
            self.open_parameter(&attributes, out);
        }
    }

    fn open_invoke(&mut self, attributes: &Attributes<'_>, out: &mut Delta) {
        match attributes.name {
            Some(name) if !name.is_empty() && self.num_calls < self.max_calls => {
                self.call = Call::new(name, self.num_calls);
                self.mode = Mode::Invoke;
                if attributes.is_closed {
                    self.finish_call(true, out);
                }
            }
            _ => self.mode = Mode::Block,
        }
    }

    /// A parameter without a sound tag makes its invoke no call, as long as nothing of it has been sent. Later it
    /// is read as JSON or text, whichever it is, or left out if it has no name.
    fn open_parameter(&mut self, attributes: &Attributes<'_>, out: &mut Delta) {
        let kind = match (attributes.name, attributes.is_string) {
            (Some(_), Some(true)) => Some(ValueKind::Text),
            (Some(_), Some(false)) => Some(ValueKind::Json),
            _ => None,
        };
        if !self.call.is_sent && (kind.is_none() || self.call.has_stray_text()) {
            self.mode = Mode::Block;
            return;
        }
        let kind = match (attributes.name, kind) {
            (Some(name), kind) => self.call.open(name, kind.unwrap_or(ValueKind::Json), out),
            (None, _) => ValueKind::Ignored,
        };
        self.mode = Mode::Value(kind);
        if attributes.is_closed {
            self.call.close(kind, out);
            self.mode = Mode::Invoke;
        }
    }
}

#[cfg(test)]
mod tests;
