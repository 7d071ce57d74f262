//! Output tokens, folded and streamed: what a client of the stream adds up equals the answer in one piece, and every
//! event is one line of JSON.

use baleen_gateway::chat::output::{Delta, OutputFold, OutputOptions};
use baleen_gateway::http::sse::write_event;
use baleen_gateway::openai::chat::response::{ChatChunkChoice, ChatChunkWriter, ChatDelta, ChatToolCall};
use baleen_gateway::openai::response::ResponseHead;
use baleen_gateway::text::stop::StopStrings;
use serde_json::Value;

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

    let client = read_events(&events.out);
    assert_eq!(client.reasoning, whole.reasoning);
    assert_eq!(client.content, whole.content);
    assert_eq!(client.calls, whole.calls);
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

struct Events {
    writer: ChatChunkWriter,
    delta: Delta,
    out: Vec<u8>,
}

impl Default for Events {
    fn default() -> Self {
        let head = ResponseHead { id: "chatcmpl-0".to_owned(), created: 0, model: "micro".to_owned() };
        Self { writer: ChatChunkWriter::new(head, false), delta: Delta::default(), out: Vec::new() }
    }
}

impl Events {
    fn write(&mut self) {
        let Self { writer, delta, out } = self;
        let mut event = |delta: ChatDelta<'_>| {
            write_event(out, |out| writer.write(&ChatChunkChoice::new(0, delta), None, out));
        };
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

/// Adds up a stream as a client does.
fn read_events(stream: &[u8]) -> Delta {
    let stream = std::str::from_utf8(stream).unwrap();
    let mut client = Delta::default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for event in stream.split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").unwrap();
        assert!(!data.contains(['\n', '\r']), "an event of two lines: {data:?}");
        let chunk: Value = serde_json::from_str(data).unwrap();
        let delta = &chunk["choices"][0]["delta"];
        client.reasoning.push_str(&text(&delta["reasoning_content"]));
        client.content.push_str(&text(&delta["content"]));
        let Some(call) = delta["tool_calls"].get(0) else { continue };
        let index = call["index"].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap();
        if let Some(name) = call["function"]["name"].as_str() {
            assert_eq!(index, client.calls.len(), "calls begin in order");
            client.calls.push(baleen_gateway::chat::output::CallDelta {
                index: u32::try_from(index).unwrap(),
                name: Some(name.to_owned()),
                arguments: String::new(),
            });
        }
        client.calls[index].arguments.push_str(&text(&call["function"]["arguments"]));
    }
    client
}
