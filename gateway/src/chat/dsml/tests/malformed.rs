//! Every way of breaking the format that engines have been seen to stumble over, and what becomes of each by
//! `docs/adr/0009-malformed-dsml.md`: one row a shape, each read whole, in halves, by characters and by tokens.

use super::properties::fold;
use super::{Answer, Dialect, Run, chars};
use crate::text::tokenizer::fixture::small;

/// Calls as `name {arguments}`, in order.
struct Row {
    shape: &'static str,
    /// `§` stands for the marker.
    output: &'static str,
    thinking: bool,
    is_cut: bool,
    reasoning: &'static str,
    content: &'static str,
    calls: &'static [&'static str],
    /// Calls whose arguments are whole.
    complete: u32,
}

const CHAT: Row = Row {
    shape: "",
    output: "",
    thinking: false,
    is_cut: false,
    reasoning: "",
    content: "",
    calls: &["f {\"a\": \"x\"}"],
    complete: 1,
};
const THINKING: Row = Row { thinking: true, ..CHAT };
const CUT: Row = Row { is_cut: true, complete: 0, ..CHAT };
const PROSE: Row = Row { calls: &[], complete: 0, ..CHAT };

#[rustfmt::skip]
const ROWS: &[Row] = &[
    Row { shape: "no blank line before the block", content: "Hi.",
        output: "Hi.<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "three line ends before the block", content: "Hi.\n",
        output: "Hi.\n\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "a block at the start",
        output: "<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "a block glued to the end of reasoning", reasoning: "Hm.",
        output: "Hm.</think><§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..THINKING },
    Row { shape: "indented tags",
        output: "\n\n  <§function_calls>\n    <§invoke name=\"f\">\n\t<§parameter name=\"a\" string=\"true\">x</§parameter>\n    </§invoke>\n  </§function_calls>", ..CHAT },
    Row { shape: "no line ends",
        output: "<§function_calls><§invoke name=\"f\"><§parameter name=\"a\" string=\"true\">x</§parameter></§invoke></§function_calls>", ..CHAT },
    Row { shape: "carriage returns",
        output: "\n\n<§function_calls>\r\n<§invoke name=\"f\">\r\n<§parameter name=\"a\" string=\"true\">x</§parameter>\r\n</§invoke>\r\n</§function_calls>", ..CHAT },
    Row { shape: "blanks before the ends of tags",
        output: "\n\n<§function_calls >\n<§invoke name=\"f\" >\n<§parameter name=\"a\" string=\"true\" >x</§parameter >\n</§invoke >\n</§function_calls >", ..CHAT },
    Row { shape: "an invoke without a block", content: "Hi.",
        output: "Hi.\n\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>", ..CHAT },
    Row { shape: "a block that is never closed",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n", ..CHAT },
    Row { shape: "an invoke that is never closed",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n", ..CHAT },
    Row { shape: "an invoke closed by its block",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§function_calls>", ..CHAT },
    Row { shape: "a parameter closed by its invoke",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "the wrapper of the next generation",
        output: "\n\n<§tool_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§tool_calls>", ..CHAT },
    Row { shape: "a block in reasoning", reasoning: "Hm.",
        output: "Hm.\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..THINKING },
    Row { shape: "a block in reasoning, which is closed behind it", reasoning: "Hm.",
        output: "Hm.\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls></think>Done.", ..THINKING },
    Row { shape: "reasoning about markup", reasoning: "I write <§function_calls> soon.", content: "Done.",
        output: "I write <§function_calls> soon.</think>Done.", thinking: true, ..PROSE },
    Row { shape: "a parameter without its marker", output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<parameter name=\"a\" string=\"true\">x</parameter>\n</§invoke>\n</§function_calls>", ..PROSE },
    Row { shape: "a parameter that does not say whether it is a string", output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\">x</§parameter>\n</§invoke>\n</§function_calls>", ..PROSE },
    Row { shape: "a broken invoke before a sound one",
        output: "\n\n<§function_calls>\n<§invoke name=\"g\">\n<§parameter name=\"a\">1</§parameter>\n</§invoke>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "an empty name", output: "\n\n<§function_calls>\n<§invoke name=\"\">\n</§invoke>\n</§function_calls>", ..PROSE },
    Row { shape: "no name", output: "\n\n<§function_calls>\n<§invoke>\n</§invoke>\n</§function_calls>", ..PROSE },
    Row { shape: "a JSON object for a body",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n{\"a\": \"x\"}\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "JSON that is no object for a body", output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n[\"a\"]\n</§invoke>\n</§function_calls>", ..PROSE },
    Row { shape: "an invoke that closes itself", calls: &["f {}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\"/>\n</§function_calls>", ..CHAT },
    Row { shape: "no parameters", calls: &["f {}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "invented results behind the block",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>\n\n<function_results>\n<result>1</result>\n</function_results>\n\n", ..CHAT },
    Row { shape: "two blocks with prose between", calls: &["f {\"a\": \"x\"}", "g {}"], complete: 2,
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>\n\nand\n\n<§function_calls>\n<§invoke name=\"g\">\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "an empty block", content: "Hi.", output: "Hi.\n\n<§function_calls>\n</§function_calls>", ..PROSE },
    Row { shape: "a block's end alone", content: "Hi.", output: "Hi.</§function_calls>", ..PROSE },
    Row { shape: "reasoning opened twice", reasoning: "Hm.", content: "Hi.", output: "<think>Hm.</think>Hi.", thinking: true, ..PROSE },
    Row { shape: "reasoning closed twice", reasoning: "Hm.", content: "Hi.</think>Ho.", output: "Hm.</think>Hi.</think>Ho.", thinking: true, ..PROSE },
    Row { shape: "half a tag at the end", content: "Hi.", output: "Hi.\n\n<§function_ca", is_cut: true, ..PROSE },
    Row { shape: "a lone bracket at the end", content: "is 3 <", output: "is 3 <", ..PROSE },
    Row { shape: "half a marker at the end", content: "is <｜DSM", output: "is <｜DSM", ..PROSE },
    Row { shape: "two parameters of one name",
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n<§parameter name=\"a\" string=\"true\">y</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "Python's words for JSON's", calls: &["f {\"a\": \"True\", \"b\": \"None\", \"c\": \"NaN\", \"d\": \"\", \"e\": \"x y\"}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"false\">True</§parameter>\n<§parameter name=\"b\" string=\"false\">None</§parameter>\n<§parameter name=\"c\" string=\"false\">NaN</§parameter>\n<§parameter name=\"d\" string=\"false\"></§parameter>\n<§parameter name=\"e\" string=\"false\">x y</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "values that end in digits, brackets and half a closing tag", calls: &["f {\"a\": \"12\", \"b\": \"1 > 0>\", \"c\": \"</\", \"d\": 12}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">12</§parameter>\n<§parameter name=\"b\" string=\"true\">1 > 0></§parameter>\n<§parameter name=\"c\" string=\"true\"></</§parameter>\n<§parameter name=\"d\" string=\"false\">12</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "white space around a string", calls: &["f {\"a\": \" \\n x \\n\"}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\"> \n x \n</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
    Row { shape: "cut in a string", calls: &["f {\"a\": \"San Fr"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">San Fr", ..CUT },
    Row { shape: "cut in a JSON value", calls: &["f {\"a\": \"x\""],
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n<§parameter name=\"b\" string=\"false\">[1, ", ..CUT },
    Row { shape: "cut behind a call", complete: 1,
        output: "\n\n<§function_calls>\n<§invoke name=\"f\">\n<§parameter name=\"a\" string=\"true\">x</§parameter>\n</§invoke>\n<§invoke name=\"g", ..CUT },
    Row { shape: "cut in reasoning", reasoning: "Still thin", output: "Still thin", thinking: true, is_cut: true, ..PROSE },
    Row { shape: "a name cut at a blank", calls: &["f g {\"a b\": \"x\"}"],
        output: "\n\n<§function_calls>\n<§invoke name=\"f g\">\n<§parameter name=\"a b\" string=\"true\">x</§parameter>\n</§invoke>\n</§function_calls>", ..CHAT },
];

fn expected(row: &Row) -> Answer {
    let call = |call: &&str| {
        let at = call.find(" {").unwrap();
        (call[..at].to_owned(), call[at + 1..].to_owned())
    };
    Answer {
        content: row.content.to_owned(),
        reasoning: row.reasoning.replace('§', "｜DSML｜"),
        calls: row.calls.iter().map(call).collect(),
        complete: row.complete,
    }
}

#[test]
fn every_broken_shape_has_its_reading() {
    for row in ROWS {
        let run = Run { dialect: Dialect::V32, thinking: row.thinking, is_cut: row.is_cut };
        let (text, expected) = (row.output.replace('§', "｜DSML｜"), expected(row));
        assert_eq!(run.chunks([text.as_str()]), expected, "{}", row.shape);
        assert_eq!(run.chunks(chars(&text)), expected, "{}, by characters", row.shape);
        for (at, _) in text.char_indices() {
            assert_eq!(run.chunks([&text[..at], &text[at..]]), expected, "{}, cut at {at}", row.shape);
        }
        let ids = small().encode_raw(&text).unwrap();
        assert_eq!(fold(&ids, &[], &run), expected, "{}, by tokens", row.shape);
    }
}
