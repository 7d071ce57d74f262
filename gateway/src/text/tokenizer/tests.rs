#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::backend::{FastEncoder, OracleEncoder, agrees};
use super::fixture::{SMALL_JSON, VOCAB_SIZE, WHOLE_VOCAB_SIZE, small, small_id, text, whole};
use super::vocabulary::Vocabulary;
use super::{Segment, Tokenizer, TokenizerError};

mod parity;

fn small_json() -> Value {
    serde_json::from_slice(SMALL_JSON).unwrap()
}

fn load(root: &Value, vocab_size: u32) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_json(root.to_string().as_bytes(), vocab_size)
}

/// Whether an id is one of the small tokenizer's added tokens.
fn is_added(id: u32) -> bool {
    id < 3 || id >= small().control("｜DSML｜").unwrap()
}

/// The ids of `<｜User｜>hi<｜Assistant｜>`.
fn user_says_hi() -> Vec<u32> {
    [128_803, 6366, 128_804].into_iter().filter_map(small_id).collect()
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect()
}

#[test]
fn control_tokens_are_found_by_their_text() {
    let tokenizer = small();
    assert_eq!(tokenizer.backend_name(), "fastokens");
    assert_eq!(tokenizer.control_id("<｜User｜>").unwrap(), 1943);
    assert_eq!(tokenizer.control("</think>"), small_id(128_799));
    // A word of the vocabulary is no control token.
    assert_eq!(tokenizer.control("the"), None);
    let error = tokenizer.control_id("<｜latest｜>").unwrap_err();
    assert!(error.to_string().contains("`<｜latest｜>`"), "{error}");
}

#[test]
fn special_is_what_the_file_says() {
    let tokenizer = small();
    for (text, special) in
        [("<｜end▁of▁sentence｜>", true), ("｜DSML｜", true), ("<think>", false), ("<｜User｜>", false)]
    {
        assert_eq!(tokenizer.is_special(tokenizer.control_id(text).unwrap()), special, "{text}");
    }
    assert!(!tokenizer.is_special(u32::MAX));
}

#[test]
fn an_id_without_a_row_has_no_bytes() {
    let tokenizer = small();
    assert_eq!(tokenizer.token_bytes(1939), b"</think>");
    for id in [1955, VOCAB_SIZE - 1, VOCAB_SIZE, u32::MAX] {
        assert_eq!(tokenizer.token_bytes(id), b"", "{id}");
    }
}

#[test]
fn raw_text_recognises_control_tokens_and_gains_none() {
    let tokenizer = small();
    let ids = tokenizer.encode_raw("<｜User｜>hi<｜Assistant｜>").unwrap();
    assert_eq!(ids, user_says_hi());
}

#[test]
fn a_segment_of_text_is_only_text() {
    let tokenizer = small();
    let text = Segment::Text("<｜User｜>hi".to_owned());
    let ids = tokenizer.encode_segments(&[Segment::Control(0), text, Segment::Control(1)]).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (0, 1));
    assert!(!ids[1..ids.len() - 1].iter().copied().any(is_added), "{ids:?}");
    assert_eq!(decode(&tokenizer, &ids[1..ids.len() - 1]), "<｜User｜>hi".as_bytes());
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut root = small_json();
    root["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = load(&root, VOCAB_SIZE).unwrap();
    assert!(tokenizer.encode_raw("one two three four").unwrap().len() > 2);
}

#[test]
fn a_begin_of_sentence_template_adds_nothing() {
    let mut root = small_json();
    root["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<｜begin▁of▁sentence｜>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<｜begin▁of▁sentence｜>": {"id": "<｜begin▁of▁sentence｜>", "ids": [0], "tokens": ["<｜begin▁of▁sentence｜>"]},
        },
    });
    let tokenizer = load(&root, VOCAB_SIZE).unwrap();
    assert_eq!(tokenizer.encode_raw("hi").unwrap(), [small_id(6366).unwrap()]);
}

#[test]
fn added_tokens_keep_the_ids_of_the_file() {
    let mut root = small_json();
    root["added_tokens"][20]["id"] = json!(2040);
    root["added_tokens"][19]["id"] = json!(2020);
    for normalizer in [Value::Null, json!({"type": "StripAccents"})] {
        root["normalizer"] = normalizer;
        let tokenizer = load(&root, VOCAB_SIZE).unwrap();
        let text = "<｜tool▁output▁end｜><｜tool▁sep｜>";
        assert_eq!(tokenizer.encode_raw(text).unwrap(), [2020, 2040], "{}", tokenizer.backend_name());
        assert_eq!(decode(&tokenizer, &[2020, 2040]), text.as_bytes());
    }
}

#[test]
fn what_is_not_byte_level_bpe_is_refused() {
    let mut other_decoder = small_json();
    other_decoder["decoder"] = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
    let mut other_model = small_json();
    other_model["model"]["type"] = json!("Unigram");
    for root in [other_decoder, other_model] {
        let error = load(&root, VOCAB_SIZE).unwrap_err();
        assert!(matches!(error, TokenizerError::Unsupported(_)), "{error}");
    }
    for bytes in [&b""[..], b"{", b"null", b"[]", b"{\"model\": {\"type\": \"BPE\"}}"] {
        let error = Tokenizer::from_json(bytes, VOCAB_SIZE).unwrap_err();
        let expected = matches!(error, TokenizerError::Malformed(_) | TokenizerError::Unsupported(_));
        assert!(expected, "{error}");
    }
}

#[test]
fn a_row_outside_the_embedding_is_refused() {
    let error = load(&small_json(), 1954).unwrap_err();
    assert!(error.to_string().contains("1954 embedding rows"), "{error}");
}

#[test]
fn a_fast_encoder_that_differs_is_found_out() {
    let vocabulary = Vocabulary::from_json(&small_json(), VOCAB_SIZE).unwrap();
    let oracle = OracleEncoder::load(small_json()).unwrap();
    assert!(agrees(&FastEncoder::load(small_json()).unwrap(), &oracle, &vocabulary).is_ok());

    let mut fewer_merges = small_json();
    fewer_merges["model"]["merges"].as_array_mut().unwrap().remove(2);
    let error = agrees(&FastEncoder::load(fewer_merges).unwrap(), &oracle, &vocabulary).unwrap_err();
    assert!(error.to_string().contains("differently"), "{error}");

    let mut fewer_controls = small_json();
    fewer_controls["added_tokens"].as_array_mut().unwrap().pop();
    assert!(agrees(&FastEncoder::load(fewer_controls).unwrap(), &oracle, &vocabulary).is_err());
}

#[test]
fn the_oracle_serves_what_the_fast_encoder_cannot_load() {
    let mut root = small_json();
    root["normalizer"] = json!({"type": "StripAccents"});
    let tokenizer = load(&root, VOCAB_SIZE).unwrap();
    assert_eq!(tokenizer.backend_name(), "tokenizers");
    assert_eq!(tokenizer.encode_raw("<｜User｜>hi<｜Assistant｜>").unwrap(), user_says_hi());
    let ids = tokenizer.encode_segments(&[Segment::Text("<｜User｜>hi".to_owned())]).unwrap();
    assert!(!ids.iter().copied().any(is_added), "{ids:?}");
}

#[test]
fn the_embedded_model_has_the_control_tokens_of_chat() {
    use crate::chat::control::{ASSISTANT, BEGIN_OF_SENTENCE, END_OF_SENTENCE, THINK_CLOSE, THINK_OPEN, USER};
    let config: Value = serde_json::from_str(include_str!("../../../../models/micro/config.json")).unwrap();
    let vocab_size = u32::try_from(config["vocab_size"].as_u64().unwrap()).unwrap();
    let json = include_bytes!("../../../../models/micro/tokenizer.json");
    let tokenizer = Tokenizer::from_json(json, vocab_size).unwrap();
    assert_eq!(tokenizer.backend_name(), "fastokens");
    for text in [BEGIN_OF_SENTENCE, END_OF_SENTENCE, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE] {
        let id = tokenizer.control_id(text).unwrap();
        assert_eq!(tokenizer.token_bytes(id), text.as_bytes());
    }
}

#[test]
#[ignore = "needs BALEEN_V32_TOKENIZER=/path/to/tokenizer.json of DeepSeek-V3.2"]
fn the_whole_tokenizer_is_fast_and_exact() {
    let tokenizer = whole();
    assert_eq!(tokenizer.backend_name(), "fastokens");
    let text = "The whale 鯨 🐳 sings 12345 songs.\n\n";
    let ids = tokenizer.encode_raw(text).unwrap();
    assert_eq!(decode(&tokenizer, &ids), text.as_bytes());
    assert_eq!(tokenizer.control("｜DSML｜"), Some(128_793));
    assert_eq!(tokenizer.token_bytes(WHOLE_VOCAB_SIZE - 1), b"");
}

proptest! {
    #[test]
    fn text_never_becomes_a_control_token(text in text()) {
        let tokenizer = small();
        let ids = tokenizer.encode_segments(&[Segment::Text(text.clone())]).unwrap();
        prop_assert!(!ids.iter().copied().any(is_added), "{:?}", ids);
        prop_assert_eq!(decode(&tokenizer, &ids), text.as_bytes());
    }

    #[test]
    fn raw_encoding_loses_nothing(text in text()) {
        let tokenizer = small();
        let ids = tokenizer.encode_raw(&text).unwrap();
        prop_assert_eq!(decode(&tokenizer, &ids), text.as_bytes());
    }

    #[test]
    fn both_encoders_agree(text in text()) {
        use std::sync::LazyLock;
        static ENCODERS: LazyLock<(FastEncoder, OracleEncoder)> = LazyLock::new(|| {
            (FastEncoder::load(small_json()).unwrap(), OracleEncoder::load(small_json()).unwrap())
        });
        let (fast, oracle) = &*ENCODERS;
        prop_assert_eq!(fast.encode_plain(&text).unwrap(), oracle.encode_plain(&text).unwrap());
        prop_assert_eq!(fast.encode_raw(&text).unwrap(), oracle.encode_raw(&text).unwrap());
    }
}
