//! How bytes become the settings and the division that a target is run with.

use std::sync::{Arc, LazyLock};

use baleen_gateway::text::tokenizer::Tokenizer;

const TOKENIZER_JSON: &[u8] = include_bytes!("../../tests/data/tokenizer.json");
pub const VOCAB_SIZE: u32 = 2048;

/// The small tokenizer, loaded once.
pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_json(TOKENIZER_JSON, VOCAB_SIZE).unwrap()));
    TOKENIZER.clone()
}

/// Splits two bytes of settings off an input: flags, and the seed of the division into chunks.
pub fn settings(data: &[u8]) -> (u8, u8, &[u8]) {
    match data {
        [flags, seed, rest @ ..] => (*flags, *seed, rest),
        [flags] => (*flags, 0, &[]),
        [] => (0, 0, &[]),
    }
}

/// Lengths of chunks, 1 to 8, the same for the same seed. Short ones are the frequent ones: they cut most.
pub fn chunk_lengths(seed: u8) -> impl Iterator<Item = usize> {
    let mut state = u32::from(seed) | 0x100;
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        Some(1 << (state % 4))
    })
}
