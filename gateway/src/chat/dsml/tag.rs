//! What stands inside a tag after its marker: the tag's name, and its attributes as one text.

/// The tags of the markup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TagName {
    /// `function_calls`; the next generation's `tool_calls` means the same.
    Calls,
    Invoke,
    Parameter,
    Other,
}

impl TagName {
    pub(super) fn of(name: &str) -> Self {
        match name {
            "function_calls" | "tool_calls" => Self::Calls,
            "invoke" => Self::Invoke,
            "parameter" => Self::Parameter,
            _ => Self::Other,
        }
    }
}

/// Attributes of an opening tag.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Attributes<'a> {
    pub name: Option<&'a str>,
    /// Whether the value is literal text; absent when the tag does not say.
    pub is_string: Option<bool>,
    /// `/>`: the tag has no body.
    pub is_closed: bool,
}

/// Whether a `>` after `text` ends the tag. Names are not escaped, so only one after a quote does, unless there is
/// no quote at all. Blanks and a slash may stand between.
pub(super) fn ends_tag(text: &str, has_quote: bool) -> bool {
    let text = text.trim_end_matches(is_filler);
    !has_quote || (text.ends_with('"') && !["name=\"", "string=\""].iter().any(|opening| text.ends_with(opening)))
}

fn is_filler(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '/')
}

impl<'a> Attributes<'a> {
    /// Reads the text between the tag's name and its `>`.
    ///
    /// In the form that the model was taught, the name is everything between `name="` and the quote before
    /// `string=` or the end, quotes included. Other orders and single quotes are read as in XML.
    pub(super) fn parse(text: &'a str) -> Self {
        let body = text.trim_matches(is_filler);
        let is_closed = text.trim_end().ends_with('/');
        let taught = body.strip_prefix("name=\"").and_then(|rest| rest.strip_suffix('"'));
        let Some(taught) = taught else {
            return Self { is_closed, ..Self::parse_any(body) };
        };
        match split_string(taught) {
            Some((name, value)) => Self { name: Some(name), is_string: truth(value), is_closed },
            None => Self { name: Some(taught), is_string: None, is_closed },
        }
    }

    fn parse_any(text: &'a str) -> Self {
        let mut attributes = Self::default();
        let mut rest = text;
        while let Some((key, after)) = rest.split_once('=') {
            let after = after.trim_start();
            let Some(quote @ ('"' | '\'')) = after.chars().next() else {
                break;
            };
            let Some((value, after)) = after[1..].split_once(quote) else {
                break;
            };
            match key.trim() {
                "name" => attributes.name = Some(value),
                "string" => attributes.is_string = truth(value),
                _ => {}
            }
            rest = after;
        }
        attributes
    }
}

/// Splits `NAME" string="VALUE` at the first place where it can be split.
fn split_string(text: &str) -> Option<(&str, &str)> {
    let mut from = 0;
    while let Some(offset) = text[from..].find('"') {
        let quote = from + offset;
        let after = &text[quote + 1..];
        let trimmed = after.trim_start();
        if trimmed.len() < after.len()
            && let Some(value) = trimmed.strip_prefix("string").map(str::trim_start)
            && let Some(value) = value.strip_prefix('=').map(str::trim_start)
            && let Some(value) = value.strip_prefix('"')
        {
            return Some((&text[..quote], value));
        }
        from = quote + 1;
    }
    None
}

fn truth(value: &str) -> Option<bool> {
    match value.trim() {
        value if value.eq_ignore_ascii_case("true") => Some(true),
        value if value.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Attributes, ends_tag};

    fn read(text: &str) -> (Option<&str>, Option<bool>, bool) {
        let Attributes { name, is_string, is_closed } = Attributes::parse(text);
        (name, is_string, is_closed)
    }

    #[test]
    fn attributes_are_read_in_the_taught_form_and_its_neighbours() {
        assert_eq!(read(" name=\"city\" string=\"true\""), (Some("city"), Some(true), false));
        assert_eq!(read("  name=\"a\"b\"  string=\"False\" "), (Some("a\"b"), Some(false), false));
        assert_eq!(read(" name=\"\" string=\"true\""), (Some(""), Some(true), false));
        assert_eq!(read(" name=\"f\"/"), (Some("f"), None, true));
        assert_eq!(read(" string=\"true\" name=\"x\""), (Some("x"), Some(true), false));
        assert_eq!(read(" name='x' string='false'"), (Some("x"), Some(false), false));
        assert_eq!(read(" name=\"x\" string=\"maybe\""), (Some("x"), None, false));
        for nothing in ["", " ", " name", " name=", " name=x", " name=\"x", "=\"=\"="] {
            assert_eq!(read(nothing).0, None, "{nothing}");
        }
    }

    #[test]
    fn a_tag_ends_after_a_quote() {
        assert!(ends_tag(" name=\"a\" /", true) && ends_tag(" name", false));
        assert!(!ends_tag(" name=\"a", true) && !ends_tag(" name=\"", true));
    }
}
