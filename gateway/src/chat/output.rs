//! Folds the token ids of one choice into reasoning and visible text.
//!
//! Order: reasoning is split off by token id, bytes become text, stop strings are searched in visible content only
//! (DeepSeek's rule: a stop string inside reasoning does not stop). The result depends on the ids alone, not on how
//! they are grouped into pushes.

mod tools;

use std::sync::Arc;

use self::tools::ToolFold;
pub use crate::chat::delta::{CallDelta, Delta};
use crate::chat::dialect::Dialect;
use crate::chat::reasoning::{ReasoningSplit, TokenPlace};
use crate::text::detokenizer::Detokenizer;
use crate::text::stop::{StopMatcher, StopStrings};
use crate::text::tokenizer::Tokenizer;

/// Opens and closes tool-call markup. It is marked special, yet without it the markup could not be told from text.
const DSML_MARKER: &str = "｜DSML｜";

#[derive(Debug, Clone, Default)]
pub struct OutputOptions {
    pub stop: StopStrings,
    /// Whether a matched stop string is part of the content.
    pub include_stop: bool,
    /// From the rendered prompt ([`crate::chat::encode::Encoded`]); false for completions.
    pub starts_in_reasoning: bool,
    /// Whether special tokens give no text. The tool-call marker always does.
    pub skip_special_tokens: bool,
    /// How many tool calls are read out of the output; with 0, markup is text like any other.
    pub max_tool_calls: u32,
    pub dialect: Dialect,
}

/// The text state of one choice.
#[derive(Debug)]
pub struct OutputFold {
    tokenizer: Arc<Tokenizer>,
    split: ReasoningSplit,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    /// Whether content goes through the matcher.
    watches_stop: bool,
    skip_special_tokens: bool,
    marker_id: Option<u32>,
    scratch: String,
    /// Present where calls are read; then it stands for `split` and `detokenizer`.
    tools: Option<ToolFold>,
}

impl OutputFold {
    pub fn new(tokenizer: Arc<Tokenizer>, options: OutputOptions) -> Self {
        Self {
            tools: (options.max_tool_calls > 0).then(|| ToolFold::new(&tokenizer, &options)),
            split: ReasoningSplit::new(&tokenizer, options.starts_in_reasoning),
            detokenizer: Detokenizer::new(),
            watches_stop: !options.stop.is_empty(),
            matcher: StopMatcher::new(options.stop, options.include_stop),
            skip_special_tokens: options.skip_special_tokens,
            marker_id: tokenizer.control(DSML_MARKER),
            scratch: String::new(),
            tokenizer,
        }
    }

    /// Appends to `delta` the text that this token makes certain. A stop token, which ends the output by its id,
    /// gives no text. After a stop string was found, tokens are dropped.
    pub fn push(&mut self, token_id: u32, is_stop_token: bool, delta: &mut Delta) {
        if is_stop_token || self.stopped().is_some() {
            return;
        }
        if let Some(tools) = &mut self.tools {
            let is_visible = !self.skip_special_tokens || !self.tokenizer.is_special(token_id);
            let bytes = if is_visible { self.tokenizer.token_bytes(token_id) } else { b"" };
            tools.push(token_id, bytes, &mut self.matcher, delta);
            return;
        }
        match self.split.place(token_id) {
            TokenPlace::RepeatedOpening => {}
            TokenPlace::EndOfReasoning => self.detokenizer.finish(&mut delta.reasoning),
            TokenPlace::Reasoning if self.is_visible(token_id) => {
                let bytes = self.tokenizer.token_bytes(token_id);
                self.detokenizer.push(bytes, &mut delta.reasoning);
            }
            TokenPlace::Content if self.is_visible(token_id) => {
                let bytes = self.tokenizer.token_bytes(token_id);
                if self.watches_stop {
                    self.scratch.clear();
                    self.detokenizer.push(bytes, &mut self.scratch);
                    self.matcher.push(&self.scratch, &mut delta.content);
                } else {
                    self.detokenizer.push(bytes, &mut delta.content);
                }
            }
            TokenPlace::Reasoning | TokenPlace::Content => {}
        }
    }

    /// The stop string that ended the content. The caller ends the request with `finish_reason: "stop"` and aborts
    /// it in the worker.
    pub fn stopped(&self) -> Option<&str> {
        self.matcher.found()
    }

    /// Ends the output and appends to `delta` what was held back. `is_cut` says that the model did not come to its
    /// end, so that an unfinished call stays unfinished.
    pub fn finish(&mut self, is_cut: bool, delta: &mut Delta) {
        if let Some(tools) = &mut self.tools {
            tools.finish(is_cut, &mut self.matcher, delta);
            return;
        }
        if self.split.in_reasoning() {
            self.detokenizer.finish(&mut delta.reasoning);
            return;
        }
        self.scratch.clear();
        self.detokenizer.finish(&mut self.scratch);
        self.matcher.push(&self.scratch, &mut delta.content);
        self.matcher.finish(&mut delta.content);
    }

    /// Tokens of the output that were reasoning, think tokens not counted.
    pub fn num_reasoning_tokens(&self) -> u32 {
        self.tools.as_ref().map_or_else(|| self.split.num_reasoning_tokens(), ToolFold::num_reasoning_tokens)
    }

    /// Tool calls whose arguments are whole.
    pub fn num_complete_calls(&self) -> u32 {
        self.tools.as_ref().map_or(0, ToolFold::num_complete_calls)
    }

    fn is_visible(&self, token_id: u32) -> bool {
        !self.skip_special_tokens || !self.tokenizer.is_special(token_id) || Some(token_id) == self.marker_id
    }
}

#[cfg(test)]
mod tests;
