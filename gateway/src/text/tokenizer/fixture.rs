//! The small tokenizer that tests share: rows of DeepSeek-V3.2's own file, numbered without gaps.

#![expect(clippy::unwrap_used, reason = "a test that cannot load its tokenizer must fail")]

use std::sync::{Arc, LazyLock};

use super::Tokenizer;

pub const SMALL_JSON: &[u8] = include_bytes!("../../../tests/data/tokenizer.json");
/// Embedding rows of a model for the small tokenizer; the last ids have no row in its file.
pub const VOCAB_SIZE: u32 = 2048;
/// Embedding rows of DeepSeek-V3.2.
pub const WHOLE_VOCAB_SIZE: u32 = 129_280;

/// Loaded once per test process.
pub fn small() -> Arc<Tokenizer> {
    static SMALL: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_json(SMALL_JSON, VOCAB_SIZE).unwrap()));
    SMALL.clone()
}

/// An id of the whole tokenizer in the small one's numbering; absent for an id that the small one leaves out.
pub fn small_id(whole_id: u32) -> Option<u32> {
    static WHOLE_IDS: LazyLock<Vec<u32>> =
        LazyLock::new(|| serde_json::from_str(include_str!("../../../tests/data/tokenizer_real_ids.json")).unwrap());
    let id = WHOLE_IDS.binary_search(&whole_id).ok()?;
    u32::try_from(id).ok()
}

/// The whole V3.2 tokenizer; tests that need it are ignored unless asked for.
pub fn whole() -> Tokenizer {
    let path = std::env::var_os("BALEEN_V32_TOKENIZER").unwrap();
    Tokenizer::from_json(&std::fs::read(path).unwrap(), WHOLE_VOCAB_SIZE).unwrap()
}

/// Text in which whitespace, digits, other scripts and spelled-out control tokens are frequent.
pub fn text() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    let piece = prop_oneof![
        "\\PC{0,6}",
        "[ \\n\\r\\t]{1,4}",
        "[0-9]{1,7}",
        "[a-zA-Z']{1,9}",
        "[一-龥ぁ-ヿ]{1,5}",
        any::<char>().prop_map(String::from),
        prop::sample::select(vec![
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "<｜end▁of▁sentence｜>",
            "｜DSML｜",
            "<|EOT|>",
            "<｜",
            "👨‍👩‍👧‍👦",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}
