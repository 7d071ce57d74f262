//! Text to measure with: this project's own pages and sources, so that it is real and needs no download.

const TEXTS: &[&str] = &[
    include_str!("../../../docs/ARCHITECTURE.md"),
    include_str!("../../src/chat/dsml/text.rs"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../src/generate.rs"),
    include_str!("../../../README.md"),
    include_str!("../../src/openai/chat.rs"),
    include_str!("../../../docs/GLOSSARY.md"),
    "鲸鱼是海洋哺乳动物。须鲸用鲸须板从海水中滤出磷虾和小鱼，一天可以吃下四吨食物。它们的歌声能传到一千公里以外。🐳\n",
];

/// `bytes` of text at most, which begins somewhere else for every `number` and goes round where the texts end.
pub fn text(bytes: usize, number: usize) -> String {
    let all = TEXTS.concat();
    let mut start = number.wrapping_mul(7919) % all.len();
    let mut text = format!("{number}: ");
    while text.len() < bytes {
        while !all.is_char_boundary(start) {
            start += 1;
        }
        text.push_str(&all[start..]);
        start = 0;
    }
    let end = (0..=bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap();
    text.truncate(end);
    text
}
