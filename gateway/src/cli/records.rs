//! `gateway render` and `gateway parse`: recorded conversations and outputs, one JSON object a line, in and out.
//!
//! They show what prompt messages become and what an output means, with the same code that serves.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::chat::calls::CallParser;
use crate::chat::control::{BEGIN_OF_SENTENCE, END_OF_SENTENCE};
use crate::chat::delta::Delta;
use crate::chat::dialect::Dialect;
use crate::chat::encode::{EncodeOptions, Ending, Message, Role, encode};
use crate::chat::markers::{Lexer, Marker, Piece};
use crate::chat::output::{OutputFold, OutputOptions};
use crate::chat::style::Style;
use crate::openai::chat::ChatRequest;
use crate::openai::{InvalidRequest, Limits};
use crate::text::tokenizer::{Segment, Tokenizer};

/// Embedding rows to allow for; a file of this family has fewer.
const MAX_VOCAB_SIZE: u32 = 1 << 18;

/// What `gateway render` takes.
#[derive(Debug, Args)]
pub struct RenderArgs {
    /// tokenizer.json
    #[arg(long, value_name = "PATH")]
    tokenizer: PathBuf,
    /// Lines to read [default: standard input]
    file: Option<PathBuf>,
}

/// What `gateway parse` takes.
#[derive(Debug, Args)]
pub struct ParseArgs {
    /// tokenizer.json; needed to read outputs by their tokens
    #[arg(long, value_name = "PATH", required_if_eq("chunk", "token"))]
    tokenizer: Option<PathBuf>,
    /// How the output is fed; the result is the same
    #[arg(long, default_value = "whole")]
    chunk: Chunk,
    /// Lines to read [default: standard input]
    file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Chunk {
    Whole,
    Token,
    Char,
}

impl RenderArgs {
    /// Answers every line, in order.
    ///
    /// # Errors
    /// The input cannot be read or the output not written; a line that is wrong is answered with its error.
    pub fn run(self) -> anyhow::Result<()> {
        let tokenizer = load(&self.tokenizer)?;
        let limits = Limits::load()?;
        each_line(self.file, |row| render(row, &tokenizer, &limits))
    }
}

impl ParseArgs {
    /// Answers every line, in order.
    ///
    /// # Errors
    /// The input cannot be read or the output not written; a line that is wrong is answered with its error.
    pub fn run(self) -> anyhow::Result<()> {
        let tokenizer = self.tokenizer.as_ref().map(load).transpose()?;
        each_line(self.file, |row| parse(row, self.chunk, tokenizer.as_ref()))
    }
}

fn load(path: &PathBuf) -> anyhow::Result<Arc<Tokenizer>> {
    let json = std::fs::read(path).map_err(|error| anyhow::anyhow!("--tokenizer {}: {error}", path.display()))?;
    Ok(Arc::new(Tokenizer::from_json(&json, MAX_VOCAB_SIZE)?))
}

fn each_line(file: Option<PathBuf>, answer: impl Fn(&Value) -> Result<Value, String>) -> anyhow::Result<()> {
    let input: Box<dyn Read> = match &file {
        Some(path) => {
            Box::new(std::fs::File::open(path).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?)
        }
        None => Box::new(std::io::stdin()),
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for line in BufReader::new(input).lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str::<Value>(&line);
        let id = row.as_ref().map_or(Value::Null, |row| row["id"].clone());
        let answered = row.map_err(|error| format!("the line is not JSON: {error}")).and_then(|row| answer(&row));
        let mut object = json!({ "id": id });
        match answered {
            Ok(Value::Object(fields)) => fields.into_iter().for_each(|(name, value)| object[name] = value),
            Ok(other) => object["error"] = other,
            Err(error) => object["error"] = error.into(),
        }
        writeln!(out, "{object}")?;
    }
    Ok(out.flush()?)
}

/// A row's prompt and token ids.
fn render(row: &Value, tokenizer: &Tokenizer, limits: &Limits) -> Result<Value, String> {
    let thinking = match row["thinking_mode"].as_str() {
        Some("thinking") => true,
        Some("chat") | None => false,
        Some(other) => return Err(format!("'thinking_mode' must be \"chat\" or \"thinking\", but it is {other:?}")),
    };
    let (messages, options) = match row["level"].as_str() {
        Some("request") => request_row(row, thinking, limits).map_err(|error| error.to_string())?,
        _ => encoder_row(row, thinking, limits).map_err(|error| error.to_string())?,
    };
    let encoded = encode(&messages, &options, tokenizer).map_err(|error| error.to_string())?;
    let token_ids = tokenizer.encode_segments(&encoded.segments).map_err(|error| error.to_string())?;
    let mut prompt = Vec::new();
    for segment in &encoded.segments {
        prompt.extend_from_slice(match segment {
            Segment::Text(text) => text.as_bytes(),
            Segment::Control(id) => tokenizer.token_bytes(*id),
        });
    }
    Ok(json!({ "prompt": String::from_utf8_lossy(&prompt), "token_ids": token_ids }))
}

/// V3.2, of which recorded conversations are.
fn v32(thinks_by_default: bool) -> Style {
    Style { thinks_by_default, ..Style::V32 }
}

/// A whole request, read as the endpoint reads it.
fn request_row(row: &Value, thinking: bool, limits: &Limits) -> Result<(Vec<Message>, EncodeOptions), InvalidRequest> {
    let request = ChatRequest::parse(row["request"].to_string().as_bytes())?;
    let conversation = request.into_conversation(limits, v32(thinking), true)?;
    Ok((conversation.messages, conversation.encode))
}

/// Messages as they go into the encoding: tools and response formats stand on them, results are in their places.
fn encoder_row(row: &Value, thinking: bool, limits: &Limits) -> Result<(Vec<Message>, EncodeOptions), InvalidRequest> {
    let list = |field: &str| row[field].as_array().cloned().unwrap_or_default();
    let mut wire = list("context");
    let num_context_messages = wire.len();
    wire.extend(list("messages"));
    let request = ChatRequest::parse(json!({ "messages": wire }).to_string().as_bytes())?;
    let mut conversation = request.into_conversation(limits, v32(thinking), false)?;
    for (message, wire) in conversation.messages.iter_mut().zip(&wire) {
        if matches!(message.role, Role::System | Role::Developer) {
            let tools = wire["tools"].as_array().into_iter().flatten();
            message.tools = tools.map(|tool| tool.get("function").unwrap_or(tool).clone()).collect();
            message.response_format = wire.get("response_format").filter(|format| !format.is_null()).cloned();
        }
    }
    let mut encode = conversation.encode;
    if encode.ending == Ending::OpenTurn {
        encode.ending = Ending::Closed;
    }
    encode.num_context_messages = num_context_messages;
    encode.add_begin_of_sentence =
        num_context_messages == 0 && row["options"]["add_default_bos_token"].as_bool().unwrap_or(true);
    Ok((conversation.messages, encode))
}

/// A row's message.
fn parse(row: &Value, chunk: Chunk, tokenizer: Option<&Arc<Tokenizer>>) -> Result<Value, String> {
    let dialect = match row["format"].as_str() {
        Some("v32") | None => Dialect::V32,
        Some("v31") => Dialect::V31,
        Some("v3") => Dialect::V3,
        Some(other) => return Err(format!("'format' must be \"v32\", \"v31\" or \"v3\", but it is {other:?}")),
    };
    let recorded = Recorded {
        dialect,
        thinking: row["thinking_mode"] == "thinking",
        is_cut: row["ended_by"] == "length",
        reads_calls: row["tools_declared"].as_array().is_none_or(|tools| !tools.is_empty()),
    };
    let (delta, num_complete) = match (chunk, tokenizer) {
        (Chunk::Token, Some(tokenizer)) => recorded.by_tokens(&row["raw_token_ids"], tokenizer)?,
        _ => recorded.by_text(row["raw_text"].as_str().ok_or("'raw_text' must be a string")?, chunk),
    };
    let finish_reason = match (recorded.is_cut, num_complete) {
        (true, _) => "length",
        (false, 0) => "stop",
        (false, _) => "tool_calls",
    };
    let calls = delta.calls.iter();
    let calls =
        calls.map(|call| json!({ "name": call.name.as_deref().unwrap_or_default(), "arguments": call.arguments }));
    Ok(json!({
        "content": delta.content,
        "reasoning_content": delta.reasoning,
        "tool_calls": calls.collect::<Vec<_>>(),
        "finish_reason": finish_reason,
    }))
}

/// How an output came to be.
struct Recorded {
    dialect: Dialect,
    thinking: bool,
    is_cut: bool,
    reads_calls: bool,
}

impl Recorded {
    fn by_tokens(&self, ids: &Value, tokenizer: &Arc<Tokenizer>) -> Result<(Delta, u32), String> {
        let ids: Vec<u32> = serde_json::from_value(ids.clone())
            .map_err(|error| format!("'raw_token_ids' must be a list of token ids: {error}"))?;
        let options = OutputOptions {
            starts_in_reasoning: self.thinking,
            max_tool_calls: if self.reads_calls { u32::MAX } else { 0 },
            dialect: self.dialect,
            ..OutputOptions::default()
        };
        let mut fold = OutputFold::new(tokenizer.clone(), options);
        let mut delta = Delta::default();
        let ends = [END_OF_SENTENCE, BEGIN_OF_SENTENCE].map(|text| tokenizer.control(text));
        for id in ids {
            if ends.contains(&Some(id)) {
                break;
            }
            fold.push(id, false, &mut delta);
        }
        fold.finish(self.is_cut, &mut delta);
        Ok((delta, fold.num_complete_calls()))
    }

    fn by_text(&self, text: &str, chunk: Chunk) -> (Delta, u32) {
        // With the think tokens as the only markers, the earlier models' parser splits off reasoning and no more.
        let (dialect, markers) = match self.reads_calls {
            true => (self.dialect, self.dialect.markers()),
            false => (Dialect::V31, Marker::THINK_SET),
        };
        let mut parser = CallParser::new(dialect, self.thinking, u32::MAX);
        let mut lexer = Lexer::new(markers);
        let mut delta = Delta::default();
        let mut ended = false;
        let mut take = |piece: Piece<'_>| {
            ended |= piece == Piece::Marker(Marker::EndOfSentence);
            if !ended {
                parser.push(piece, &mut delta);
            }
        };
        if chunk == Chunk::Char {
            for (at, c) in text.char_indices() {
                lexer.push(&text[at..at + c.len_utf8()], &mut take);
            }
        } else {
            lexer.push(text, &mut take);
        }
        lexer.finish(&mut take);
        parser.finish(self.is_cut, &mut delta);
        (delta, parser.num_complete_calls())
    }
}

#[cfg(test)]
mod tests;
