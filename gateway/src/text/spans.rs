//! Token ids of texts that were tokenized before, so that a follow-up turn tokenizes only what is new in it.
//!
//! A prompt is texts between control tokens, and no merge crosses a control token: the ids of a text depend on that
//! text alone. They are kept by content, not by position, because of V3.2's rule for earlier turns. When a user speaks
//! again, the reasoning before is dropped: that takes out whole texts and exchanges think tokens, and leaves every
//! other text as it was, byte for byte. What is kept by prefix would be lost from the first dropped reasoning on.
//!
//! A hit is confirmed against the whole text, so the result is the same as without the cache, whatever the hash.
//! Requests with different salts share nothing: from how long an answer takes, one tenant could otherwise tell what
//! another has sent.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::tokenizer::{Segment, Tokenizer, TokenizerError};

/// Locks; a power of two.
const NUM_SHARDS: usize = 16;
/// A shorter text is tokenized about as fast as it is found.
const MIN_TEXT_BYTES: usize = 48;
/// What an entry takes besides its text and its ids.
const ENTRY_BYTES: usize = 128;
/// Bytes of text to a token, from below: enough memory for the ids of most prompts.
const TEXT_BYTES_PER_TOKEN: usize = 3;

/// See the module. Shared by all requests to one model.
#[derive(Debug)]
pub struct SpanCache {
    shards: Box<[Mutex<Shard>]>,
    hasher: foldhash::quality::RandomState,
    /// Of one generation of one shard.
    max_generation_bytes: usize,
}

/// The ids of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptIds {
    pub token_ids: Vec<u32>,
    /// Bytes of text whose ids were not known.
    pub tokenized_bytes: usize,
    /// Bytes of text whose ids were.
    pub reused_bytes: usize,
}

#[derive(Debug)]
struct Span {
    salt: Box<str>,
    text: Box<str>,
    ids: Box<[u32]>,
}

type Generation = HashMap<u64, Arc<Span>, foldhash::fast::RandomState>;

/// Two generations instead of an order of use: what is found moves to the young one, and when that is full the old one
/// goes with all that nobody asked for in the meantime.
#[derive(Debug, Default)]
struct Shard {
    young: Generation,
    young_bytes: usize,
    old: Generation,
}

impl SpanCache {
    /// Keeps at most `max_bytes` of texts and ids.
    #[must_use]
    pub fn new(max_bytes: usize) -> Self {
        Self {
            shards: (0..NUM_SHARDS).map(|_| Mutex::default()).collect(),
            hasher: foldhash::quality::RandomState::default(),
            max_generation_bytes: max_bytes / NUM_SHARDS / 2,
        }
    }

    /// The same ids as [`Tokenizer::encode_segments`] gives. One cache serves one tokenizer.
    ///
    /// # Errors
    /// A text cannot be tokenized.
    pub fn encode(&self, tokenizer: &Tokenizer, segments: &[Segment], salt: &str) -> Result<PromptIds, TokenizerError> {
        let text_bytes: usize = segments.iter().map(Segment::text_len).sum();
        let capacity = segments.len() + text_bytes / TEXT_BYTES_PER_TOKEN;
        let mut prompt =
            PromptIds { token_ids: Vec::with_capacity(capacity), tokenized_bytes: text_bytes, reused_bytes: 0 };
        for segment in segments {
            match segment {
                Segment::Control(id) => prompt.token_ids.push(*id),
                Segment::Text(text) if text.len() < MIN_TEXT_BYTES => {
                    prompt.token_ids.extend(tokenizer.encode_text(text)?);
                }
                Segment::Text(text) => {
                    let hash = self.hasher.hash_one((salt, text.as_str()));
                    if let Some(span) = self.find(hash, salt, text) {
                        prompt.token_ids.extend_from_slice(&span.ids);
                        prompt.reused_bytes += text.len();
                        continue;
                    }
                    let ids = tokenizer.encode_text(text)?;
                    prompt.token_ids.extend_from_slice(&ids);
                    self.keep(hash, Span { salt: salt.into(), text: text.as_str().into(), ids: ids.into() });
                }
            }
        }
        prompt.tokenized_bytes -= prompt.reused_bytes;
        Ok(prompt)
    }

    fn find(&self, hash: u64, salt: &str, text: &str) -> Option<Arc<Span>> {
        let span = self.shard(hash).find(hash, self.max_generation_bytes)?;
        // Outside the lock: a text can be long.
        (*span.text == *text && *span.salt == *salt).then_some(span)
    }

    fn keep(&self, hash: u64, span: Span) {
        if span.bytes() <= self.max_generation_bytes {
            let outdated = self.shard(hash).keep(hash, Arc::new(span), self.max_generation_bytes);
            // Outside the lock: there can be many.
            drop(outdated);
        }
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The maps use the low bits.
        let index = (hash >> 32) as usize % NUM_SHARDS;
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Span {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.salt.len() + self.text.len() + size_of_val::<[u32]>(&self.ids)
    }
}

impl Shard {
    fn find(&mut self, hash: u64, max_generation_bytes: usize) -> Option<Arc<Span>> {
        if let Some(span) = self.young.get(&hash) {
            return Some(span.clone());
        }
        let span = self.old.remove(&hash)?;
        drop(self.keep(hash, span.clone(), max_generation_bytes));
        Some(span)
    }

    /// Returns what is kept no longer.
    fn keep(&mut self, hash: u64, span: Arc<Span>, max_generation_bytes: usize) -> Option<Generation> {
        let bytes = span.bytes();
        let is_full = self.young_bytes + bytes > max_generation_bytes;
        let outdated = is_full.then(|| {
            self.young_bytes = 0;
            std::mem::replace(&mut self.old, std::mem::take(&mut self.young))
        });
        self.young_bytes += bytes;
        if let Some(replaced) = self.young.insert(hash, span) {
            self.young_bytes -= replaced.bytes();
        }
        outdated
    }
}

#[cfg(test)]
mod tests;
