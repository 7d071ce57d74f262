//! A client of a stream: adds up what it is sent, and holds the stream to its order.

use super::Delta;

/// What it has of an answer.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Client {
    pub content: String,
    pub reasoning: String,
    /// Names and arguments.
    pub calls: Vec<(String, String)>,
}

impl Client {
    pub fn take(&mut self, delta: &mut Delta) {
        self.content.push_str(&delta.content);
        self.reasoning.push_str(&delta.reasoning);
        for call in &delta.calls {
            if let Some(name) = &call.name {
                assert_eq!(call.index as usize, self.calls.len(), "calls begin in order");
                self.calls.push((name.clone(), String::new()));
            }
            assert_eq!(call.index as usize + 1, self.calls.len(), "only the newest call goes on");
            self.calls.last_mut().unwrap().1.push_str(&call.arguments);
        }
        delta.clear();
    }
}
