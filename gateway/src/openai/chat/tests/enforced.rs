//! Requests whose answer the worker has to enforce: what is asked for, and what is refused.

use serde_json::{Value, json};

use super::{MODEL, refused, submit, with};
use crate::chat::constraint::{CallRule, ContentRule};
use crate::chat::style::{Style, Thinking};
use crate::openai::chat::ChatRequest;
use crate::openai::facts::ModelFacts;
use crate::openai::limits::Limits;

fn content(fields: Value) -> ContentRule {
    let rule = with(fields.clone()).unwrap().rule;
    assert_eq!(rule.calls, None);
    assert!(fields.get(&rule.field).is_some(), "{} is named", rule.field);
    rule.content.unwrap()
}

fn calls(fields: Value) -> Option<CallRule> {
    with(fields).unwrap().rule.calls
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "parameters": schema, "strict": true}},
    ])
}

#[test]
fn every_spelling_of_a_rule_on_text_is_read() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let any_object = ContentRule::Schema(json!({"type": "object"}));
    assert_eq!(content(json!({"response_format": {"type": "json_object"}})), any_object);
    assert_eq!(content(json!({"response_format": {"type": "json_schema", "json_schema": {}}})), any_object);
    assert_eq!(content(json!({"structured_outputs": {"json_object": true}})), any_object);
    for fields in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}}}),
        json!({"json_schema": schema.to_string()}),
        json!({"json_schema": schema}),
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        assert_eq!(content(fields), ContentRule::Schema(schema.clone()));
    }
    for fields in
        [json!({"regex": "a+"}), json!({"guided_regex": "a+"}), json!({"structured_outputs": {"regex": "a+"}})]
    {
        assert_eq!(content(fields), ContentRule::Regex("a+".to_owned()));
    }
    let grammar = "root ::= \"a\"";
    for fields in [json!({"ebnf": grammar}), json!({"guided_grammar": grammar})] {
        assert_eq!(content(fields), ContentRule::Ebnf(grammar.to_owned()));
    }
    let choice = ContentRule::Choice(vec!["yes".to_owned(), "no".to_owned()]);
    assert_eq!(content(json!({"guided_choice": ["yes", "no"]})), choice);
    let format = json!({"type": "const_string", "value": "x"});
    for fields in [
        json!({"structural_tag": {"type": "structural_tag", "format": format}}),
        json!({"structural_tag": json!({"format": format}).to_string()}),
        json!({"response_format": {"type": "structural_tag", "format": format}}),
    ] {
        assert_eq!(content(fields), ContentRule::Tag(format.clone()));
    }
    let structures = json!([{"begin": "<a>", "schema": schema, "end": "</a>"}]);
    let older = json!({"response_format": {"type": "structural_tag", "structures": structures, "triggers": ["<a"]}});
    let tags = json!([{"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}]);
    let tag = json!({"type": "triggered_tags", "triggers": ["<a"], "tags": tags});
    assert_eq!(content(older), ContentRule::Tag(tag));
    assert_eq!(with(json!({"response_format": {"type": "text"}})).unwrap().rule.content, None);
}

#[test]
fn rules_that_are_wrong_are_refused_by_name() {
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}});
    for (fields, param) in [
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}),
            "response_format.json_schema.name",
        ),
        (schema(json!([])), "response_format.json_schema.schema"),
        (schema(json!({"type": "text"})), "response_format.json_schema.schema.type"),
        (schema(json!({"$ref": "https://example.org/s"})), "response_format.json_schema.schema.$ref"),
        (json!({"json_schema": "{"}), "json_schema"),
        (json!({"json_schema": "{\"a\": 1, \"a\": 2}"}), "json_schema"),
        (json!({"guided_json": {"enum": []}}), "guided_json.enum"),
        (json!({"regex": ""}), "regex"),
        (json!({"regex": "x".repeat(65_537)}), "regex"),
        (json!({"regex": "a\0b"}), "regex"),
        (json!({"guided_json": {"description": "x".repeat(65_537)}}), "guided_json"),
        (json!({"guided_choice": vec!["a"; 1025]}), "guided_choice"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"strict": true, "schema": {"not": {}}}}}),
            "response_format.json_schema.schema.not",
        ),
        (json!({"ebnf": "start ::= \"a\""}), "ebnf"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": [""]}), "guided_choice"),
        (json!({"structural_tag": {}}), "structural_tag"),
        (json!({"structural_tag": {"format": {"type": "nothing"}}}), "structural_tag.format.type"),
        (json!({"structural_tag": {"format": {"type": "or", "elements": []}}}), "structural_tag.format.elements"),
        (
            json!({"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}}),
            "structural_tag.structures[0].begin",
        ),
        (json!({"regex": "a", "ebnf": "root ::= \"a\""}), "ebnf"),
        (json!({"response_format": {"type": "json_object"}, "guided_json": {}}), "guided_json"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs"),
        (
            json!({"tools": tools(), "tool_choice": "required", "response_format": {"type": "json_object"}}),
            "response_format",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice.function.name",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
    ] {
        refused(with(fields), 400, param);
    }
    assert!(with(schema(json!({"not": {}}))).is_ok(), "without 'strict' nothing is promised");
}

#[test]
fn choices_of_tools_become_rules_on_calls() {
    let auto = calls(json!({"tools": tools()})).unwrap();
    assert_eq!((auto.required, auto.single, auto.functions.len()), (false, false, 2));
    assert_eq!((auto.functions[0].strict, auto.functions[1].strict), (false, true));
    let required = calls(json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false})).unwrap();
    assert_eq!((required.required, required.single, required.functions.len()), (true, true, 2));
    let named = json!({"type": "function", "function": {"name": "g"}});
    let spec = with(json!({"tools": tools(), "tool_choice": named})).unwrap();
    assert_eq!(spec.encode.leading_tools, vec![tools()[1]["function"].clone()], "only what may be called is shown");
    let rule = spec.rule.calls.unwrap();
    assert_eq!((rule.required, rule.single, spec.max_tool_calls), (true, true, 1));
    assert_eq!((rule.functions.len(), rule.functions[0].path.as_str()), (1, "tools[1].function"));
    let several = json!({"tools": tools(), "tool_choice": named, "parallel_tool_calls": true});
    assert!(!calls(several).unwrap().single);
    let lax = json!([tools()[0]]);
    assert_eq!(calls(json!({"tools": lax, "parallel_tool_calls": false})), None, "nothing to be enforced");
    assert_eq!(calls(json!({"tools": tools(), "tool_choice": "none"})), None);
}

#[test]
fn models_are_asked_only_for_what_they_can() {
    let model = |style: Style| ModelFacts { style, ..MODEL };
    let as_model = |style: Style, fields: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        ChatRequest::parse(body.to_string().as_bytes())?.validate(&Limits::load().unwrap(), &model(style))
    };
    let speciale = Style { refuses_tools: Some("it cannot call"), ..Style::V32 };
    refused(as_model(speciale, json!({"tools": tools()})), 400, "tools");
    assert!(as_model(speciale, json!({"tools": tools(), "tool_choice": "none"})).is_ok());
    let always = Style { thinking: Thinking::Always, thinks_by_default: true, ..Style::V32 };
    assert!(as_model(always, json!({})).unwrap().encode.thinking);
    refused(as_model(always, json!({"thinking": {"type": "disabled"}})), 400, "thinking.type");
    let never = Style { thinking: Thinking::Never, ..Style::V32 };
    let param = "chat_template_kwargs.thinking";
    refused(as_model(never, json!({"chat_template_kwargs": {"thinking": true}})), 400, param);
    assert!(!as_model(never, json!({"reasoning_effort": "none"})).unwrap().encode.thinking);
    assert!(submit(r#"{"messages": [{"role": "user", "content": "hi"}]}"#).is_ok());
}
