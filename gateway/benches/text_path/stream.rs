//! What one streamed token costs this process before it is written to a socket: the fold and the chunk's JSON.

use baleen_gateway::chat::output::{Delta, OutputFold, OutputOptions};
use baleen_gateway::http::frames::write_event;
use baleen_gateway::openai::chat::response::{ChatChunkChoice, ChatChunkWriter, ChatDelta};
use baleen_gateway::openai::response::ResponseHead;
use baleen_gateway::text::stop::StopStrings;
use serde_json::{Value, json};

use crate::clock::{least_ns, round};
use crate::{corpus, tokens};

const TEXT_BYTES: usize = 256 << 10;
const TIMES: usize = 9;

pub fn measure() -> Value {
    let tokenizer = tokens::tokenizer();
    let ids = tokenizer.encode_text(&corpus::text(TEXT_BYTES, 3)).unwrap();
    let head = ResponseHead {
        id: "chatcmpl-0123456789abcdef0123456789abcdef".to_owned(),
        created: 1_700_000_000,
        model: "DeepSeek-V3.2".to_owned(),
    };
    let writer = ChatChunkWriter::new(head, true);
    let sixteen: Vec<String> = (0..16).map(|index| format!("\n\nStop {index}")).collect();
    let options = [
        ("plain", OutputOptions::default()),
        ("reasoning", OutputOptions { starts_in_reasoning: true, ..OutputOptions::default() }),
        ("16 stop strings", OutputOptions { stop: StopStrings::new(&sixteen), ..OutputOptions::default() }),
        ("tools declared", OutputOptions { max_tool_calls: u32::MAX, ..OutputOptions::default() }),
    ];
    let rows = options.map(|(name, options)| {
        let options = OutputOptions { skip_special_tokens: true, ..options };
        let (mut delta, mut out) = (Delta::default(), Vec::new());
        let mut per_token = |writes: bool| {
            let ns = least_ns(TIMES, || {
                let mut fold = OutputFold::new(tokenizer.clone(), options.clone());
                for id in &ids {
                    delta.clear();
                    fold.push(*id, false, &mut delta);
                    if writes && !delta.is_empty() {
                        out.clear();
                        let delta = match delta.reasoning.as_str() {
                            "" => ChatDelta::content(&delta.content),
                            reasoning => ChatDelta::reasoning(reasoning),
                        };
                        write_event(&mut out, |out| writer.write(&ChatChunkChoice::new(0, delta), None, out));
                    }
                }
            });
            round(ns as f64 / ids.len() as f64)
        };
        json!({ "output": name, "fold_ns_per_token": per_token(false), "fold_and_event_ns_per_token": per_token(true) })
    });
    json!({ "tokens": ids.len(), "outputs": rows })
}
