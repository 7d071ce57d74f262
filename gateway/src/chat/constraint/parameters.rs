//! The schema of a function's parameters, taken apart into its arguments: DSML writes each in a tag of its own,
//! strings as they are and everything else as JSON.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::schema::{self, resolve};
use super::{format, text};

/// References of one argument's schema.
const MAX_REFERENCES: usize = 256;
/// Alternatives that are taken apart; further ones are left to the grammar of JSON.
const MAX_ALTERNATIVES: usize = 256;

/// One argument, in the forms that its schema allows; at least one of them.
#[derive(Debug)]
pub struct Argument {
    pub name: String,
    pub required: bool,
    /// As a string, without quotes.
    pub text: Option<Value>,
    /// As JSON.
    pub json: Option<Value>,
}

/// Arguments in the order of a schema that has been checked.
///
/// # Errors
/// A clause: why calls cannot be held to this schema.
pub fn arguments(root: &Value) -> Result<Vec<Argument>, String> {
    let object = resolve(root, root).ok_or("its reference leads nowhere")?;
    let Some(object) = object.as_object() else { return Ok(Vec::new()) };
    if object.get("type").is_some_and(|kind| kind != "object") {
        return Err("its parameters are not an object".to_owned());
    }
    if let Some(keyword) = ["anyOf", "oneOf", "allOf", "enum", "const", "patternProperties", "propertyNames"]
        .into_iter()
        .chain(["minProperties", "maxProperties"])
        .find(|keyword| object.contains_key(*keyword))
    {
        return Err(format!("'{keyword}' of its parameters cannot be enforced"));
    }
    let empty = Map::new();
    let properties = object.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required = object.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    properties.iter().map(|(name, schema)| argument(root, name, schema, required.contains(&json!(name)))).collect()
}

fn argument(root: &Value, name: &str, schema: &Value, required: bool) -> Result<Argument, String> {
    if name.is_empty() || name.contains(['"', '<', '>', '\u{FF5C}']) || name.contains(char::is_control) {
        return Err(format!("the name {name:?} cannot be written in a call"));
    }
    let mut forms = Forms::default();
    forms.add(root, schema);
    let text = (!forms.texts.is_empty()).then(|| format::either(forms.texts));
    let json = match forms.schemas.len() {
        0 => None,
        1 => forms.schemas.pop(),
        _ => Some(json!({ "anyOf": forms.schemas })),
    };
    let json = json.map(|schema| localize(root, &schema)).transpose()?.map(format::argument_json);
    if text.is_none() && json.is_none() {
        return Err(format!("nothing can be the value of {name:?}"));
    }
    Ok(Argument { name: name.to_owned(), required, text, json })
}

/// What a schema allows, strings apart from the rest.
#[derive(Default)]
struct Forms {
    texts: Vec<Value>,
    schemas: Vec<Value>,
    num_alternatives: usize,
}

impl Forms {
    fn add(&mut self, root: &Value, schema: &Value) {
        self.num_alternatives += 1;
        let Some(resolved) = resolve(root, schema).filter(|_| self.num_alternatives <= MAX_ALTERNATIVES) else {
            self.schemas.push(schema.clone());
            return;
        };
        let Some(keywords) = resolved.as_object() else {
            self.anything();
            return;
        };
        if let Some(values) = keywords.get("enum").and_then(Value::as_array) {
            self.values(values);
        } else if let Some(value) = keywords.get("const") {
            self.values(std::slice::from_ref(value));
        } else if let Some(members) = ["anyOf", "oneOf", "allOf"].iter().find_map(|keyword| keywords.get(*keyword)) {
            for member in members.as_array().into_iter().flatten() {
                self.add(root, member);
            }
        } else {
            match keywords.get("type") {
                Some(Value::String(kind)) => self.kinds(keywords, &[kind.as_str()]),
                Some(Value::Array(kinds)) => {
                    let kinds: Vec<&str> = kinds.iter().filter_map(Value::as_str).collect();
                    self.kinds(keywords, &kinds);
                }
                _ if keywords.keys().all(|keyword| schema::is_remark(keyword)) => self.anything(),
                // Keywords say which type is meant, and the grammar reads them.
                _ => self.schemas.push(resolved.clone()),
            }
        }
    }

    fn kinds(&mut self, keywords: &Map<String, Value>, kinds: &[&str]) {
        let mut others: Vec<&str> = kinds.to_vec();
        if kinds.contains(&"string")
            && let Some(text) = text::of_string(keywords)
        {
            self.texts.push(text);
            others.retain(|kind| *kind != "string");
        }
        if !others.is_empty() {
            let mut schema = keywords.clone();
            schema.insert("type".to_owned(), if others.len() == 1 { json!(others[0]) } else { json!(others) });
            self.schemas.push(Value::Object(schema));
        }
    }

    fn values(&mut self, values: &[Value]) {
        let (texts, others): (Vec<&Value>, Vec<&Value>) = values.iter().partition(|value| value.is_string());
        let texts: Vec<&str> = texts.into_iter().filter_map(Value::as_str).collect();
        if !texts.is_empty() {
            self.texts.push(text::one_of(&texts));
        }
        if !others.is_empty() {
            self.schemas.push(json!({ "enum": others }));
        }
    }

    fn anything(&mut self) {
        self.texts.extend(text::of_string(&Map::new()));
        self.schemas.push(json!({ "type": ["number", "boolean", "null", "array", "object"] }));
    }
}

/// The schema with all that it refers to, so that it stands by itself.
fn localize(root: &Value, schema: &Value) -> Result<Value, String> {
    let mut names = BTreeMap::new();
    let mut pending = Vec::new();
    let mut localized = rewrite(schema, &mut names, &mut pending);
    let mut definitions = Map::new();
    while let Some(reference) = pending.pop() {
        if names.len() > MAX_REFERENCES {
            return Err(format!("its parameters hold more than {MAX_REFERENCES} references"));
        }
        let target = schema::target(root, &reference).ok_or_else(|| format!("{reference:?} leads nowhere"))?;
        let definition = rewrite(target, &mut names, &mut pending);
        definitions.insert(names[&reference].clone(), definition);
    }
    if let (Value::Object(fields), false) = (&mut localized, definitions.is_empty()) {
        fields.insert("$defs".to_owned(), Value::Object(definitions));
    }
    Ok(localized)
}

/// A copy in which every reference names a definition; new ones are appended to `pending`.
fn rewrite(schema: &Value, names: &mut BTreeMap<String, String>, pending: &mut Vec<String>) -> Value {
    match schema {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(keyword, _)| !matches!(keyword.as_str(), "$defs" | "definitions"));
            let fields = fields.map(|(keyword, value)| {
                let value = match value {
                    Value::String(reference) if keyword == "$ref" => {
                        if !names.contains_key(reference) {
                            names.insert(reference.clone(), format!("d{}", names.len()));
                            pending.push(reference.clone());
                        }
                        json!(format!("#/$defs/{}", names[reference]))
                    }
                    // Here the keys are names, not keywords.
                    Value::Object(members) if matches!(keyword.as_str(), "properties" | "patternProperties") => {
                        let members = members.iter();
                        let members = members.map(|(name, member)| (name.clone(), rewrite(member, names, pending)));
                        Value::Object(members.collect())
                    }
                    _ if matches!(keyword.as_str(), "const" | "default" | "enum" | "examples") => value.clone(),
                    _ => rewrite(value, names, pending),
                };
                (keyword.clone(), value)
            });
            Value::Object(fields.collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|item| rewrite(item, names, pending)).collect()),
        _ => schema.clone(),
    }
}
