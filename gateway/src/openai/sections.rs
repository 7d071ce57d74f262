//! An answer as a list of sections: reasoning, text, calls. Dialects whose answers are lists of typed items are
//! written from it.

use crate::chat::delta::Delta;

/// What a section is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Reasoning,
    Text,
    /// A call; its section's text is the arguments.
    Call {
        /// Counts the calls of the answer from 0.
        index: u32,
        name: String,
    },
}

/// A stretch of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub kind: Kind,
    pub text: String,
}

/// What becomes of the section with this place in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    Opened,
    /// It goes on with this text.
    Grew(&'a str),
    Closed,
}

/// Hears of each change, with the section's place.
pub type Report<'a> = dyn FnMut(usize, &Section, Change<'_>) + 'a;

/// The sections so far. The last one is open until another is opened or the answer ends.
#[derive(Debug, Default)]
pub struct Sections {
    list: Vec<Section>,
    is_open: bool,
}

impl Sections {
    /// The sections in order.
    pub fn list(&self) -> &[Section] {
        &self.list
    }

    /// Appends what is new and reports every change with the section's place.
    pub fn push(&mut self, delta: &Delta, report: &mut Report<'_>) {
        if !delta.reasoning.is_empty() {
            self.grow(&Kind::Reasoning, &delta.reasoning, report);
        }
        if !delta.content.is_empty() {
            self.grow(&Kind::Text, &delta.content, report);
        }
        for call in &delta.calls {
            if let Some(name) = &call.name {
                self.open(Kind::Call { index: call.index, name: name.clone() }, report);
            }
            if !call.arguments.is_empty() {
                self.append(&call.arguments, report);
            }
        }
    }

    /// Closes the section that is open.
    pub fn close(&mut self, report: &mut Report<'_>) {
        if let Some(section) = self.list.last().filter(|_| self.is_open) {
            report(self.list.len() - 1, section, Change::Closed);
        }
        self.is_open = false;
    }

    fn grow(&mut self, kind: &Kind, text: &str, report: &mut Report<'_>) {
        if !self.is_open || self.list.last().is_none_or(|last| last.kind != *kind) {
            self.open(kind.clone(), report);
        }
        self.append(text, report);
    }

    fn open(&mut self, kind: Kind, report: &mut Report<'_>) {
        self.close(report);
        self.is_open = true;
        self.list.push(Section { kind, text: String::new() });
        report(self.list.len() - 1, &self.list[self.list.len() - 1], Change::Opened);
    }

    fn append(&mut self, text: &str, report: &mut Report<'_>) {
        let Some(place) = self.list.len().checked_sub(1) else { return };
        self.list[place].text.push_str(text);
        report(place, &self.list[place], Change::Grew(text));
    }
}

#[cfg(test)]
mod tests {
    use super::{Change, Delta, Kind, Sections};
    use crate::chat::delta::CallDelta;

    fn call(index: u32, name: Option<&str>, arguments: &str) -> CallDelta {
        CallDelta { index, name: name.map(str::to_owned), arguments: arguments.to_owned() }
    }

    #[test]
    fn steps_and_the_whole_give_the_same_sections() {
        let steps = [
            Delta { reasoning: "I ".into(), ..Delta::default() },
            Delta { reasoning: "see.".into(), content: "It".into(), calls: Vec::new() },
            Delta { content: " is.".into(), calls: vec![call(0, Some("f"), "{")], ..Delta::default() },
            Delta { calls: vec![call(0, None, "}"), call(1, Some("g"), "{}")], ..Delta::default() },
        ];
        let whole = Delta {
            reasoning: "I see.".into(),
            content: "It is.".into(),
            calls: vec![call(0, Some("f"), "{}"), call(1, Some("g"), "{}")],
        };
        let mut changes = Vec::new();
        let mut note = |place: usize, _: &_, change: Change<'_>| changes.push(format!("{place} {change:?}"));
        let mut sections = Sections::default();
        steps.iter().for_each(|step| sections.push(step, &mut note));
        sections.close(&mut note);
        sections.close(&mut note);
        let mut at_once = Sections::default();
        at_once.push(&whole, &mut |_, _, _| ());
        assert_eq!(sections.list(), at_once.list());
        assert_eq!(sections.list().len(), 4);
        assert_eq!(sections.list()[3].kind, Kind::Call { index: 1, name: "g".into() });
        let expected = [
            "0 Opened",
            "0 Grew(\"I \")",
            "0 Grew(\"see.\")",
            "0 Closed",
            "1 Opened",
            "1 Grew(\"It\")",
            "1 Grew(\" is.\")",
            "1 Closed",
            "2 Opened",
            "2 Grew(\"{\")",
            "2 Grew(\"}\")",
            "2 Closed",
            "3 Opened",
            "3 Grew(\"{}\")",
            "3 Closed",
        ];
        assert_eq!(changes, expected);
    }
}
