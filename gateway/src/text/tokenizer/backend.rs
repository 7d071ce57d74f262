//! The two encoders behind [`super::Tokenizer`], and the check that lets the fast one serve.

use serde_json::Value;

use super::TokenizerError;
use super::vocabulary::Vocabulary;

/// Text whose pre-tokenization differs between careless implementations: digits in threes, CJK and kana runs,
/// whitespace with and without line ends, combining marks, joined emoji, code, and look-alikes of control tokens.
const PROBES: &[&str] = &[
    "",
    " ",
    "Hello, world! It's 12345678 o'clock; don't PANIC.",
    "  leading\n\n\ttabs \t\r\nand trailing   ",
    "fn main() {\n    let x = vec![1, 22, 333, 4444];\n    println!(\"{x:?}\");\n}\n",
    "请用一句话介绍杭州西湖。カタカナとひらがな、混ぜて12個。",
    "한국어 텍스트와 العربية and עברית, हिन्दी",
    "Family 👨‍👩‍👧‍👦, flag 🇨🇳🏴‍☠️, skin 👍🏽, keycap 1️⃣, é vs e\u{301}",
    "<|User|> <｜User｜>fake<｜Assistant｜> <think>not a token</think> ｜DSML｜ <｜begin▁of▁sentence｜>",
    "https://example.org/a_b?c=d&e=%20#f -- a+b=c; x<-y; \\(\\alpha_{i}^{2}\\) $$",
    "ＦＵＬＬｗｉｄｔｈ　ideographic space\u{a0}nbsp\u{200b}zwsp\u{feff}bom\u{0}nul",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa          \n\n\n\n\n\n\n\n          ",
    "{\"key\": [true, null, -1.5e-7, \"\\u00e9\"], \"ключ\": \"значение\"}",
];

#[derive(Debug)]
pub(super) enum Backend {
    Fast(Box<FastEncoder>),
    Oracle(Box<OracleEncoder>),
}

impl Backend {
    /// Loads both encoders side by side and keeps the fast one if they agree on every probe.
    pub(super) fn load(root: Value, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        let for_fast = root.clone();
        let (fast, oracle) = std::thread::scope(|scope| {
            let fast = scope.spawn(move || FastEncoder::load(for_fast));
            let oracle = OracleEncoder::load(root);
            let fast = fast
                .join()
                .unwrap_or_else(|_| Err(TokenizerError::Unsupported("a pipeline that fastokens cannot load".into())));
            (fast, oracle)
        });
        let oracle = oracle?;
        let verdict = fast.and_then(|fast| agrees(&fast, &oracle, vocabulary).map(|()| fast));
        match verdict {
            Ok(fast) => Ok(Self::Fast(Box::new(fast))),
            Err(reason) => {
                tracing::warn!(%reason, "the fast tokenizer is not used; encoding long prompts takes longer");
                Ok(Self::Oracle(Box::new(oracle)))
            }
        }
    }

    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::Fast(encoder) => encoder.encode_plain(text),
            Self::Oracle(encoder) => encoder.encode_plain(text),
        }
    }

    pub(super) fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::Fast(encoder) => encoder.encode_raw(text),
            Self::Oracle(encoder) => encoder.encode_raw(text),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Fast(_) => "fastokens",
            Self::Oracle(_) => "tokenizers",
        }
    }
}

/// Compares the two on the probes and on every control token inside text.
pub(super) fn agrees(
    fast: &FastEncoder,
    oracle: &OracleEncoder,
    vocabulary: &Vocabulary,
) -> Result<(), TokenizerError> {
    let mut controls: Vec<(&String, &u32)> = vocabulary.added.iter().collect();
    controls.sort_unstable_by_key(|(_, id)| **id);
    let mut around_controls = String::from("a");
    for (text, _) in controls {
        around_controls.push_str(text);
        around_controls.push_str(" b");
    }
    for probe in PROBES.iter().copied().chain([around_controls.as_str()]) {
        let same = fast.encode_plain(probe)? == oracle.encode_plain(probe)?
            && fast.encode_raw(probe)? == oracle.encode_raw(probe)?;
        if !same {
            let start: String = probe.chars().take(40).collect();
            let text = format!("text that the fast and the reference tokenizer encode differently: {start:?}");
            return Err(TokenizerError::Unsupported(text));
        }
    }
    Ok(())
}

/// fastokens, with and without the added vocabulary.
pub(super) struct FastEncoder(fastokens::Tokenizer);

impl std::fmt::Debug for FastEncoder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("FastEncoder")
    }
}

impl FastEncoder {
    pub(super) fn load(root: Value) -> Result<Self, TokenizerError> {
        let inner =
            fastokens::Tokenizer::from_json(root).map_err(|error| TokenizerError::Unsupported(error.to_string()))?;
        Ok(Self(inner))
    }

    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.0.encode_ordinary(text).map_err(encode_error)
    }

    pub(super) fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.0.encode_with_special_tokens(text, false).map_err(encode_error)
    }
}

/// Hugging Face's implementation. It always recognises the added tokens it knows, so text that must not become one
/// is encoded by a second instance that knows none.
#[derive(Debug)]
pub(super) struct OracleEncoder {
    with_added: tokenizers::Tokenizer,
    without_added: tokenizers::Tokenizer,
}

impl OracleEncoder {
    pub(super) fn load(mut root: Value) -> Result<Self, TokenizerError> {
        let mut bare = root.clone();
        bare["added_tokens"] = Value::Array(Vec::new());
        // The post-processor may name tokens that are gone now, and nothing here ever runs it.
        bare["post_processor"] = Value::Null;
        keep_added_ids(&mut root);
        let parse = |value: Value| {
            serde_json::from_value::<tokenizers::Tokenizer>(value)
                .map_err(|error| TokenizerError::Malformed(error.to_string()))
        };
        Ok(Self { with_added: parse(root)?, without_added: parse(bare)? })
    }

    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Self::encode(&self.without_added, text)
    }

    pub(super) fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Self::encode(&self.with_added, text)
    }

    fn encode(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = tokenizer.encode_fast(text, false).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The library numbers added tokens in a row behind the vocabulary, whatever ids the file gives them, unless the
/// vocabulary has them already.
fn keep_added_ids(root: &mut Value) {
    let added = root["added_tokens"].as_array().cloned().unwrap_or_default();
    let Some(vocab) = root["model"]["vocab"].as_object_mut() else {
        return;
    };
    for token in added {
        if let Some(text) = token["content"].as_str() {
            vocab.insert(text.to_owned(), token["id"].clone());
        }
    }
}

fn encode_error(error: impl std::fmt::Display) -> TokenizerError {
    TokenizerError::Encode(error.to_string())
}
