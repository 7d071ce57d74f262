//! Request bodies of a kind and size. The same numbers give the same bodies.

use rand::{RngExt as _, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

use super::BodyKind;

const SHORT_BYTES: usize = 512;
const LONG_BYTES: usize = 16 * 1024;
/// Turns after which a conversation starts over, so that its length stays what it says.
const NEW_TURNS: usize = 8;
const TURN_BYTES: usize = 120;
const WORDS: [&str; 64] = [
    "whale",
    "ocean",
    "the",
    "of",
    "and",
    "to",
    "in",
    "water",
    "filter",
    "small",
    "current",
    "season",
    "migration",
    "is",
    "that",
    "for",
    "depth",
    "between",
    "krill",
    "plate",
    "baleen",
    "surface",
    "with",
    "as",
    "on",
    "measure",
    "northern",
    "southern",
    "feeding",
    "are",
    "at",
    "from",
    "by",
    "sound",
    "distance",
    "calf",
    "adult",
    "each",
    "year",
    "which",
    "have",
    "ice",
    "edge",
    "bloom",
    "spring",
    "autumn",
    "was",
    "not",
    "this",
    "be",
    "observed",
    "tonnes",
    "about",
    "per",
    "day",
    "ship",
    "were",
    "their",
    "song",
    "frequency",
    "longer",
    "than",
    "other",
    "species",
];

/// What one connection says, request by request.
pub struct Conversation {
    kind: BodyKind,
    random: StdRng,
    tokens: u32,
    stream: bool,
    /// Turns so far of a conversation that goes on.
    turns: Vec<Value>,
    base_turns: usize,
}

impl Conversation {
    pub fn new(kind: BodyKind, number: u64, tokens: u32, stream: bool) -> Self {
        let mut conversation = Self {
            kind,
            random: StdRng::seed_from_u64(super::SEED.wrapping_add(number)),
            tokens,
            stream,
            turns: Vec::new(),
            base_turns: 0,
        };
        if kind == BodyKind::Warm {
            while conversation.turns.len() * TURN_BYTES < LONG_BYTES - NEW_TURNS * TURN_BYTES {
                // The user and the answer.
                conversation.add_turn();
                conversation.add_turn();
            }
            conversation.base_turns = conversation.turns.len();
        }
        conversation
    }

    /// The next request.
    pub fn next_body(&mut self) -> Vec<u8> {
        match self.kind {
            BodyKind::Short => {
                let text = self.text(SHORT_BYTES - 150);
                self.body(&json!([{"role": "user", "content": text}]))
            }
            BodyKind::Cold => {
                let text = self.text(LONG_BYTES - 150);
                self.body(&json!([{"role": "user", "content": text}]))
            }
            BodyKind::Warm => {
                if self.turns.len() >= self.base_turns + 2 * NEW_TURNS {
                    self.turns.truncate(self.base_turns);
                }
                // The last turn of the base was an answer; now the user, and in the next request the answer to it.
                self.add_turn();
                let body = self.body(&Value::Array(self.turns.clone()));
                self.add_turn();
                body
            }
        }
    }

    fn add_turn(&mut self) {
        let role = if self.turns.len().is_multiple_of(2) { "user" } else { "assistant" };
        let content = self.text(TURN_BYTES - 35);
        self.turns.push(json!({"role": role, "content": content}));
    }

    fn body(&self, messages: &Value) -> Vec<u8> {
        json!({"model": "micro", "messages": messages, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": true, "stream": self.stream})
            .to_string()
            .into_bytes()
    }

    fn text(&mut self, num_bytes: usize) -> String {
        let mut text = String::with_capacity(num_bytes + 16);
        while text.len() < num_bytes {
            let word = WORDS[self.random.random_range(0..WORDS.len())];
            // Now and then a number, so that no two texts are alike.
            if self.random.random_range(0..12) == 0 {
                text.push_str(&self.random.random_range(0..100_000).to_string());
            } else {
                text.push_str(word);
            }
            text.push(if self.random.random_range(0..14) == 0 { '\n' } else { ' ' });
        }
        text
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn bodies_have_their_size_and_are_never_the_same() {
        for (kind, bytes) in
            [(BodyKind::Short, SHORT_BYTES), (BodyKind::Cold, LONG_BYTES), (BodyKind::Warm, LONG_BYTES)]
        {
            let mut conversation = Conversation::new(kind, 1, 1, false);
            let bodies: Vec<Vec<u8>> = (0..30).map(|_| conversation.next_body()).collect();
            for (index, body) in bodies.iter().enumerate() {
                let size = body.len() as f64 / bytes as f64;
                assert!((0.8..1.25).contains(&size), "{kind:?}: {}", body.len());
                assert!(!bodies[..index].contains(body));
                let last =
                    serde_json::from_slice::<Value>(body).unwrap()["messages"].as_array().unwrap().last().cloned();
                assert_eq!(last.unwrap()["role"], "user");
            }
        }
    }

    #[test]
    fn a_turn_keeps_what_was_said_before_it() {
        let mut conversation = Conversation::new(BodyKind::Warm, 1, 1, false);
        let messages =
            |body: Vec<u8>| serde_json::from_slice::<Value>(&body).unwrap()["messages"].as_array().unwrap().clone();
        let (first, second) = (messages(conversation.next_body()), messages(conversation.next_body()));
        assert_eq!(second[..first.len()], first[..]);
        assert_eq!(second.len(), first.len() + 2);
    }
}
