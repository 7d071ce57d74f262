//! The rows of `constraints.jsonl`: what a request asks for, and the tag that it becomes. That a tag admits the outputs
//! it should, and no others, is tested with xgrammar itself, on the same rows.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;

use serde_json::{Value, json};

use super::Constraint;
use crate::chat::dialect::Dialect;
use crate::chat::style::Style;
use crate::openai::chat::ChatRequest;
use crate::openai::{InvalidRequest, Limits, ModelFacts};
use crate::text::tokenizer::Tokenizer;

fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/constraints.jsonl")
}

fn micro() -> Tokenizer {
    let json = std::fs::read(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/micro/tokenizer.json")).unwrap();
    Tokenizer::from_json(&json, 1 << 12).unwrap()
}

fn compile(request: &Value, dialect: Dialect, tokenizer: &Tokenizer) -> Result<Option<Constraint>, InvalidRequest> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(request.as_object().unwrap().clone());
    let style = Style { dialect, ..Style::V32 };
    let model = ModelFacts { vocab_size: 1000, context_len: 4096, style };
    let spec = ChatRequest::parse(body.to_string().as_bytes())?.validate(&Limits::load().unwrap(), &model)?;
    Ok(spec.rule.compile(dialect, tokenizer)?)
}

#[test]
fn requests_become_the_tags_on_record() {
    let tokenizer = micro();
    let rows = std::fs::read_to_string(data()).unwrap();
    let mut renewed = String::new();
    for line in rows.lines() {
        let mut row: Value = serde_json::from_str(line).unwrap();
        let dialect = match row["dialect"].as_str().unwrap() {
            "v31" => Dialect::V31,
            "v3" => Dialect::V3,
            _ => Dialect::V32,
        };
        let constraint = compile(&row["request"], dialect, &tokenizer).unwrap().unwrap();
        assert_eq!(constraint.ability(), "structural_tag");
        let tag: Value = serde_json::from_str(constraint.text()).unwrap();
        if std::env::var_os("BALEEN_RENEW").is_some() {
            row["tag"] = tag;
        } else {
            assert_eq!(tag, row["tag"], "{}: set BALEEN_RENEW=1 to renew the record", row["name"]);
        }
        renewed.push_str(&row.to_string());
        renewed.push('\n');
    }
    if std::env::var_os("BALEEN_RENEW").is_some() {
        std::fs::write(data(), renewed).unwrap();
    }
}

#[test]
fn a_rule_on_text_alone_is_passed_on_as_it_is() {
    let tokenizer = micro();
    let compiled = |request: Value| compile(&request, Dialect::V32, &tokenizer).unwrap();
    assert_eq!(compiled(json!({})), None);
    assert_eq!(compiled(json!({"regex": "a+"})), Some(Constraint::Regex("a+".to_owned())));
    let grammar = "root ::= \"a\"";
    assert_eq!(compiled(json!({"ebnf": grammar})), Some(Constraint::Ebnf(grammar.to_owned())));
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    assert_eq!(compiled(json!({"json_schema": schema})), Some(Constraint::JsonSchema(schema.to_string())));
}

#[test]
fn a_strict_function_that_cannot_be_enforced_is_refused_by_name() {
    let tokenizer = micro();
    let refused = |parameters: Value, strict: bool| {
        let function = json!({"name": "f", "parameters": parameters, "strict": strict});
        compile(&json!({"tools": [{"function": function}], "tool_choice": "required"}), Dialect::V32, &tokenizer)
            .err()
            .map(|error| error.param.unwrap())
    };
    for (parameters, param) in [
        (json!({"type": "array"}), "tools[0].function.parameters"),
        (json!({"type": "object", "properties": {"a\"": {}}}), "tools[0].function.parameters"),
        (json!({"anyOf": [{"type": "object"}]}), "tools[0].function.parameters"),
        (json!({"properties": {"a": {"type": "text"}}}), "tools[0].function.parameters.properties.a.type"),
        (json!({"properties": {"a": {"not": {}}}}), "tools[0].function.parameters.properties.a.not"),
    ] {
        assert_eq!(refused(parameters.clone(), true).as_deref(), Some(param), "{parameters}");
        assert_eq!(refused(parameters.clone(), false), None, "without a promise: {parameters}");
    }
}

#[test]
fn a_forced_call_is_held_to_its_schema_without_a_promise_where_that_is_possible() {
    let tokenizer = micro();
    let tag = |parameters: Value, strict: bool, dialect: Dialect| {
        let function = json!({"name": "f", "parameters": parameters, "strict": strict});
        let request = json!({"tools": [{"function": function}], "tool_choice": "required"});
        compile(&request, dialect, &tokenizer).unwrap().unwrap().text().to_owned()
    };
    let sound = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let unsound = json!({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]});
    for dialect in [Dialect::V32, Dialect::V31, Dialect::V3] {
        let free = tag(Value::Null, false, dialect);
        assert_eq!(tag(sound.clone(), false, dialect), tag(sound.clone(), true, dialect));
        assert_ne!(tag(sound.clone(), false, dialect), free);
        assert_eq!(tag(unsound.clone(), false, dialect), free);
    }
}

/// The tag of a strict function with this one argument.
fn tag_of(argument: &Value, definitions: &Value) -> Result<Value, InvalidRequest> {
    let parameters = json!({"type": "object", "properties": {"a": argument}, "$defs": definitions});
    let tools = json!([{"function": {"name": "f", "parameters": parameters, "strict": true}}]);
    let constraint = compile(&json!({ "tools": tools }), Dialect::V32, &micro())?.unwrap();
    Ok(serde_json::from_str(constraint.text()).unwrap())
}

#[test]
fn properties_may_have_the_names_of_keywords() {
    let properties =
        json!({"definitions": {"type": "string"}, "$ref": {"type": "null"}, "enum": {"$ref": "#/$defs/n"}});
    let argument = json!({"type": "object", "properties": properties});
    let tag = tag_of(&argument, &json!({"n": {"type": "integer"}})).unwrap().to_string();
    for part in [
        r##""definitions":{"type":"string"}"##,
        r##""$ref":{"type":"null"}"##,
        r##""enum":{"$ref":"#/$defs/d0"}"##,
        r##""$defs":{"d0":{"type":"integer"}}"##,
    ] {
        assert!(tag.contains(part), "{part} in {tag}");
    }
}

#[test]
fn references_have_an_end() {
    let references = |number: usize| {
        let named = |place: usize| (format!("p{place}"), json!({"$ref": format!("#/$defs/d{place}")}));
        let definitions = (0..number).map(|place| (format!("d{place}"), json!({"type": "integer"})));
        let argument = json!({"type": "object", "properties": Value::Object((0..number).map(named).collect())});
        tag_of(&argument, &Value::Object(definitions.collect()))
    };
    assert!(references(256).is_ok());
    assert_eq!(references(257).unwrap_err().param.as_deref(), Some("tools[0].function.parameters"));
}

#[test]
fn strings_are_written_without_quotes_where_their_format_is_known() {
    let forms = |format: &str| {
        let tag = tag_of(&json!({"type": "string", "format": format}), &json!({})).unwrap().to_string();
        (tag.contains(r#"string=\"true\""#), tag.contains(r#"string=\"false\""#))
    };
    assert_eq!(forms("date"), (true, false));
    assert_eq!(forms("uri"), (false, true), "xgrammar's form of it is quoted JSON");
    assert_eq!(forms("a remark"), (true, false));
}

#[test]
fn schemas_that_branch_without_end_stay_small() {
    // Every definition doubles those it refers to.
    let mut definitions = serde_json::Map::new();
    for depth in 0..30 {
        let next = json!({"$ref": format!("#/$defs/d{}", depth + 1)});
        definitions.insert(format!("d{depth}"), json!({"anyOf": [next, next]}));
    }
    definitions.insert("d30".to_owned(), json!({"type": "string"}));
    let parameters = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    let tools = json!([{"function": {"name": "f", "parameters": parameters, "strict": true}}]);
    let constraint = compile(&json!({ "tools": tools }), Dialect::V32, &micro()).unwrap().unwrap();
    assert!(constraint.text().len() < 65_536, "{}", constraint.text().len());
}
