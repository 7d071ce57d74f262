//! What a line that begins with a slash asks for.

use super::conversation::Conversation;

const HELP: &str = "\
/new            forget the conversation
/system TEXT    what the model is told before the next conversation; nothing removes it
/think on|off   whether the model reasons before it answers
/help           this list
/quit           leave, as Ctrl-D does
A message that begins with a slash is written with a space before it.";

/// A line that is for this program and not for the model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    New,
    System(String),
    Think(Option<bool>),
    Quit,
    Unknown(String),
}

impl Command {
    /// `None` where the line is a message.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let words = line.trim_end().strip_prefix('/')?;
        let (name, rest) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        let rest = rest.trim();
        Some(match (name, rest) {
            ("help" | "?", _) => Self::Help,
            ("new" | "clear", _) => Self::New,
            ("system", text) => Self::System(text.to_owned()),
            ("think", "on") => Self::Think(Some(true)),
            ("think", "off") => Self::Think(Some(false)),
            ("think", _) => Self::Think(None),
            ("quit" | "exit" | "bye", _) => Self::Quit,
            (other, _) => Self::Unknown(other.to_owned()),
        })
    }

    /// Does it, and says what was done.
    pub(super) fn obey(self, conversation: &mut Conversation) -> String {
        match self {
            Self::Help => HELP.to_owned(),
            Self::New => {
                conversation.forget();
                "a new conversation".to_owned()
            }
            Self::System(text) => {
                conversation.forget();
                let is_removed = text.is_empty();
                conversation.settings.system = (!is_removed).then_some(text);
                format!("a new conversation, {} a system message", if is_removed { "without" } else { "with" })
            }
            Self::Think(None) => {
                format!("reasoning is {}; /think on or /think off", on_or_off(conversation.settings.thinks))
            }
            Self::Think(Some(thinks)) => {
                conversation.settings.thinks = thinks;
                format!("reasoning is {} from now on", on_or_off(thinks))
            }
            Self::Quit => String::new(),
            Self::Unknown(name) => format!("there is no /{name}; /help lists what there is"),
        }
    }
}

fn on_or_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_begin_with_a_slash_and_messages_do_not() {
        for (line, expected) in [
            ("hello", None),
            (" /help", None),
            ("/help", Some(Command::Help)),
            ("/new ", Some(Command::New)),
            ("/system You are  terse.", Some(Command::System("You are  terse.".into()))),
            ("/system", Some(Command::System(String::new()))),
            ("/think on", Some(Command::Think(Some(true)))),
            ("/think off", Some(Command::Think(Some(false)))),
            ("/think hard", Some(Command::Think(None))),
            ("/quit", Some(Command::Quit)),
            ("/etc/passwd", Some(Command::Unknown("etc/passwd".into()))),
        ] {
            assert_eq!(Command::parse(line), expected, "{line}");
        }
    }
}
