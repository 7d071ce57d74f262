//! The rows of a byte-level BPE vocabulary: what bytes each id stands for, and which tokens are added or special.

use std::collections::HashMap;

use serde_json::Value;

use super::TokenizerError;

/// Ids beyond this are not credible; the tables below are dense.
const MAX_VOCAB_SIZE: u32 = 1 << 24;

#[derive(Debug)]
pub(super) struct Vocabulary {
    /// The model's embedding rows.
    pub size: u32,
    /// Ids of added tokens by their text.
    pub added: HashMap<String, u32, foldhash::fast::RandomState>,
    /// Per id, whether the file marks it special.
    special: Box<[bool]>,
    /// Bytes of every token, one after another; token `id` is `starts[id]..starts[id + 1]`.
    arena: Box<[u8]>,
    starts: Box<[u32]>,
}

impl Vocabulary {
    /// Fails when the file is not a byte-level BPE tokenizer or has a row outside the embedding.
    pub(super) fn from_json(root: &Value, vocab_size: u32) -> Result<Self, TokenizerError> {
        check_pipeline(root)?;
        if vocab_size > MAX_VOCAB_SIZE {
            let text = format!("a vocabulary of {vocab_size} rows, more than {MAX_VOCAB_SIZE}");
            return Err(TokenizerError::Unsupported(text));
        }
        let mut rows: Vec<Vec<u8>> = vec![Vec::new(); vocab_size as usize];
        let alphabet = byte_alphabet();
        let vocab = root["model"]["vocab"].as_object().ok_or_else(|| malformed("model.vocab is not an object"))?;
        for (token, id) in vocab {
            let row = row_mut(&mut rows, id, token)?;
            *row = token_bytes(token, &alphabet);
        }

        let mut added = HashMap::default();
        let mut special = vec![false; rows.len()];
        for entry in root["added_tokens"].as_array().unwrap_or(&Vec::new()) {
            let text = entry["content"].as_str().ok_or_else(|| malformed("an added token has no content"))?;
            // An added token stands for its own text: it never went through the byte alphabet.
            *row_mut(&mut rows, &entry["id"], text)? = text.as_bytes().to_vec();
            let Some(id) = as_id(&entry["id"]) else {
                continue;
            };
            added.insert(text.to_owned(), id);
            special[id as usize] = entry["special"].as_bool().unwrap_or(false);
        }

        let mut starts = Vec::with_capacity(rows.len() + 1);
        let mut arena = Vec::new();
        starts.push(0);
        for row in &rows {
            arena.extend_from_slice(row);
            let end = u32::try_from(arena.len()).map_err(|_| malformed("the vocabulary exceeds 4 GiB"))?;
            starts.push(end);
        }
        Ok(Self { size: vocab_size, added, special: special.into(), arena: arena.into(), starts: starts.into() })
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Empty for an id without a row.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.arena[start as usize..end as usize],
            _ => &[],
        }
    }
}

fn malformed(text: impl Into<String>) -> TokenizerError {
    TokenizerError::Malformed(text.into())
}

/// Refuses what the byte tables cannot represent: another model than BPE, another decoder than byte-level.
fn check_pipeline(root: &Value) -> Result<(), TokenizerError> {
    // A file without a type predates the field; it is BPE when it has merges.
    let model = &root["model"];
    let is_bpe = match model["type"].as_str() {
        Some(name) => name == "BPE",
        None => model["merges"].is_array(),
    };
    if !is_bpe {
        return Err(TokenizerError::Unsupported(format!("a model of type {}", model["type"])));
    }
    let is_byte_level = |decoder: &Value| decoder["type"].as_str() == Some("ByteLevel");
    let decoder = &root["decoder"];
    let nested = decoder["decoders"].as_array();
    if is_byte_level(decoder) || nested.is_some_and(|decoders| decoders.iter().all(is_byte_level)) {
        return Ok(());
    }
    Err(TokenizerError::Unsupported(format!("a decoder of type {}", decoder["type"])))
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn row_mut<'a>(rows: &'a mut [Vec<u8>], id: &Value, token: &str) -> Result<&'a mut Vec<u8>, TokenizerError> {
    let rows_len = rows.len();
    as_id(id)
        .and_then(|id| rows.get_mut(id as usize))
        .ok_or_else(|| malformed(format!("token `{token}` has id {id}, but the model has {rows_len} embedding rows")))
}

/// Undoes the byte alphabet; a token with a character outside it stands for its own text.
fn token_bytes(token: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(|letter| alphabet.get(&letter).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes for U+0100 and following.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut substitutes = (0x100u32..).filter_map(char::from_u32);
    let mut alphabet = HashMap::with_capacity(256);
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let letter = if printable { Some(char::from(byte)) } else { substitutes.next() };
        alphabet.extend(letter.map(|letter| (letter, byte)));
    }
    alphabet
}

#[cfg(test)]
mod tests {
    use super::byte_alphabet;

    #[test]
    fn the_alphabet_equals_the_reference_one() {
        let reference = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let ours = byte_alphabet();
        assert_eq!(ours.len(), 256);
        assert!(reference.iter().all(|letter| ours.contains_key(letter)));
        assert_eq!(ours[&'Ġ'], b' ');
        assert_eq!(ours[&'Ċ'], b'\n');
    }
}
