//! Messages, tool results and declared tools: what a conversation may hold.

use serde_json::{Value, json};

use super::{call, history, messages, refused, submit, with};
use crate::chat::encode::{Ending, Role};
use crate::openai::error::RejectKind;

#[test]
fn messages_are_required_and_checked() {
    refused(submit("{}"), 400, "messages");
    refused(messages(json!(null)), 400, "messages");
    refused(messages(json!([])), 400, "messages");
    refused(messages(json!([{"content": "x"}])), 400, "messages[0].role");
    refused(messages(json!([{"role": "moderator", "content": "x"}])), 400, "messages[0].role");
    refused(messages(json!([{"role": "User", "content": "x"}])), 400, "messages[0].role");
    refused(messages(json!([{"role": 3, "content": "x"}])), 400, "messages[0].role");
    refused(messages(json!([{"role": "user"}])), 400, "messages[0].content");
    refused(messages(json!([{"role": "user", "content": 3}])), 400, "messages[0].content");
    refused(messages(json!([{"role": "user", "content": {"text": "x"}}])), 400, "messages[0].content");
    refused(messages(json!([{"role": "user", "content": "a"}, 7])), 400, "messages[1]");
    let error = messages(json!([{"role": "function", "content": "x"}])).unwrap_err();
    assert_eq!((error.kind, error.param.as_deref()), (RejectKind::NotImplemented, Some("messages[0].role")));
    assert!(messages(json!([{"role": "developer", "content": "x"}])).is_ok());
}

/// A history with one assistant message of these calls and these results.
#[test]
fn tool_results_follow_the_order_of_their_calls() {
    let none = json!("");
    let calls = json!([call("a", &none), call("b", &none), call("c", &none)]);
    let spec = history(&calls, &[("c", "3"), ("a", "1"), ("b", "2")]).unwrap();
    let results: Vec<&str> = spec.messages[2..].iter().map(|message| message.content.as_str()).collect();
    assert_eq!(results, ["1", "2", "3"]);
    refused(history(&calls, &[("c", "3"), ("a", "1")]), 400, "messages[1].tool_calls");
    refused(history(&calls, &[]), 400, "messages[1].tool_calls");
    refused(history(&calls, &[("c", "3"), ("a", "1"), ("d", "2")]), 400, "messages[4].tool_call_id");
    refused(history(&calls, &[("c", "3"), ("c", "1"), ("b", "2")]), 400, "messages[3].tool_call_id");
    refused(history(&json!([]), &[("a", "1")]), 400, "messages[2].role");
    refused(messages(json!([{"role": "tool", "tool_call_id": "a", "content": "1"}])), 400, "messages[0].role");
    refused(history(&json!([call("a", &none), call("a", &none)]), &[]), 400, "messages[1].tool_calls[1].id");
    let nameless = json!([{"function": {"name": "f", "arguments": ""}}]);
    refused(history(&nameless, &[("a", "1")]), 400, "messages[1].tool_calls[0].id");
    let missing = json!([{"role": "user", "content": "x", "tool_calls": [call("a", &none)]}]);
    refused(messages(missing), 400, "messages[0].tool_calls");
}

#[test]
fn arguments_are_an_object_or_its_text() {
    let read = |arguments: Value| history(&json!([call("a", &arguments)]), &[("a", "1")]);
    let object = |arguments: Value| Value::Object(read(arguments).unwrap().messages[1].tool_calls[0].arguments.clone());
    assert_eq!(object(json!("")), json!({}));
    assert_eq!(object(json!({"q": 1})), json!({"q": 1}));
    assert_eq!(object(json!("{\"k\": 1, \"z\": 2, \"k\": 3}")).to_string(), r#"{"k":3,"z":2}"#);
    for wrong in
        [json!(null), json!(3), json!([]), json!("[]"), json!("{"), json!("NaN"), json!("{\"a\": \"\\ud800\"}")]
    {
        refused(read(wrong), 400, "messages[1].tool_calls[0].function.arguments");
    }
}

#[test]
fn tools_are_checked_and_kept_as_they_were_sent() {
    let function = json!({"parameters": {"type": "object"}, "name": "f-1_x", "strict": false, "extra": [1]});
    let spec = with(json!({"tools": [{"type": "function", "function": function}]})).unwrap();
    assert_eq!((spec.max_tool_calls, &spec.encode.leading_tools), (u32::MAX, &vec![function.clone()]));
    let one = json!({"tools": [{"function": function}], "parallel_tool_calls": false});
    assert_eq!(with(one).unwrap().max_tool_calls, 1);
    let none = with(json!({"tools": [{"function": function}], "tool_choice": "none"})).unwrap();
    assert_eq!((none.max_tool_calls, none.encode.leading_tools), (0, vec![]));
    let tool = |function: Value| with(json!({"tools": [{"type": "function", "function": function}]}));
    for name in ["", "a b", "é", "a.b"] {
        refused(tool(json!({"name": name})), 400, "tools[0].function.name");
    }
    refused(tool(json!({"name": 3})), 400, "tools[0].function.name");
    refused(tool(json!({"name": "f", "parameters": []})), 400, "tools[0].function.parameters");
    refused(tool(json!({"name": "f", "strict": 1})), 400, "tools[0].function.strict");
    refused(with(json!({"tools": [{"type": "web"}]})), 400, "tools[0].type");
    refused(with(json!({"tools": [{"function": function}, {"function": function}]})), 400, "tools[1].function.name");
    refused(with(json!({"tools": {}})), 400, "tools");
}

#[test]
fn content_is_text_parts_or_null() {
    let content = |value: Value| {
        messages(json!([{"role": "user", "content": value}])).map(|spec| spec.messages[0].content.clone())
    };
    assert_eq!(content(json!("a")).unwrap(), "a");
    assert_eq!(content(json!(null)).unwrap(), "");
    assert_eq!(content(json!([])).unwrap(), "");
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "", "cache_control": {}}, {"type": "text", "text": "b"}]);
    assert_eq!(content(parts).unwrap(), "a\n\n\n\nb");
    let image = content(json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]));
    let error = image.unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages[0].content[1]"));
    assert!(error.message.contains("image_url"), "{error}");
    assert_eq!(content(json!([{"type": "text"}])).unwrap_err().param.as_deref(), Some("messages[0].content[0]"));
    assert_eq!(content(json!(["a"])).unwrap_err().param.as_deref(), Some("messages[0].content[0]"));
    let nothing = messages(json!([{"role": "assistant", "reasoning_content": "r"}, {"role": "user", "content": "q"}]));
    assert_eq!(nothing.unwrap().messages[0].content, "");
}

#[test]
fn history_keeps_its_reasoning_under_either_name() {
    let spec = messages(json!([
        {"role": "system", "content": "s", "name": "n"},
        {"role": "assistant", "content": "a", "reasoning_content": "one", "reasoning": "two"},
        {"role": "assistant", "content": "b", "reasoning": "three", "refusal": null},
        {"role": "user", "content": "q"},
    ]));
    let messages = spec.unwrap().messages;
    assert_eq!(messages[0].role, Role::System);
    assert_eq!((messages[1].reasoning.as_str(), messages[2].reasoning.as_str()), ("one", "three"));
}

#[test]
fn only_the_last_assistant_message_may_be_a_prefix() {
    let user = json!({"role": "user", "content": "q"});
    let prefix = json!({"role": "assistant", "content": "a", "prefix": true});
    assert_eq!(messages(json!([user, prefix])).unwrap().encode.ending, Ending::ContinueFinal);
    refused(messages(json!([prefix, user])), 400, "messages[0].prefix");
    refused(messages(json!([{"role": "user", "content": "q", "prefix": true}])), 400, "messages[0].prefix");
    let flagged =
        with(json!({"continue_final_message": true, "messages": [user, {"role": "assistant", "content": "a"}]}));
    assert_eq!(flagged.unwrap().encode.ending, Ending::ContinueFinal);
}
