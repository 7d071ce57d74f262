//! What one streamed token costs this process: fold and chunk serialisation. Run with
//! `cargo test --profile ci -- --ignored --nocapture cost_of_a_streamed_token`.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement prints its result")]

use std::time::Instant;

use super::{Delta, OutputFold, OutputOptions};
use crate::openai::chat::response::{ChatChunkChoice, ChatChunkWriter, ChatDelta};
use crate::openai::response::ResponseHead;
use crate::text::stop::StopStrings;
use crate::text::tokenizer::fixture::small;

const TEXT: &str = "The blue whale (Balaenoptera musculus) is the largest animal known ever to have existed.\n\n\
                    它是地球上已知最大的动物。🐳 Its songs carry for 1,600 km; \"listen\", they said.\n";
const REPEATS: usize = 2000;

#[test]
#[ignore = "a measurement, not a check"]
fn cost_of_a_streamed_token() {
    let tokenizer = small();
    let ids = tokenizer.encode_raw(TEXT).unwrap();
    let head = ResponseHead {
        id: "chatcmpl-0123456789abcdef0123456789abcdef".to_owned(),
        created: 1_700_000_000,
        model: "DeepSeek-V3.2".to_owned(),
    };
    let writer = ChatChunkWriter::new(head, true);
    let sixteen: Vec<String> = (0..16).map(|index| format!("\n\nStop {index}")).collect();
    for (name, stop) in [("no stop strings", &[][..]), ("16 stop strings", &sixteen)] {
        let stop = StopStrings::new(stop);
        let options = OutputOptions { stop, skip_special_tokens: true, ..OutputOptions::default() };
        let mut fold = OutputFold::new(tokenizer.clone(), options);
        let (mut delta, mut out) = (Delta::default(), Vec::new());
        let (mut fold_ns, mut bytes) = (0, 0);
        let started = Instant::now();
        for _ in 0..REPEATS {
            out.clear();
            let before = Instant::now();
            let mut folded = Vec::with_capacity(ids.len());
            for id in &ids {
                delta.clear();
                fold.push(*id, false, &mut delta);
                folded.push(delta.content.len());
            }
            fold_ns += before.elapsed().as_nanos();
            for id in &ids {
                delta.clear();
                fold.push(*id, false, &mut delta);
                writer.write(&ChatChunkChoice::new(0, ChatDelta::content(&delta.content)), None, &mut out).unwrap();
            }
            bytes += out.len();
        }
        let tokens = (REPEATS * ids.len()) as f64;
        let fold_ns = fold_ns as f64 / tokens;
        let both_ns = started.elapsed().as_nanos() as f64 / tokens - fold_ns;
        println!("{name}: fold {fold_ns:.0} ns, fold and chunk {both_ns:.0} ns a token ({bytes} bytes)");
    }
}
