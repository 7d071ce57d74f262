//! The fold of an output that may hold tool calls: markers by token id, text from bytes, and stop strings in content.

use super::OutputOptions;
use crate::chat::calls::CallParser;
use crate::chat::delta::Delta;
use crate::chat::markers::{Marker, Piece};
use crate::text::detokenizer::Detokenizer;
use crate::text::stop::StopMatcher;
use crate::text::tokenizer::Tokenizer;

#[derive(Debug)]
pub(super) struct ToolFold {
    parser: CallParser,
    /// Ids of the markers that the model has.
    markers: Vec<(u32, Marker)>,
    detokenizer: Detokenizer,
    text: String,
    parsed: Delta,
    num_reasoning_tokens: u32,
    /// Content is complete, so nothing waits in the matcher any more.
    is_past_content: bool,
}

impl ToolFold {
    pub(super) fn new(tokenizer: &Tokenizer, options: &OutputOptions) -> Self {
        let markers = options.dialect.markers().iter();
        Self {
            parser: CallParser::new(options.dialect, options.starts_in_reasoning, options.max_tool_calls),
            markers: markers.filter_map(|marker| Some((tokenizer.control(marker.text())?, *marker))).collect(),
            detokenizer: Detokenizer::new(),
            text: String::new(),
            parsed: Delta::default(),
            num_reasoning_tokens: 0,
            is_past_content: false,
        }
    }

    pub(super) fn push(&mut self, token_id: u32, bytes: &[u8], matcher: &mut StopMatcher, delta: &mut Delta) {
        let marker = self.markers.iter().find(|(id, _)| *id == token_id).map(|(_, marker)| *marker);
        self.text.clear();
        match marker {
            // Without its bytes it is not to be seen.
            Some(Marker::EndOfSentence) if bytes.is_empty() => return,
            Some(marker) => {
                self.detokenizer.finish(&mut self.text);
                self.parser.push(Piece::Text(&self.text), &mut self.parsed);
                self.parser.push(Piece::Marker(marker), &mut self.parsed);
            }
            None => {
                self.detokenizer.push(bytes, &mut self.text);
                self.parser.push(Piece::Text(&self.text), &mut self.parsed);
            }
        }
        if self.parser.in_reasoning() && marker != Some(Marker::ThinkOpen) {
            self.num_reasoning_tokens += 1;
        }
        self.hand_on(matcher, delta);
    }

    pub(super) fn finish(&mut self, is_cut: bool, matcher: &mut StopMatcher, delta: &mut Delta) {
        self.text.clear();
        self.detokenizer.finish(&mut self.text);
        self.parser.push(Piece::Text(&self.text), &mut self.parsed);
        self.parser.finish(is_cut, &mut self.parsed);
        self.hand_on(matcher, delta);
        if !self.is_past_content {
            matcher.finish(&mut delta.content);
        }
    }

    pub(super) fn num_reasoning_tokens(&self) -> u32 {
        self.num_reasoning_tokens
    }

    pub(super) fn num_complete_calls(&self) -> u32 {
        self.parser.num_complete_calls()
    }

    /// Content passes the matcher; what follows a stop string is dropped, calls included.
    fn hand_on(&mut self, matcher: &mut StopMatcher, delta: &mut Delta) {
        delta.reasoning.push_str(&self.parsed.reasoning);
        matcher.push(&self.parsed.content, &mut delta.content);
        if matcher.found().is_none() {
            if self.parser.has_calls() && !self.is_past_content {
                self.is_past_content = true;
                matcher.finish(&mut delta.content);
            }
            for call in self.parsed.calls.drain(..) {
                delta.append_call(call);
            }
        }
        self.parsed.clear();
    }
}
