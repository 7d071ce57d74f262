//! Outputs that a careless parser reads in quadratic time.

/// An output: `before`, then `repeated` as often as it fits, then `after`.
pub struct Shape {
    pub name: &'static str,
    before: &'static str,
    repeated: &'static str,
    after: &'static str,
}

impl Shape {
    /// About `bytes` of it.
    pub fn text(&self, bytes: usize) -> String {
        let times = bytes.saturating_sub(self.before.len() + self.after.len()) / self.repeated.len();
        [self.before, &self.repeated.repeat(times), self.after].concat()
    }
}

const fn shape(name: &'static str, before: &'static str, repeated: &'static str, after: &'static str) -> Shape {
    Shape { name, before, repeated, after }
}

const VALUE: &str =
    "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">";
const JSON: &str =
    "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">";
const BODY: &str = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n";
const END: &str = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";

pub const SHAPES: &[Shape] = &[
    shape("angle brackets", "", "<", ""),
    shape("closing brackets", "", "</", ""),
    shape("spaces", "a", " ", "<"),
    shape("line ends", "a", "\n", "<"),
    shape("indented lines", "a", "\n  <", ""),
    shape("markers", "", "｜DSML｜", ""),
    shape("opened markers", "", "<｜DSML｜", ""),
    shape("unfinished markers", "", "<｜DSML", ""),
    shape("bars", "", "｜", ""),
    shape("unfinished think tags", "", "</think", ""),
    shape("opened invokes", "", "<｜DSML｜invoke", ""),
    shape("unfinished invokes", "", "<｜DSML｜invok", ""),
    shape("a long tag name", "<｜DSML｜", "invoke", ">"),
    shape("a long attribute", "<｜DSML｜invoke name=\"", "a", "\">"),
    shape("an attribute of quotes", "<｜DSML｜invoke name=\"", "\"", ">"),
    shape("an attribute of tag ends", "<｜DSML｜invoke name=\"", "> ", "\">"),
    shape("an attribute of blanks", "<｜DSML｜invoke name=\"f\"", " ", ">"),
    shape("an attribute of second attributes", "<｜DSML｜invoke name=\"", "\" string", "\">"),
    shape("empty attributes", "<｜DSML｜invoke ", "name=\">", "\">"),
    shape("opened blocks", "", "<｜DSML｜function_calls>\n", ""),
    shape("a block and blanks", "<｜DSML｜function_calls>", " \n", "x"),
    shape("a block's tag and blanks", "<｜DSML｜function_calls", " ", "x"),
    shape("closed blocks", "", "</｜DSML｜function_calls>\n", ""),
    shape("nested invokes", "<｜DSML｜function_calls>\n", "<｜DSML｜invoke name=\"f\">\n", ""),
    shape("empty calls", "<｜DSML｜function_calls>\n", "<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n", ""),
    shape("unclosed parameters", BODY, "<｜DSML｜parameter name=\"a\" string=\"true\">b", ""),
    shape("parameters of one name", BODY, "<｜DSML｜parameter name=\"a\" string=\"true\">b</｜DSML｜parameter>\n", ""),
    shape("stray text", BODY, "a ", "<｜DSML｜parameter name=\"a\" string=\"true\">b</｜DSML｜parameter>\n"),
    shape("stray markers", BODY, "<｜DSML｜x>", ""),
    shape("blanks in a body", BODY, " \n", ""),
    shape("a value", VALUE, "The quick brown whale. ", END),
    shape("a value of quotes and escapes", VALUE, "\"\\\n\t\u{1}é🐳", END),
    shape("a value of brackets", VALUE, "<</", END),
    shape("a value of line ends", VALUE, "\n", END),
    shape("a value of closed invokes", VALUE, "</｜DSML｜invoke>\n", END),
    shape("a value of closed invokes and blanks", VALUE, "</｜DSML｜invoke   >  <", END),
    shape("a value of unclosed ends", VALUE, "</｜DSML｜parameter", ""),
    shape("a value of opened parameters", VALUE, "<｜DSML｜parameter name=\"b\" string=\"true\">", END),
    shape("numbers", JSON, "1", END),
    shape("nested arrays", JSON, "[", END),
    shape("nested objects", JSON, "{\"a\":", END),
    shape("what is no JSON", JSON, "nan, ", END),
];
