//! Outputs that a careless parser reads wrongly or in quadratic time, at lengths where that shows: however they come,
//! they are read alike. How long that takes is measured in `bench/text_path.py`.

use baleen_gateway::chat::dialect::Dialect;

use crate::fuzz_targets::targets::dsml::{Reader, check};

#[path = "../../benches/text_path/shapes.rs"]
mod shapes;

/// All of two megabytes where there is time for slow tests.
fn num_bytes() -> usize {
    if std::env::var_os("BALEEN_TEST_ALL").is_some() { 2 << 20 } else { 32 << 10 }
}

/// Chunks of `bytes`, rounded up to whole characters.
fn chunks(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = (bytes..rest.len()).find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
        let (chunk, after) = rest.split_at(end);
        rest = after;
        (!chunk.is_empty()).then_some(chunk)
    })
}

#[test]
fn hard_outputs_are_read_alike_however_they_come() {
    for shape in shapes::SHAPES {
        let text = shape.text(num_bytes());
        for (is_thinking, is_cut) in [(false, false), (true, true)] {
            let reader = Reader { dialect: Dialect::V32, is_thinking, is_cut, max_calls: u32::MAX };
            let whole = reader.read([text.as_str()]);
            check(&whole.0, whole.1 as usize, reader);
            for bytes in [1, 4] {
                let read = reader.read(chunks(&text, bytes));
                assert!(read == whole, "{} in chunks of {bytes}, thinking: {is_thinking}, cut: {is_cut}", shape.name);
            }
        }
    }
}
