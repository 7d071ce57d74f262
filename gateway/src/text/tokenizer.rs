//! The model's tokenizer: text to ids, one id to its bytes, control tokens by their text.
//!
//! fastokens encodes; Hugging Face's `tokenizers` is the oracle. At load both encode the same probe texts, and if a
//! single id differs, or fastokens does not know the file's pipeline, the oracle does the work.

mod backend;
#[cfg(test)]
pub(crate) mod fixture;
mod vocabulary;

use self::backend::Backend;
use self::vocabulary::Vocabulary;

/// Part of a rendered prompt. Only the renderer makes control tokens; `Text` never becomes one, whatever it spells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    Text(String),
    Control(u32),
}

impl Segment {
    /// Bytes of text in it.
    pub fn text_len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Control(_) => 0,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("tokenizer.json cannot be read: {0}")]
    Malformed(String),
    #[error("tokenizer.json describes {0}; a byte-level BPE tokenizer is needed")]
    Unsupported(String),
    #[error("the model's tokenizer has no token `{0}`, which this request needs")]
    MissingControl(String),
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
}

/// Immutable after load; share it in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    backend: Backend,
    vocabulary: Vocabulary,
}

impl Tokenizer {
    /// Reads the bytes of a `tokenizer.json`. `vocab_size` is the number of the model's embedding rows: every id
    /// below it is valid, and one without a row in the file decodes to the empty string. Takes seconds for a large
    /// vocabulary.
    pub fn from_json(json: &[u8], vocab_size: u32) -> Result<Self, TokenizerError> {
        let mut root: serde_json::Value =
            serde_json::from_slice(json).map_err(|error| TokenizerError::Malformed(error.to_string()))?;
        let Some(settings) = root.as_object_mut() else {
            return Err(TokenizerError::Malformed("it is not an object".to_owned()));
        };
        // A prompt is never cut or filled up behind the caller's back.
        for setting in ["truncation", "padding"] {
            settings.insert(setting.to_owned(), serde_json::Value::Null);
        }
        let vocabulary = Vocabulary::from_json(&root, vocab_size)?;
        let backend = Backend::load(root, &vocabulary)?;
        Ok(Self { backend, vocabulary })
    }

    /// Ids of a rendered prompt. Each segment is encoded by itself, so no merge crosses a control token, and no
    /// text becomes one.
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for segment in segments {
            match segment {
                Segment::Control(id) => ids.push(*id),
                Segment::Text(text) => ids.extend(self.encode_text(text)?),
            }
        }
        Ok(ids)
    }

    /// Ids of one segment of text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.backend.encode_plain(text)
    }

    /// Ids of a text as given: control tokens spelled in it are recognised, none is added.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.backend.encode_raw(text)
    }

    /// The id of a control token by its text; the error names it.
    pub fn control_id(&self, text: &str) -> Result<u32, TokenizerError> {
        self.control(text).ok_or_else(|| TokenizerError::MissingControl(text.to_owned()))
    }

    /// The id of a control token by its text, where the model has it.
    pub fn control(&self, text: &str) -> Option<u32> {
        self.vocabulary.added.get(text).copied()
    }

    /// The bytes one token stands for: possibly half a character, empty for an id without a row.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// Whether the file marks the token as special.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    pub fn vocab_size(&self) -> u32 {
        self.vocabulary.size
    }

    /// Which implementation encodes: "fastokens" or "tokenizers".
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }
}

#[cfg(test)]
mod tests;
