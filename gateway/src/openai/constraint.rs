//! Rules on what the text of an answer must look like, in all the spellings that clients use: `response_format` of
//! OpenAI, the fields of SGLang and those of vLLM. A request has at most one.

use serde::Deserialize;
use serde::de::MapAccess;
use serde_json::{Map, Value, json};

use super::error::InvalidRequest;
use super::fields::Object;
use super::limits::RequestLimits;
use super::strict_json;
use crate::chat::constraint::{ContentRule, schema};

/// The kinds of format that a structural tag is made of.
const FORMATS: &[&str] = &[
    "any_text",
    "any_tokens",
    "const_string",
    "dispatch",
    "exclude_token",
    "grammar",
    "json_schema",
    "optional",
    "or",
    "plus",
    "qwen_xml_parameter",
    "regex",
    "repeat",
    "sequence",
    "star",
    "tag",
    "tags_with_separator",
    "token",
    "token_dispatch",
    "token_triggered_tags",
    "triggered_tags",
];
/// Longest name of a schema, as OpenAI has it.
const MAX_NAME_CHARS: usize = 64;

/// A rule and the field that it came by.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldRule {
    pub field: &'static str,
    pub rule: ContentRule,
}

/// The fields as they stand in the request.
#[derive(Debug, Default)]
pub(super) struct ConstraintFields {
    response_format: Option<Map<String, Value>>,
    json_schema: Option<Value>,
    regex: Option<String>,
    ebnf: Option<String>,
    structural_tag: Option<Value>,
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_grammar: Option<String>,
    guided_choice: Option<Vec<String>>,
    structured_outputs: Option<Object<StructuredOutputs>>,
}

/// vLLM's object.
#[derive(Debug, Deserialize)]
struct StructuredOutputs {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    structural_tag: Option<Value>,
}

impl ConstraintFields {
    /// Reads the value if `key` is one of these fields.
    pub(super) fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "response_format" => self.response_format = map.next_value()?,
            "json_schema" => self.json_schema = map.next_value()?,
            "regex" => self.regex = map.next_value()?,
            "ebnf" => self.ebnf = map.next_value()?,
            "structural_tag" => self.structural_tag = map.next_value()?,
            "guided_json" => self.guided_json = map.next_value()?,
            "guided_regex" => self.guided_regex = map.next_value()?,
            "guided_grammar" => self.guided_grammar = map.next_value()?,
            "guided_choice" => self.guided_choice = map.next_value()?,
            "structured_outputs" => self.structured_outputs = map.next_value()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// A field is wrong, or two of them ask for different things.
    pub(super) fn validate(self, limits: &RequestLimits) -> Result<Option<FieldRule>, InvalidRequest> {
        let check = Check { limits };
        let mut rules = Vec::new();
        let mut add = |field, rule: Option<ContentRule>| rules.extend(rule.map(|rule| FieldRule { field, rule }));
        add("response_format", self.response_format.map(|format| check.response_format(format)).transpose()?.flatten());
        add("json_schema", check.json("json_schema", self.json_schema)?);
        add("regex", check.regex("regex", self.regex)?);
        add("ebnf", check.grammar("ebnf", self.ebnf)?);
        add("structural_tag", check.tag("structural_tag", self.structural_tag)?);
        add("guided_json", check.json("guided_json", self.guided_json)?);
        add("guided_regex", check.regex("guided_regex", self.guided_regex)?);
        add("guided_grammar", check.grammar("guided_grammar", self.guided_grammar)?);
        add("guided_choice", check.choice("guided_choice", self.guided_choice)?);
        if let Some(Object(outputs)) = self.structured_outputs {
            let field = "structured_outputs";
            let any_object = outputs.json_object.unwrap_or(false).then(any_object);
            add(field, check.json("structured_outputs.json", outputs.json)?);
            add(field, check.regex("structured_outputs.regex", outputs.regex)?);
            add(field, check.grammar("structured_outputs.grammar", outputs.grammar)?);
            add(field, check.choice("structured_outputs.choice", outputs.choice)?);
            add(field, any_object);
            add(field, check.tag("structured_outputs.structural_tag", outputs.structural_tag)?);
        }
        match rules.as_slice() {
            [first, second, ..] => {
                let message = format!(
                    "'{}' and '{}' both say what the answer must look like; send one rule.",
                    first.field, second.field
                );
                Err(InvalidRequest::field(second.field, message))
            }
            _ => Ok(rules.pop()),
        }
    }
}

fn any_object() -> ContentRule {
    ContentRule::Schema(json!({ "type": "object" }))
}

/// Checks one field each.
struct Check<'a> {
    limits: &'a RequestLimits,
}

impl Check<'_> {
    fn response_format(&self, mut format: Map<String, Value>) -> Result<Option<ContentRule>, InvalidRequest> {
        let kind = match format.get("type") {
            Some(Value::String(kind)) => kind.clone(),
            Some(_) => return invalid("response_format.type", "must be a string"),
            None => return invalid("response_format.type", "is required"),
        };
        match kind.as_str() {
            "text" => self.unused_schema(format).map(|()| None),
            "json_object" => self.unused_schema(format).map(|()| Some(any_object())),
            "json_schema" => match format.remove("json_schema") {
                Some(Value::Object(named)) => self.named_schema(named).map(Some),
                Some(_) => invalid("response_format.json_schema", "must be an object"),
                None => invalid("response_format.json_schema", "is required"),
            },
            "structural_tag" => self.tag("response_format", Some(Value::Object(format))),
            other => {
                let kinds = "\"text\", \"json_object\", \"json_schema\" or \"structural_tag\"";
                invalid("response_format.type", &format!("must be {kinds}, but it is {other:?}"))
            }
        }
    }

    /// A schema that the type does not ask for: of the right form, and no more is asked of it.
    fn unused_schema(&self, mut format: Map<String, Value>) -> Result<(), InvalidRequest> {
        match format.remove("json_schema") {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Object(mut named)) => match named.remove("schema") {
                None | Some(Value::Null | Value::Object(_)) => self.named_schema(named).map(drop),
                Some(_) => invalid("response_format.json_schema.schema", "must be an object"),
            },
            Some(_) => invalid("response_format.json_schema", "must be an object"),
        }
    }

    /// OpenAI's object around a schema. Where it is not strict, keywords that cannot be enforced are let be.
    fn named_schema(&self, mut named: Map<String, Value>) -> Result<ContentRule, InvalidRequest> {
        let path = "response_format.json_schema";
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        match named.get("name") {
            None | Some(Value::Null) => {}
            Some(Value::String(name)) if (1..=MAX_NAME_CHARS).contains(&name.len()) && name.bytes().all(is_allowed) => {
            }
            Some(_) => {
                let rule = "must be 1 to 64 letters, digits, underscores or hyphens";
                return invalid(&format!("{path}.name"), rule);
            }
        }
        let strict = match named.get("strict") {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            Some(_) => return invalid(&format!("{path}.strict"), "must be true or false"),
        };
        match named.remove("schema") {
            None | Some(Value::Null) => Ok(any_object()),
            Some(schema) => self.schema(&format!("{path}.schema"), schema, strict),
        }
    }

    /// A schema, or the text of one.
    fn json(&self, path: &str, value: Option<Value>) -> Result<Option<ContentRule>, InvalidRequest> {
        let schema = match value {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => self.parse(path, &text)?,
            Some(schema) => schema,
        };
        self.schema(path, schema, false).map(Some)
    }

    fn schema(&self, path: &str, schema: Value, strict: bool) -> Result<ContentRule, InvalidRequest> {
        if !schema.is_object() {
            return invalid(path, "must be a JSON Schema, which is an object");
        }
        self.limits.schema.check_bytes(path, json_len(&schema))?;
        schema::check(&schema, path, strict).map_err(InvalidRequest::from)?;
        Ok(ContentRule::Schema(schema))
    }

    fn parse(&self, path: &str, text: &str) -> Result<Value, InvalidRequest> {
        self.limits.schema.check_bytes(path, text.len())?;
        let wrong = |reason: String| InvalidRequest::field(path, format!("'{path}' {reason}."));
        strict_json::check(text.as_bytes()).map_err(|fault| wrong(format!("is wrong: '{}' {fault}", fault.path())))?;
        serde_json::from_str(text).map_err(|error| wrong(format!("must be the text of JSON, but it is not: {error}")))
    }

    fn regex(&self, path: &str, pattern: Option<String>) -> Result<Option<ContentRule>, InvalidRequest> {
        let Some(pattern) = pattern else { return Ok(None) };
        self.grammar_text(path, &pattern)?;
        Ok(Some(ContentRule::Regex(pattern)))
    }

    fn grammar(&self, path: &str, grammar: Option<String>) -> Result<Option<ContentRule>, InvalidRequest> {
        let Some(grammar) = grammar else { return Ok(None) };
        self.grammar_text(path, &grammar)?;
        let starts = |line: &str| {
            line.trim_start().strip_prefix("root").is_some_and(|rest| rest.trim_start().starts_with("::="))
        };
        if !grammar.lines().any(starts) {
            return invalid(path, "must define a rule named root, as in: root ::= \"yes\" | \"no\"");
        }
        Ok(Some(ContentRule::Ebnf(grammar)))
    }

    fn grammar_text(&self, path: &str, text: &str) -> Result<(), InvalidRequest> {
        if text.is_empty() {
            return invalid(path, "must not be empty");
        }
        if text.contains('\0') {
            return invalid(path, "must not contain the character NUL");
        }
        self.limits.schema.check_bytes(path, text.len())
    }

    fn choice(&self, path: &str, texts: Option<Vec<String>>) -> Result<Option<ContentRule>, InvalidRequest> {
        let Some(texts) = texts else { return Ok(None) };
        if texts.is_empty() || texts.iter().any(String::is_empty) {
            return invalid(path, "must be a list of texts of which none is empty");
        }
        self.limits.choice.check_items(path, texts.len())?;
        self.limits.schema.check_bytes(path, texts.iter().map(String::len).sum())?;
        Ok(Some(ContentRule::Choice(texts)))
    }

    /// A structural tag, or its text; also in the older form of `structures` and `triggers`.
    fn tag(&self, path: &str, value: Option<Value>) -> Result<Option<ContentRule>, InvalidRequest> {
        let tag = match value {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => self.parse(path, &text)?,
            Some(tag) => tag,
        };
        self.limits.schema.check_bytes(path, json_len(&tag))?;
        let Value::Object(mut tag) = tag else { return invalid(path, "must be an object") };
        let format = match (tag.remove("format"), tag.remove("structures")) {
            (Some(format), None) => {
                self.format(&format!("{path}.format"), &format)?;
                format
            }
            (None, Some(structures)) => self.structures(path, structures, tag.remove("triggers"))?,
            _ => return invalid(path, "must have either 'format' or 'structures' with 'triggers'"),
        };
        Ok(Some(ContentRule::Tag(format)))
    }

    /// Checks the kinds and schemas of a format and of those inside it.
    fn format(&self, path: &str, format: &Value) -> Result<(), InvalidRequest> {
        let Some(fields) = format.as_object() else { return invalid(path, "must be a format, which is an object") };
        let kind = match fields.get("type").and_then(Value::as_str) {
            Some(kind) if FORMATS.contains(&kind) => kind,
            Some(other) => {
                return invalid(&format!("{path}.type"), &format!("is {other:?}, which is no kind of format"));
            }
            None => return invalid(&format!("{path}.type"), "is required"),
        };
        if kind == "json_schema" {
            let path = format!("{path}.json_schema");
            match fields.get("json_schema") {
                None => return invalid(&path, "is required"),
                Some(schema) => schema::check(schema, &path, false).map_err(InvalidRequest::from)?,
            }
        }
        if let Some(content) = fields.get("content") {
            self.format(&format!("{path}.content"), content)?;
        }
        for list in ["elements", "tags"] {
            let Some(formats) = fields.get(list) else { continue };
            let path = format!("{path}.{list}");
            let Some(formats) = formats.as_array().filter(|formats| !formats.is_empty()) else {
                return invalid(&path, "must be a list of formats that is not empty");
            };
            for (index, format) in formats.iter().enumerate() {
                self.format(&format!("{path}[{index}]"), format)?;
            }
        }
        Ok(())
    }

    fn structures(&self, path: &str, structures: Value, triggers: Option<Value>) -> Result<Value, InvalidRequest> {
        #[derive(Deserialize)]
        struct Structure {
            begin: String,
            schema: Value,
            end: String,
        }
        let here = format!("{path}.structures");
        let structures: Vec<Object<Structure>> = match serde_json::from_value(structures) {
            Ok(structures) => structures,
            Err(error) => return invalid(&here, &format!("must list objects with begin, schema and end: {error}")),
        };
        let triggers: Vec<String> = match triggers.map(serde_json::from_value) {
            Some(Ok(triggers)) => triggers,
            _ => return invalid(&format!("{path}.triggers"), "must be a list of strings"),
        };
        let mut tags = Vec::with_capacity(structures.len());
        for (index, Object(Structure { begin, schema, end })) in structures.into_iter().enumerate() {
            if !triggers.iter().any(|trigger| begin.starts_with(trigger.as_str())) {
                return invalid(&format!("{here}[{index}].begin"), "begins with none of the triggers");
            }
            schema::check(&schema, &format!("{here}[{index}].schema"), false).map_err(InvalidRequest::from)?;
            let content = json!({ "type": "json_schema", "json_schema": schema });
            tags.push(json!({ "type": "tag", "begin": begin, "content": content, "end": end }));
        }
        if tags.is_empty() {
            return invalid(&here, "must not be empty");
        }
        Ok(json!({ "type": "triggered_tags", "triggers": triggers, "tags": tags }))
    }
}

/// About as many bytes as the value takes when it is written out.
pub(super) fn json_len(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 4,
        Value::Number(number) => number.as_str().len(),
        Value::String(text) => text.len() + 2,
        Value::Array(items) => 2 + items.iter().map(|item| json_len(item) + 1).sum::<usize>(),
        Value::Object(fields) => 2 + fields.iter().map(|(key, value)| key.len() + json_len(value) + 4).sum::<usize>(),
    }
}

fn invalid<T>(path: &str, rule: &str) -> Result<T, InvalidRequest> {
    Err(InvalidRequest::field(path, format!("'{path}' {rule}.")))
}
