//! Output tokens, folded and streamed: what a client of the stream adds up equals the answer in one piece, and every
//! event is one line of JSON.

use std::borrow::Cow;

use baleen_gateway::chat::output::{CallDelta, Delta, OutputFold, OutputOptions};
use baleen_gateway::http::frames::write_event;
use baleen_gateway::openai::chat::response::{ChatChunkChoice, ChatChunkWriter, ChatDelta, ChatToolCall, ChunkText};
use baleen_gateway::openai::response::ResponseHead;
use baleen_gateway::text::stop::StopStrings;
use serde::Deserialize;

use super::client::Client;
use super::input;

const STOP: [&str; 3] = ["\n\n", "</", "ab"];

/// Two bytes of settings, then the output: as text in which control tokens are recognised, or as ids of two bytes.
pub fn run(data: &[u8]) {
    let (flags, seed, output) = input::settings(data);
    let ids = if flags & 0x80 == 0 { ids_of_text(output) } else { ids_of_bytes(output) };
    let is_cut = flags & 2 != 0;
    let mut whole = Delta::default();
    let mut fold = new_fold(flags);
    for id in &ids {
        fold.push(*id, false, &mut whole);
    }
    fold.finish(is_cut, &mut whole);

    let mut events = Events::default();
    let mut streamed = new_fold(flags);
    let mut rest = &ids[..];
    for length in input::chunk_lengths(seed) {
        if rest.is_empty() {
            break;
        }
        let (step, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        step.iter().for_each(|id| streamed.push(*id, false, &mut events.delta));
        events.write();
    }
    streamed.finish(is_cut, &mut events.delta);
    events.write();

    let mut answer = Client::default();
    answer.take(&mut whole);
    assert_eq!(events.client, answer);
    assert_eq!(streamed.stopped(), fold.stopped());
    assert_eq!(streamed.num_reasoning_tokens(), fold.num_reasoning_tokens());
    assert_eq!(streamed.num_complete_calls(), fold.num_complete_calls());
}

fn ids_of_text(output: &[u8]) -> Vec<u32> {
    input::tokenizer().encode_raw(&String::from_utf8_lossy(output)).unwrap()
}

/// Beyond the vocabulary as well: a worker can send anything.
fn ids_of_bytes(output: &[u8]) -> Vec<u32> {
    output
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) % (input::VOCAB_SIZE + 8))
        .collect()
}

fn new_fold(flags: u8) -> OutputFold {
    let options = OutputOptions {
        starts_in_reasoning: flags & 1 != 0,
        max_tool_calls: if flags & 4 != 0 { u32::MAX } else { 0 },
        skip_special_tokens: flags & 8 != 0,
        include_stop: flags & 0x10 != 0,
        stop: StopStrings::new(&STOP[..usize::from(flags >> 5 & 3)]),
        ..OutputOptions::default()
    };
    OutputFold::new(input::tokenizer(), options)
}

/// A stream and its client.
struct Events {
    writer: ChatChunkWriter,
    delta: Delta,
    /// One event, written and not yet read.
    out: Vec<u8>,
    client: Client,
}

impl Default for Events {
    fn default() -> Self {
        let head = ResponseHead { id: "chatcmpl-0".to_owned(), created: 0, model: "micro".to_owned() };
        Self {
            writer: ChatChunkWriter::new(head, false),
            delta: Delta::default(),
            out: Vec::new(),
            client: Client::default(),
        }
    }
}

impl Events {
    fn write(&mut self) {
        let Self { writer, delta, out, client } = self;
        let mut send = |write: &dyn Fn(&mut Vec<u8>) -> serde_json::Result<()>| {
            out.clear();
            write_event(out, write);
            client.take(&mut read_event(out));
        };
        // As the endpoint does: text by itself has a writer of its own.
        if delta.calls.is_empty() {
            for text in [ChunkText::Reasoning(&delta.reasoning), ChunkText::Content(&delta.content)] {
                if !text.is_empty() {
                    send(&|out| writer.write_text(0, text, out));
                }
            }
            delta.clear();
            return;
        }
        let mut event = |delta: ChatDelta<'_>| send(&|out| writer.write(&ChatChunkChoice::new(0, delta), None, out));
        if !delta.reasoning.is_empty() {
            event(ChatDelta::reasoning(&delta.reasoning));
        }
        if !delta.content.is_empty() {
            event(ChatDelta::content(&delta.content));
        }
        for call in &delta.calls {
            if let Some(name) = &call.name {
                event(ChatDelta::tool_call(&ChatToolCall::new(call.index, "call_0", name, "")));
            }
            event(ChatDelta::tool_call(&ChatToolCall::arguments(call.index, &call.arguments)));
        }
        delta.clear();
    }
}

/// What an event's data holds for the client. Typed, with text borrowed where nothing is escaped: a tree of values took
/// most of the time of a run.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: [Choice<'a>; 1],
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    delta: ChunkDelta<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChunkDelta<'a> {
    #[serde(borrow, default)]
    reasoning_content: Cow<'a, str>,
    #[serde(borrow, default)]
    content: Cow<'a, str>,
    #[serde(borrow, default)]
    tool_calls: Vec<ChunkCall<'a>>,
}

#[derive(Deserialize)]
struct ChunkCall<'a> {
    index: u32,
    #[serde(borrow)]
    function: ChunkFunction<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChunkFunction<'a> {
    name: Option<String>,
    #[serde(borrow)]
    arguments: Cow<'a, str>,
}

/// Reads one event as a client does.
fn read_event(event: &[u8]) -> Delta {
    let event = std::str::from_utf8(event).unwrap();
    let data = event.strip_prefix("data: ").and_then(|event| event.strip_suffix("\n\n")).unwrap();
    assert!(!data.bytes().any(|byte| matches!(byte, b'\n' | b'\r')), "an event of two lines: {data:?}");
    let Chunk { choices: [Choice { delta }] } = serde_json::from_str(data).unwrap();
    let call = |call: ChunkCall<'_>| CallDelta {
        index: call.index,
        name: call.function.name,
        arguments: call.function.arguments.into_owned(),
    };
    Delta {
        reasoning: delta.reasoning_content.into_owned(),
        content: delta.content.into_owned(),
        calls: delta.tool_calls.into_iter().map(call).collect(),
    }
}
