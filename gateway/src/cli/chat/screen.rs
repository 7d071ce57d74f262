//! How a conversation looks. What a model writes is shown as text: no control sequence of its reaches the terminal.

use std::borrow::Cow;
use std::io::Write;
use std::time::Duration;

use super::client::News;

const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
const RESET: &str = "\x1b[0m";

/// What was written last, so that the next thing begins on a line of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Nothing,
    Reasoning,
    Content,
    Call,
}

/// See the module.
pub(super) struct Screen<W = std::io::Stdout> {
    out: W,
    /// Somebody watches: notes and reasoning are for them, and not for a pipe.
    is_interactive: bool,
    colour: bool,
    part: Part,
}

impl Screen {
    pub(super) fn new(is_interactive: bool, is_terminal: bool) -> Self {
        let colour = is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { out: std::io::stdout(), is_interactive, colour, part: Part::Nothing }
    }
}

impl<W: Write> Screen<W> {
    /// Shows a piece of an answer.
    pub(super) fn show(&mut self, news: &News) {
        match news {
            News::Reasoning(text) if self.is_interactive => {
                self.begin(Part::Reasoning);
                self.write_styled(DIM, &visible(text));
            }
            News::Content(text) => {
                self.begin(Part::Content);
                self.write(&visible(text));
            }
            News::Call { name, .. } => {
                // Each call has a line of its own.
                self.part = if self.part == Part::Nothing { Part::Nothing } else { Part::Content };
                self.begin(Part::Call);
                self.write(&format!("{} ", visible(name)));
            }
            News::Arguments { text, .. } => self.write(&visible(text)),
            News::Reasoning(_) | News::Finish(_) | News::Usage { .. } => {}
        }
        self.flush();
    }

    /// Puts what comes next on a new line.
    pub(super) fn end_of_answer(&mut self) {
        if self.part != Part::Nothing {
            self.write("\n");
        }
        self.part = Part::Nothing;
        self.flush();
    }

    /// Says how an answer ended and how long it took.
    pub(super) fn summary(&mut self, reason: &str, num_tokens: Option<u32>, elapsed: Duration) {
        let why = match reason {
            "length" => "cut: no more tokens are allowed, ",
            "abort" => "ended by the server's operator, ",
            _ => "",
        };
        let tokens = num_tokens.map(|count| {
            let rate = f64::from(count) / elapsed.as_secs_f64().max(0.001);
            format!("{count} token{} in {:.1} s, {rate:.0}/s", if count == 1 { "" } else { "s" }, elapsed.as_secs_f64())
        });
        self.note(&format!("{why}{}", tokens.unwrap_or_default()));
    }

    /// A remark for the person, if there is one.
    pub(super) fn note(&mut self, text: &str) {
        if self.is_interactive && !text.is_empty() {
            self.write_styled(DIM, &visible(text));
            self.write("\n");
            self.flush();
        }
    }

    /// Something went wrong; goes to standard error.
    pub(super) fn error(&mut self, text: &str) {
        let (red, reset) = if self.colour { (RED, RESET) } else { ("", "") };
        let _ = writeln!(std::io::stderr(), "{red}error: {}{reset}", visible(text));
    }

    fn begin(&mut self, part: Part) {
        let gap = match (self.part, part) {
            (before, now) if before == now => "",
            (Part::Nothing, _) => "",
            (Part::Reasoning, _) => "\n\n",
            _ => "\n",
        };
        self.part = part;
        self.write(gap);
    }

    fn write_styled(&mut self, style: &str, text: &str) {
        // A style that is switched off at once cannot leak into what comes next, however the answer ends.
        if self.colour { self.write(&format!("{style}{text}{RESET}")) } else { self.write(text) }
    }

    /// A reader that is gone is noticed by the next read, if there is one.
    fn write(&mut self, text: &str) {
        let _ = self.out.write_all(text.as_bytes());
    }

    fn flush(&mut self) {
        let _ = self.out.flush();
    }
}

/// `text` with control characters other than line breaks and tabs replaced by their symbols.
fn visible(text: &str) -> Cow<'_, str> {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match u32::from(c) {
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or(char::REPLACEMENT_CHARACTER),
        0x7f => '\u{2421}',
        _ => char::REPLACEMENT_CHARACTER,
    };
    Cow::Owned(text.chars().map(|c| if is_harmful(c) { symbol(c) } else { c }).collect())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn shown(is_interactive: bool, colour: bool, news: &[News]) -> String {
        let mut screen = Screen { out: Vec::new(), is_interactive, colour, part: Part::Nothing };
        news.iter().for_each(|news| screen.show(news));
        screen.end_of_answer();
        String::from_utf8(screen.out).unwrap()
    }

    fn answer() -> Vec<News> {
        vec![
            News::Reasoning("Hm. ".into()),
            News::Reasoning("Yes.".into()),
            News::Content("The ".into()),
            News::Content("sea.".into()),
            News::Call { index: 0, id: "x".into(), name: "look".into() },
            News::Arguments { index: 0, text: "{}".into() },
            News::Call { index: 1, id: "y".into(), name: "swim".into() },
            News::Arguments { index: 1, text: "{\"m\": 3}".into() },
        ]
    }

    #[test]
    fn reasoning_is_dim_and_parts_stand_apart() {
        let expected = "\x1b[2mHm. \x1b[0m\x1b[2mYes.\x1b[0m\n\nThe sea.\nlook {}\nswim {\"m\": 3}\n";
        assert_eq!(shown(true, true, &answer()), expected);
        assert_eq!(shown(true, false, &answer()), "Hm. Yes.\n\nThe sea.\nlook {}\nswim {\"m\": 3}\n");
    }

    #[test]
    fn a_pipe_gets_the_answer_and_nothing_else() {
        assert_eq!(shown(false, false, &answer()), "The sea.\nlook {}\nswim {\"m\": 3}\n");
        assert_eq!(shown(false, false, &[]), "");
    }

    #[test]
    fn control_sequences_of_a_model_are_shown_and_not_obeyed() {
        let news = [News::Content("a\x1b]0;title\x07b\r\tc\n\u{9b}31m\x7f".into())];
        assert_eq!(shown(true, true, &news), "a␛]0;title␇b␍\tc\n\u{fffd}31m␡\n");
    }
}
