//! What an answer must look like, compiled into data that a worker enforces token by token.
//!
//! A rule about content alone is passed on as it is. As soon as tool calls are part of the answer, everything is
//! compiled into one structural tag, in the JSON format of xgrammar. Control tokens stand in it by their ids and are no
//! text to it, spelled or not: what the grammar takes for markup is markup to the parser, and nothing else is.
//!
//! Pure: no request types, no worker types.

mod calls;
mod format;
mod parameters;
pub mod schema;
mod text;

use serde_json::Value;

use self::calls::CallWriter;
use self::schema::SchemaError;
use super::dialect::Dialect;
use crate::text::tokenizer::{Tokenizer, TokenizerError};

/// What the worker is told. Each kind is an ability that a worker may lack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Constraint {
    /// JSON that obeys this schema.
    JsonSchema(String),
    /// Text that matches this expression from end to end.
    Regex(String),
    /// Text of this grammar, whose start is `root`.
    Ebnf(String),
    /// xgrammar's structural tag, as JSON.
    StructuralTag(String),
}

impl Constraint {
    /// The name under which workers list the ability.
    #[must_use]
    pub fn ability(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Ebnf(_) => "ebnf",
            Self::StructuralTag(_) => "structural_tag",
        }
    }

    /// What is sent.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Ebnf(text) | Self::StructuralTag(text) => text,
        }
    }
}

/// What visible text must be. Schemas have passed [`schema::check`].
#[derive(Debug, Clone, PartialEq)]
pub enum ContentRule {
    Schema(Value),
    Regex(String),
    Ebnf(String),
    /// The `format` of a structural tag.
    Tag(Value),
    /// One of these texts.
    Choice(Vec<String>),
}

/// A function that the answer may call.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionRule {
    /// Where the request declares it.
    pub path: String,
    pub name: String,
    /// A JSON Schema of the arguments.
    pub parameters: Option<Value>,
    /// Whether the arguments must obey the schema; otherwise they do where it can be enforced and calls are forced.
    pub strict: bool,
}

/// What calls the answer must hold.
#[derive(Debug, Clone, PartialEq)]
pub struct CallRule {
    pub functions: Vec<FunctionRule>,
    /// At least one call, and nothing else; otherwise calls may follow text.
    pub required: bool,
    /// At most one call.
    pub single: bool,
}

/// What a whole answer must look like, reasoning aside.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnswerRule {
    /// The request's field that asks for it.
    pub field: String,
    pub content: Option<ContentRule>,
    pub calls: Option<CallRule>,
}

/// Why a rule cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum ConstraintError {
    /// A strict function's parameters are wrong.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// They ask for what calls cannot be held to.
    #[error("'{path}' cannot be strict: {reason}")]
    Unenforceable { path: String, reason: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl AnswerRule {
    /// Compiles the rule for a model that writes calls in `dialect`. Time and size are linear in the rule.
    ///
    /// # Errors
    /// A strict function cannot be enforced, or the model lacks a control token.
    pub fn compile(&self, dialect: Dialect, tokenizer: &Tokenizer) -> Result<Option<Constraint>, ConstraintError> {
        let format = match (&self.content, &self.calls) {
            (None, None) => return Ok(None),
            (Some(ContentRule::Schema(schema)), None) => return Ok(Some(Constraint::JsonSchema(schema.to_string()))),
            (Some(ContentRule::Regex(regex)), None) => return Ok(Some(Constraint::Regex(regex.clone()))),
            (Some(ContentRule::Ebnf(grammar)), None) => return Ok(Some(Constraint::Ebnf(grammar.clone()))),
            (Some(content), None) => content_format(content),
            (content, Some(calls)) => {
                let writer = CallWriter::new(dialect, tokenizer)?;
                let block = writer.block(calls)?;
                match content {
                    _ if calls.required => writer.after_separator(block),
                    None => format::sequence(vec![format::any_text(), format::optional(block)]),
                    Some(content) => format::either(vec![content_format(content), writer.after_separator(block)]),
                }
            }
        };
        Ok(Some(Constraint::StructuralTag(format::structural_tag(format).to_string())))
    }
}

fn content_format(rule: &ContentRule) -> Value {
    match rule {
        ContentRule::Schema(schema) => format::json(schema.clone()),
        ContentRule::Regex(regex) => format::regex(regex),
        ContentRule::Ebnf(grammar) => format::grammar(grammar),
        ContentRule::Tag(format) => format.clone(),
        ContentRule::Choice(texts) => format::either(texts.iter().map(|text| format::text(text)).collect()),
    }
}

#[cfg(test)]
mod tests;
