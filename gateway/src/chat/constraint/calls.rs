//! The block of tool calls as a grammar, in the dialect that the model was trained on.

use serde_json::{Value, json};

use super::format::{self, Markup};
use super::parameters::{Argument, arguments};
use super::{CallRule, ConstraintError, FunctionRule, schema};
use crate::chat::dialect::Dialect;
use crate::chat::markers::Marker;
use crate::text::tokenizer::{Tokenizer, TokenizerError};

/// Stands before a block that begins an answer.
const SEPARATOR: &str = "\n\n";
/// A name of an argument that no schema declares.
const FREE_NAME: &str = "[^\"<>\\n\u{FF5C}]+";

/// Writes blocks with the model's own control tokens.
pub struct CallWriter {
    tokens: Tokens,
}

/// Ids of the control tokens that a dialect's markup is made of.
enum Tokens {
    Dsml(u32),
    Legacy { fenced: bool, calls_begin: u32, calls_end: u32, call_begin: u32, call_end: u32, separator: u32 },
}

impl CallWriter {
    /// # Errors
    /// The model has no token of this dialect.
    pub fn new(dialect: Dialect, tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        let id = |marker: Marker| tokenizer.control_id(marker.text());
        let tokens = match dialect {
            Dialect::V32 => Tokens::Dsml(id(Marker::Dsml)?),
            Dialect::V31 | Dialect::V3 => Tokens::Legacy {
                fenced: dialect == Dialect::V3,
                calls_begin: id(Marker::CallsBegin)?,
                calls_end: id(Marker::CallsEnd)?,
                call_begin: id(Marker::CallBegin)?,
                call_end: id(Marker::CallEnd)?,
                separator: id(Marker::Separator)?,
            },
        };
        Ok(Self { tokens })
    }

    /// A block as it stands when no text is before it.
    pub fn after_separator(&self, block: Value) -> Value {
        match self.tokens {
            Tokens::Dsml(_) => format::sequence(vec![format::text(SEPARATOR), block]),
            Tokens::Legacy { .. } => block,
        }
    }

    /// A block with one call or more.
    ///
    /// # Errors
    /// The schema of a strict function cannot be enforced.
    pub fn block(&self, rule: &CallRule) -> Result<Value, ConstraintError> {
        let calls = rule.functions.iter().map(|function| self.call(function, rule.required));
        let call = format::either(calls.collect::<Result<_, _>>()?);
        Ok(match self.tokens {
            Tokens::Dsml(marker) => {
                let calls = if rule.single { call } else { format::repeated(call) };
                let block = Markup::default().text("<").token(marker).text("function_calls>\n").format(calls);
                block.text("</").token(marker).text("function_calls>").into_format()
            }
            Tokens::Legacy { fenced, calls_begin, calls_end, .. } => {
                let further = match (rule.single, fenced) {
                    (true, _) => None,
                    (false, false) => Some(call.clone()),
                    (false, true) => Some(format::sequence(vec![format::text("\n"), call.clone()])),
                };
                let further = further.map(|further| format::optional(format::repeated(further)));
                let block = Markup::default().token(calls_begin).format(call);
                let block = further.into_iter().fold(block, Markup::format);
                block.token(calls_end).into_format()
            }
        })
    }

    fn call(&self, function: &FunctionRule, forced: bool) -> Result<Value, ConstraintError> {
        let path = format!("{}.parameters", function.path);
        let parameters = match &function.parameters {
            Some(schema) if function.strict => {
                schema::check(schema, &path, true)?;
                Some(schema)
            }
            // Without a promise it is enforced as far as that goes.
            Some(schema) if forced => schema::check(schema, &path, true).is_ok().then_some(schema),
            _ => None,
        };
        match self.tokens {
            Tokens::Dsml(marker) => {
                let body = match parameters.map(arguments) {
                    Some(Ok(arguments)) => declared(marker, arguments),
                    Some(Err(reason)) if function.strict => {
                        return Err(ConstraintError::Unenforceable { path, reason });
                    }
                    Some(Err(_)) | None => undeclared(marker),
                };
                let call = Markup::default().text("<").token(marker).text("invoke name=\"").text(&function.name);
                let call = call.text("\">").format(body).text("\n</").token(marker).text("invoke>\n");
                Ok(call.into_format())
            }
            Tokens::Legacy { fenced, call_begin, call_end, separator, .. } => {
                let any = || json!({ "type": "object" });
                let json = format::argument_json(parameters.cloned().unwrap_or_else(any));
                let call = Markup::default().token(call_begin);
                let call = if fenced {
                    let call = call.text("function").token(separator).text(&function.name).text("\n```json\n");
                    call.format(json).text("\n```")
                } else {
                    call.text(&function.name).token(separator).format(json)
                };
                Ok(call.token(call_end).into_format())
            }
        }
    }
}

/// The arguments of a schema, in its order. Where none is required there may be none, which leaves an empty line.
fn declared(marker: u32, arguments: Vec<Argument>) -> Value {
    let any_required = arguments.iter().any(|argument| argument.required);
    let elements = arguments.into_iter().map(|argument| {
        let forms = [("true", argument.text), ("false", argument.json)];
        let forms = forms.into_iter().filter_map(|(string, value)| Some((string, value?)));
        let forms = forms.map(|(string, value)| parameter(marker, format::text(&argument.name), string, value));
        let parameter = format::either(forms.collect());
        if argument.required { parameter } else { format::optional(parameter) }
    });
    let elements: Vec<Value> = elements.collect();
    match (any_required, elements.is_empty()) {
        (true, _) => format::sequence(elements),
        (false, true) => format::text("\n"),
        (false, false) => format::either(vec![format::text("\n"), format::sequence(elements)]),
    }
}

/// Any arguments, in the right shape.
fn undeclared(marker: u32) -> Value {
    let name = || format::regex(FREE_NAME);
    let not_a_string = json!({ "type": ["number", "boolean", "null", "array", "object"] });
    let text = parameter(marker, name(), "true", format::any_text());
    let json = parameter(marker, name(), "false", format::argument_json(not_a_string));
    let parameters = format::repeated(format::either(vec![text, json]));
    format::either(vec![format::text("\n"), parameters])
}

/// One argument, on a line of its own.
fn parameter(marker: u32, name: Value, string: &str, value: Value) -> Value {
    let parameter = Markup::default().text("\n<").token(marker).text("parameter name=\"").format(name);
    let parameter = parameter.text("\" string=\"").text(string).text("\">").format(value);
    parameter.text("</").token(marker).text("parameter>").into_format()
}
