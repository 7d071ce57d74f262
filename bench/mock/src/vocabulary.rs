//! The tokens that mock servers generate: those of one sentence, again and again.

use std::path::Path;

use anyhow::Context;
use baleen_gateway::text::tokenizer::Tokenizer;

/// Embedding rows to allow for; a tokenizer of this family has fewer.
pub const VOCAB_SIZE: u32 = 1 << 18;
pub const END_OF_SENTENCE: u32 = 1;
const SENTENCE: &str = " The whale swims through the sea and takes from an ocean the little that matters.";

/// Token ids and what each says.
pub struct Vocabulary {
    pub json: Vec<u8>,
    pub tokens: Vec<(u32, String)>,
}

impl Vocabulary {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let json = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let tokenizer = Tokenizer::from_json(&json, VOCAB_SIZE)?;
        let ids = tokenizer.encode_raw(SENTENCE)?;
        let text = |id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
        Ok(Self { tokens: ids.into_iter().map(|id| (id, text(id))).collect(), json })
    }

    /// The token that an answer has at `index`.
    pub fn at(&self, index: u32) -> &(u32, String) {
        &self.tokens[index as usize % self.tokens.len()]
    }
}
