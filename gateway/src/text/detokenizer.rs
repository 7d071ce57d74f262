//! Turns the bytes of successive tokens into valid UTF-8, never showing half a character.
//!
//! A byte-level token may end inside a character. The bytes of an unfinished character wait here until the next
//! token completes them, proves them wrong, or the output ends. The concatenation of everything emitted equals
//! `String::from_utf8_lossy` of the concatenated bytes, whatever the boundaries between pushes.

/// Longest unfinished UTF-8 sequence: three bytes of a four-byte character.
const MAX_PENDING: usize = 3;

/// The state of one output: at most three bytes.
#[derive(Debug, Default, Clone)]
pub struct Detokenizer {
    pending: [u8; MAX_PENDING + 1],
    pending_len: usize,
}

impl Detokenizer {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends to `out` whatever `bytes` complete. Time is linear in `bytes`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut rest = bytes;
        while self.pending_len > 0 {
            let Some((&byte, tail)) = rest.split_first() else {
                return;
            };
            rest = tail;
            self.pending[self.pending_len] = byte;
            self.pending_len += 1;
            self.settle_pending(out);
        }
        self.push_fresh(rest, out);
    }

    /// Ends the output: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.pending_len > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending_len = 0;
        }
    }

    /// Decodes the pending bytes as far as their meaning is certain.
    fn settle_pending(&mut self, out: &mut String) {
        let buffer = self.pending;
        let len = self.pending_len;
        self.pending_len = 0;
        self.push_fresh(&buffer[..len], out);
    }

    /// Decodes `bytes` when nothing is pending; an unfinished tail becomes pending.
    fn push_fresh(&mut self, bytes: &[u8], out: &mut String) {
        let mut rest = bytes;
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    // The prefix was just validated, so the lossy view borrows it unchanged.
                    out.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad_len) = error.error_len() else {
                        self.pending[..bad.len()].copy_from_slice(bad);
                        self.pending_len = bad.len();
                        return;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[bad_len..];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Detokenizer;
    use proptest::prelude::*;

    fn run<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut detokenizer = Detokenizer::new();
        let mut out = String::new();
        for chunk in chunks {
            detokenizer.push(chunk, &mut out);
        }
        detokenizer.finish(&mut out);
        out
    }

    #[test]
    fn a_character_appears_only_when_its_last_byte_arrives() {
        let mut detokenizer = Detokenizer::new();
        let mut out = String::new();
        for byte in "鯨".bytes().take(2) {
            detokenizer.push(&[byte], &mut out);
            assert_eq!(out, "");
        }
        detokenizer.push(&"鯨!".as_bytes()[2..], &mut out);
        assert_eq!(out, "鯨!");
    }

    #[test]
    fn an_unfinished_end_is_one_replacement_character() {
        for len in 1..4 {
            assert_eq!(run([&"🐳".as_bytes()[..len]]), "\u{FFFD}", "{len} bytes");
        }
        assert_eq!(run([]), "");
    }

    #[test]
    fn a_broken_sequence_does_not_swallow_what_follows() {
        assert_eq!(run([&b"\xF0\x9F"[..], b"a", b"\xE9"]), "\u{FFFD}a\u{FFFD}");
        assert_eq!(run([&b"\xED"[..], b"\xA0\x80"]), "\u{FFFD}\u{FFFD}\u{FFFD}");
    }

    /// Bytes that are mostly pieces of real characters, so that unfinished and broken sequences are frequent.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<u8>().prop_map(|byte| vec![byte]),
            "\\PC".prop_map(String::into_bytes),
            ("\\PC", 1usize..4).prop_map(|(text, len)| text.into_bytes().into_iter().take(len).collect()),
            Just("🐳".as_bytes().to_vec()),
            Just(b"\xED\xA0".to_vec()),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn equals_the_lossy_decoding_of_the_whole(bytes in bytes(), cuts in prop::collection::vec(1usize..6, 0..64)) {
            let mut rest = &bytes[..];
            let mut chunks = Vec::new();
            for cut in cuts {
                let (chunk, tail) = rest.split_at(cut.min(rest.len()));
                chunks.push(chunk);
                rest = tail;
            }
            chunks.push(rest);
            prop_assert_eq!(run(chunks), String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
