//! The parsers of tool calls behind one face, one for each generation of the model family.

use crate::chat::delta::Delta;
use crate::chat::dialect::Dialect;
use crate::chat::dsml::DsmlParser;
use crate::chat::legacy::{LegacyFormat, LegacyParser};
use crate::chat::markers::Piece;

/// The state of one answer.
#[derive(Debug)]
pub enum CallParser {
    Dsml(Box<DsmlParser>),
    Legacy(Box<LegacyParser>),
}

impl CallParser {
    /// `starts_in_reasoning` comes from the rendered prompt. Calls beyond `max_calls` are discarded.
    pub fn new(dialect: Dialect, starts_in_reasoning: bool, max_calls: u32) -> Self {
        let legacy = |format| Self::Legacy(Box::new(LegacyParser::new(format, starts_in_reasoning, max_calls)));
        match dialect {
            Dialect::V32 => Self::Dsml(Box::new(DsmlParser::new(starts_in_reasoning, max_calls))),
            Dialect::V31 => legacy(LegacyFormat::V31),
            Dialect::V3 => legacy(LegacyFormat::V3),
        }
    }

    /// Appends to `out` what this piece makes certain.
    pub fn push(&mut self, piece: Piece<'_>, out: &mut Delta) {
        match self {
            Self::Dsml(parser) => parser.push(piece, out),
            Self::Legacy(parser) => parser.push(piece, out),
        }
    }

    /// Ends the answer; `is_cut` says that the model did not come to its end.
    pub fn finish(&mut self, is_cut: bool, out: &mut Delta) {
        match self {
            Self::Dsml(parser) => parser.finish(is_cut, out),
            Self::Legacy(parser) => parser.finish(is_cut, out),
        }
    }

    pub fn in_reasoning(&self) -> bool {
        match self {
            Self::Dsml(parser) => parser.in_reasoning(),
            Self::Legacy(parser) => parser.in_reasoning(),
        }
    }

    /// Whether a call has begun; content is complete then.
    pub fn has_calls(&self) -> bool {
        match self {
            Self::Dsml(parser) => parser.has_calls(),
            Self::Legacy(parser) => parser.num_calls() > 0,
        }
    }

    /// Calls whose arguments are whole.
    pub fn num_complete_calls(&self) -> u32 {
        match self {
            Self::Dsml(parser) => parser.num_complete_calls(),
            Self::Legacy(parser) => parser.num_calls(),
        }
    }
}
