//! What an output adds to an answer: reasoning, then content, then tool calls, each only ever appended to.

/// Text and calls that became certain, to be sent in this order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Delta {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<CallDelta>,
}

/// What is new of one call.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CallDelta {
    /// Counts the calls of the answer from 0.
    pub index: u32,
    /// The function; present where the call begins.
    pub name: Option<String>,
    /// More of the arguments' text.
    pub arguments: String,
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.content.is_empty() && self.calls.is_empty()
    }

    /// Empties everything and keeps the texts' memory.
    pub fn clear(&mut self) {
        self.reasoning.clear();
        self.content.clear();
        self.calls.clear();
    }

    /// Begins the call `index`.
    pub(super) fn begin_call(&mut self, index: u32, name: String) {
        self.calls.push(CallDelta { index, name: Some(name), arguments: String::new() });
    }

    /// Where the arguments of call `index`, the newest one, go on.
    pub(super) fn arguments(&mut self, index: u32) -> &mut String {
        if self.calls.last().is_none_or(|call| call.index != index) {
            self.calls.push(CallDelta { index, ..CallDelta::default() });
        }
        let last = self.calls.len() - 1;
        &mut self.calls[last].arguments
    }

    /// Appends what another delta says about a call.
    pub(super) fn append_call(&mut self, call: CallDelta) {
        match self.calls.last_mut() {
            Some(last) if last.index == call.index => last.arguments.push_str(&call.arguments),
            _ => self.calls.push(call),
        }
    }
}
