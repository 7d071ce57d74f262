//! What was said so far, and the request that goes on from there. Pure.

use serde_json::{Value, json};

use super::client::News;

/// How answers are asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    pub system: Option<String>,
    pub thinks: bool,
    pub max_tokens: Option<u32>,
    pub temperature: Option<f64>,
    /// The request's `tools`.
    pub tools: Option<Value>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Conversation {
    model: String,
    pub settings: Settings,
    messages: Vec<Value>,
    /// How many messages there were before the turn in progress.
    before_turn: usize,
}

/// One answer as far as it came.
#[derive(Debug, Default)]
pub(super) struct Reply {
    content: String,
    reasoning: String,
    pub calls: Vec<Call>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl Reply {
    pub(super) fn add(&mut self, news: News) {
        match news {
            News::Reasoning(text) => self.reasoning.push_str(&text),
            News::Content(text) => self.content.push_str(&text),
            News::Call { id, name, .. } => self.calls.push(Call { id, name, arguments: String::new() }),
            News::Arguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
            News::Finish(_) | News::Usage { .. } => {}
        }
    }
}

impl Conversation {
    pub(super) fn new(model: String, settings: Settings) -> Self {
        Self { model, settings, messages: Vec::new(), before_turn: 0 }
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    pub(super) fn say(&mut self, text: &str) {
        self.before_turn = self.messages.len();
        self.messages.push(json!({"role": "user", "content": text}));
    }

    pub(super) fn reply(&mut self, reply: Reply) {
        let mut message = json!({"role": "assistant", "content": reply.content});
        if !reply.reasoning.is_empty() {
            message["reasoning_content"] = reply.reasoning.into();
        }
        if !reply.calls.is_empty() {
            let calls = reply.calls.into_iter().map(|Call { id, name, arguments }| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        self.messages.push(message);
    }

    /// Keeps what was answered before somebody stopped it; calls that may be cut in two are left out.
    pub(super) fn reply_cut_short(&mut self, reply: Reply) {
        if reply.content.is_empty() {
            self.take_back();
        } else {
            self.reply(Reply { calls: Vec::new(), ..reply });
        }
    }

    /// Adds what a called tool returned.
    pub(super) fn returned(&mut self, call_id: &str, result: &str) {
        self.messages.push(json!({"role": "tool", "tool_call_id": call_id, "content": result}));
    }

    /// Forgets the turn in progress: the message that began it can be said again.
    pub(super) fn take_back(&mut self) {
        self.messages.truncate(self.before_turn);
    }

    pub(super) fn forget(&mut self) {
        self.messages.clear();
        self.before_turn = 0;
    }

    /// The request for the next answer.
    pub(super) fn request(&self) -> Value {
        let Settings { system, thinks, max_tokens, temperature, tools } = &self.settings;
        let system = system.as_ref().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<&Value> = system.iter().chain(&self.messages).collect();
        let mut request = json!({
            "model": self.model,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true},
            "thinking": {"type": if *thinks { "enabled" } else { "disabled" }},
        });
        let options = [
            ("max_tokens", max_tokens.map(Value::from)),
            ("temperature", temperature.map(Value::from)),
            ("tools", tools.clone()),
        ];
        for (name, value) in options {
            if let Some(value) = value {
                request[name] = value;
            }
        }
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(text: &str) -> Reply {
        Reply { content: text.into(), ..Reply::default() }
    }

    fn roles(conversation: &Conversation) -> Vec<String> {
        let request = conversation.request();
        let messages = request["messages"].as_array().cloned().unwrap_or_default();
        messages.iter().map(|message| message["role"].as_str().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn a_request_holds_the_whole_conversation_and_what_was_set() {
        let settings = Settings { system: Some("s".into()), max_tokens: Some(9), thinks: true, ..Settings::default() };
        let mut conversation = Conversation::new("m".into(), settings);
        conversation.say("one");
        conversation.reply(Reply { reasoning: "because".into(), ..content("two") });
        conversation.say("three");
        assert_eq!(roles(&conversation), ["system", "user", "assistant", "user"]);
        let request = conversation.request();
        assert_eq!(request["messages"][2]["reasoning_content"], "because");
        assert_eq!((&request["max_tokens"], &request["thinking"]["type"]), (&json!(9), &json!("enabled")));
        assert!(request.get("temperature").is_none() && request.get("tools").is_none());
    }

    #[test]
    fn calls_are_answered_by_their_ids() {
        let mut conversation = Conversation::new("m".into(), Settings::default());
        conversation.say("weather?");
        let mut reply = Reply::default();
        for (index, name) in ["a", "b"].into_iter().enumerate() {
            reply.add(News::Call { index, id: format!("call_{name}"), name: name.into() });
            reply.add(News::Arguments { index, text: "{".into() });
            reply.add(News::Arguments { index, text: "}".into() });
        }
        assert_eq!(reply.calls[1].arguments, "{}");
        conversation.reply(reply);
        conversation.returned("call_a", "1");
        conversation.returned("call_b", "2");
        assert_eq!(roles(&conversation), ["user", "assistant", "tool", "tool"]);
        let request = conversation.request();
        assert_eq!(request["messages"][1]["tool_calls"][1]["id"], request["messages"][3]["tool_call_id"]);
    }

    #[test]
    fn a_turn_that_failed_leaves_no_trace_and_one_that_was_stopped_its_words() {
        let mut conversation = Conversation::new("m".into(), Settings::default());
        conversation.say("one");
        conversation.reply_cut_short(content("tw"));
        assert_eq!(roles(&conversation), ["user", "assistant"]);
        conversation.say("three");
        conversation.take_back();
        assert_eq!(roles(&conversation), ["user", "assistant"]);
        conversation.say("four");
        conversation.reply_cut_short(Reply { reasoning: "hm".into(), ..Reply::default() });
        assert_eq!(roles(&conversation), ["user", "assistant"]);
    }
}
