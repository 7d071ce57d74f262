//! The blocks that tell the model about tools and about the shape of its answer.
//!
//! The wording and every blank line are DeepSeek's, published with the V3.2 weights under the MIT licence. They may
//! not change: the model was trained on these bytes.

use serde_json::Value;

use super::Prompt;
use crate::chat::control::{DSML, THINK_CLOSE, THINK_OPEN};
use crate::chat::pyjson;
use crate::text::tokenizer::TokenizerError;

/// Up to the list of functions. The markers in it are control tokens, as they are in the model's own output.
const TOOLS: &str = include_str!("tools.txt");
const TOOLS_END: &str = "</functions>\n";
const RESPONSE_FORMAT: &str = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// Control tokens that occur in the blocks.
const MARKERS: [&str; 3] = [DSML, THINK_OPEN, THINK_CLOSE];

impl Prompt<'_> {
    /// The block that lists tools, one function object a line.
    pub(super) fn tools(&mut self, functions: &[Value]) -> Result<(), TokenizerError> {
        self.markup(TOOLS)?;
        let mut lines = String::new();
        for function in functions {
            pyjson::write(function, &mut lines);
            lines.push('\n');
        }
        lines.push_str(TOOLS_END);
        self.text(&lines);
        Ok(())
    }

    /// The block that shows the schema of the answer.
    pub(super) fn response_format(&mut self, schema: &Value) {
        let mut text = RESPONSE_FORMAT.to_owned();
        pyjson::write(schema, &mut text);
        self.text(&text);
    }

    /// Text of our own, in which markers are control tokens.
    pub(super) fn markup(&mut self, text: &str) -> Result<(), TokenizerError> {
        let mut rest = text;
        loop {
            let next = MARKERS.iter().filter_map(|marker| Some((rest.find(marker)?, *marker))).min();
            let Some((at, marker)) = next else {
                self.text(rest);
                return Ok(());
            };
            self.text(&rest[..at]);
            self.control(marker)?;
            rest = &rest[at + marker.len()..];
        }
    }
}
