//! The fast encoder against its oracle, over text of every kind that has told encoders apart.
//!
//! 200,000 tokens in every run, two million where `BALEEN_TEST_ALL` is set, as `make test-all` does.

use std::fmt::Write as _;

use serde_json::Value;

use super::super::backend::{FastEncoder, OracleEncoder};

const MICRO_JSON: &[u8] = include_bytes!("../../../../../models/micro/tokenizer.json");
const NUM_TOKENS: usize = 200_000;
const NUM_TOKENS_OF_ALL: usize = 2_000_000;
/// Characters of one text, about.
const TEXT_LEN: usize = 1500;

/// Numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 32) % u64::from(bound)).unwrap()
    }

    fn one_of<'a>(&mut self, items: &[&'a str]) -> &'a str {
        items[self.below(u32::try_from(items.len()).unwrap()) as usize]
    }

    /// A character of these ranges, each as likely as the others.
    fn char_of(&mut self, ranges: &[(u32, u32)]) -> char {
        loop {
            let (first, last) = ranges[self.below(u32::try_from(ranges.len()).unwrap()) as usize];
            // Surrogates are no characters.
            if let Some(letter) = char::from_u32(first + self.below(last - first + 1)) {
                return letter;
            }
        }
    }
}

type Kind = (&'static str, fn(&mut Numbers, &mut String));

/// Each appends one piece.
const KINDS: &[Kind] = &[
    ("words", |numbers, text| {
        for _ in 0..=numbers.below(12) {
            text.push(numbers.char_of(&[(0x61, 0x7A)]));
        }
        text.push_str(numbers.one_of(&[" ", " ", " ", ", ", ". ", "'s ", "n't ", "\n", "-", "  "]));
    }),
    ("letters of many scripts", |numbers, text| {
        let ranges = [(0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939)];
        for _ in 0..=numbers.below(8) {
            text.push(numbers.char_of(&ranges));
        }
        text.push_str(numbers.one_of(&[" ", "\u{301}", "\u{200D}", ""]));
    }),
    ("CJK", |numbers, text| {
        let ranges = [(0x4E00, 0x9FFF), (0x4E00, 0x9FA5), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x20000, 0x2A6DF)];
        for _ in 0..=numbers.below(20) {
            text.push(numbers.char_of(&ranges));
        }
        text.push_str(numbers.one_of(&["，", "。", "、", "「", "」", "\u{3000}", " ", "12", "a", ""]));
    }),
    ("emoji", |numbers, text| {
        text.push(numbers.char_of(&[(0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0x1F1E6, 0x1F1FF)]));
        text.push_str(numbers.one_of(&["", "\u{FE0F}", "\u{200D}", "\u{1F3FD}", "\u{20E3}", " "]));
    }),
    ("any character", |numbers, text| text.push(numbers.char_of(&[(0, 0x10_FFFF), (0, 0xFFFF), (0, 0x2FF)]))),
    ("digits and signs", |numbers, text| {
        let _ = write!(text, "{}", numbers.below(10u32.pow(1 + numbers.0 as u32 % 9)));
        text.push(numbers.char_of(&[(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x660, 0x669), (0x2150, 0x218F)]));
    }),
    ("code", |numbers, text| {
        let pieces = [
            "fn ", "let ", "    ", "\t", "{\n", "}\n", "();", "->", "::", "// ", "\"", "\\n", "0x", "_id", "== ",
            "\r\n",
        ];
        text.push_str(numbers.one_of(&pieces));
        text.push(numbers.char_of(&[(0x41, 0x5A), (0x61, 0x7A), (0x30, 0x39)]));
    }),
    ("blanks", |numbers, text| {
        let blank = numbers.one_of(&[" ", "\n", "\t", "\r\n", "\u{A0}", "\u{3000}", "\u{2028}", "\u{85}"]);
        text.push_str(&blank.repeat(1 + numbers.below(6) as usize));
        text.push_str(numbers.one_of(&["", "", "x", "7", "鯨"]));
    }),
    ("long runs", |numbers, text| {
        let piece = numbers.one_of(&["a", " ", "\n", "0", "鯨", "🐳", "<", "ab", "\u{301}", "=", "ー", " \n"]);
        text.push_str(&piece.repeat(1 + numbers.below(900) as usize));
    }),
    ("what spells control tokens", |numbers, text| {
        text.push_str(numbers.one_of(&[
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "｜DSML｜",
            "<｜end▁of▁sentence｜>",
            "<|EOT|>",
            "<｜tool▁sep｜>",
            "<｜",
            "｜>",
            "▁",
            " ",
            "a",
        ]));
    }),
];

fn compare(json: &[u8], num_tokens: usize) {
    let root: Value = serde_json::from_slice(json).unwrap();
    let (fast, oracle) = (FastEncoder::load(root.clone()).unwrap(), OracleEncoder::load(root).unwrap());
    let mut numbers = Numbers(0x5DEE_CE66);
    let mut compared = 0;
    // Every kind alone, then pieces of all kinds mixed.
    for round in 0.. {
        for index in 0..=KINDS.len() {
            let mut text = String::new();
            while text.len() < TEXT_LEN {
                let kind = if index < KINDS.len() { index } else { numbers.below(10) as usize };
                KINDS[kind].1(&mut numbers, &mut text);
            }
            let name = KINDS.get(index).map_or("all kinds", |kind| kind.0);
            let expected = oracle.encode_plain(&text).unwrap();
            assert_eq!(fast.encode_plain(&text).unwrap(), expected, "{name}, round {round}: {text:?}");
            assert_eq!(
                fast.encode_raw(&text).unwrap(),
                oracle.encode_raw(&text).unwrap(),
                "{name} with control tokens, round {round}: {text:?}"
            );
            compared += expected.len();
        }
        if compared >= num_tokens {
            return;
        }
    }
}

fn num_tokens() -> usize {
    if std::env::var_os("BALEEN_TEST_ALL").is_some() { NUM_TOKENS_OF_ALL } else { NUM_TOKENS }
}

#[test]
fn the_fast_encoder_equals_the_oracle() {
    compare(MICRO_JSON, num_tokens());
}

#[test]
#[ignore = "needs BALEEN_V32_TOKENIZER=/path/to/tokenizer.json of DeepSeek-V3.2"]
fn the_fast_encoder_equals_the_oracle_with_the_whole_vocabulary() {
    let path = std::env::var_os("BALEEN_V32_TOKENIZER").unwrap();
    compare(&std::fs::read(path).unwrap(), NUM_TOKENS_OF_ALL);
}
