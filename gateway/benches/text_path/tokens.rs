//! How long a prompt takes to become token ids: cold, and as the next turn of a long conversation.

use std::sync::{Arc, LazyLock};

use baleen_gateway::chat::encode::{EncodeOptions, Message, Role, encode};
use baleen_gateway::text::spans::SpanCache;
use baleen_gateway::text::tokenizer::{Segment, Tokenizer};
use serde_json::{Value, json};

use crate::clock::{least_ns, mb_per_s, microseconds};
use crate::corpus;

const MICRO_JSON: &[u8] = include_bytes!("../../../models/micro/tokenizer.json");
/// Embedding rows of DeepSeek-V3.2; more than the micro model has.
const VOCAB_SIZE: u32 = 129_280;
const CACHE_BYTES: usize = 256 << 20;
const PROMPT_BYTES: usize = 16 << 10;
const CONVERSATION_TOKENS: usize = 64 << 10;
const TURNS: usize = 20;

pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let json = std::env::var_os("BALEEN_V32_TOKENIZER").map(|path| std::fs::read(path).unwrap());
        Arc::new(Tokenizer::from_json(json.as_deref().unwrap_or(MICRO_JSON), VOCAB_SIZE).unwrap())
    });
    TOKENIZER.clone()
}

pub fn measure() -> Value {
    let tokenizer = tokenizer();
    let short_texts = [16, 32, 48, 64, 96, 128, 256].map(|bytes| short_text(&tokenizer, bytes));
    json!({
        "tokenizer": if std::env::var_os("BALEEN_V32_TOKENIZER").is_some() { "deepseek-v3.2" } else { "micro" },
        "backend": tokenizer.backend_name(),
        "cold_prompt": cold_prompt(&tokenizer),
        "short_texts": short_texts,
        "conversation": conversation(&tokenizer),
    })
}

/// A prompt of which nothing was seen before.
fn cold_prompt(tokenizer: &Tokenizer) -> Value {
    let mut number = 0;
    let mut tokens = 0;
    let ns = least_ns(200, || {
        number += 1;
        let cache = SpanCache::new(CACHE_BYTES);
        let segments = [Segment::Control(0), Segment::Text(corpus::text(PROMPT_BYTES, number)), Segment::Control(1)];
        tokens = cache.encode(tokenizer, &segments, "").unwrap().token_ids.len();
        tokens
    });
    json!({ "bytes": PROMPT_BYTES, "tokens": tokens, "us": microseconds(ns) })
}

/// One text, tokenized and found: from which length on it is worth keeping.
fn short_text(tokenizer: &Tokenizer, bytes: usize) -> Value {
    let texts: Vec<Segment> = (0..1000).map(|number| Segment::Text(corpus::text(bytes, number))).collect();
    let cache = SpanCache::new(CACHE_BYTES);
    let nanoseconds = |ns: u64| ns / 1000;
    let encode = least_ns(20, || tokenizer.encode_segments(&texts).unwrap());
    let find = least_ns(20, || cache.encode(tokenizer, &texts, "").unwrap());
    json!({ "bytes": bytes, "tokenized_ns": nanoseconds(encode), "found_ns": nanoseconds(find) })
}

/// The turn after twenty turns that fill 64K tokens.
fn conversation(tokenizer: &Tokenizer) -> Value {
    let bytes_per_token =
        PROMPT_BYTES as f64 / tokenizer.encode_text(&corpus::text(PROMPT_BYTES, 1)).unwrap().len() as f64;
    let message_bytes = (CONVERSATION_TOKENS as f64 * bytes_per_token) as usize / (2 * TURNS);
    let mut messages = Vec::new();
    for turn in 0..TURNS {
        messages.push(Message::new(Role::User, corpus::text(message_bytes, 2 * turn)));
        let mut answer = Message::new(Role::Assistant, corpus::text(message_bytes, 2 * turn + 1));
        answer.reasoning = corpus::text(message_bytes, 1000 + turn);
        messages.push(answer);
    }
    messages.push(Message::new(Role::User, "And what does a sperm whale eat, in the same time?"));
    let options = EncodeOptions::request(true, false);
    let render = || encode(&messages, &options, tokenizer).unwrap().segments;
    let before = encode(&messages[..2 * TURNS - 1], &options, tokenizer).unwrap().segments;
    let segments = render();
    let text_bytes: usize = segments.iter().map(Segment::text_len).sum();

    let render_ns = least_ns(50, render);
    let uncached_ns = least_ns(10, || tokenizer.encode_segments(&segments).unwrap());
    let mut next = None;
    // A cache that has seen the conversation as it was one turn before, and this turn never.
    let mut next_ns = u64::MAX;
    for _ in 0..20 {
        let cache = SpanCache::new(CACHE_BYTES);
        cache.encode(tokenizer, &before, "").unwrap();
        next_ns = next_ns.min(least_ns(1, || next = Some(cache.encode(tokenizer, &segments, "").unwrap())));
    }
    let next = next.unwrap();
    json!({
        "turns": TURNS,
        "tokens": next.token_ids.len(),
        "bytes": text_bytes,
        "new_bytes": next.tokenized_bytes,
        "render_us": microseconds(render_ns),
        "uncached_us": microseconds(uncached_ns),
        "uncached_mb_per_s": mb_per_s(text_bytes, uncached_ns),
        "next_turn_us": microseconds(next_ns),
    })
}
