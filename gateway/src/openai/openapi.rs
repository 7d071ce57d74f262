//! The description of the API, OpenAPI 3.1: written down in `openapi/*.json`, with what the program knows filled in.
//!
//! In those files `x-limit` names a row of the table of limits and becomes its bounds, `x-errors` becomes the error
//! responses, `x-version` the version; and in requests every field that is not required may be null.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::limits::{Limit, Limits};

const PATHS: &str = include_str!("openapi/paths.json");
const REQUESTS: &str = include_str!("openapi/requests.json");
const ANSWERS: &str = include_str!("openapi/answers.json");

/// The document.
///
/// # Errors
/// A file is broken, which the tests rule out.
pub fn document() -> serde_json::Result<Value> {
    let mut document: Value = serde_json::from_str(PATHS)?;
    let mut schemas: Map<String, Value> = serde_json::from_str(REQUESTS)?;
    let limits = Limits::table()?;
    for schema in schemas.values_mut() {
        fill_limits(schema, &limits);
        admit_nulls(schema);
    }
    schemas.append(&mut serde_json::from_str(ANSWERS)?);
    document["components"]["schemas"] = Value::Object(schemas);
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    let statuses = document.as_object_mut().and_then(|root| root.shift_remove("x-statuses")).unwrap_or_default();
    if let Some(paths) = document["paths"].as_object_mut() {
        for operation in paths.values_mut().filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
            fill_errors(operation, &statuses);
        }
    }
    Ok(document)
}

fn fill_limits(schema: &mut Value, limits: &HashMap<String, Limit>) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(|inner| fill_limits(inner, limits)),
        Value::Object(fields) => {
            fields.values_mut().for_each(|inner| fill_limits(inner, limits));
            let name = fields.shift_remove("x-limit");
            let limit = name.as_ref().and_then(Value::as_str).and_then(|name| limits.get(name));
            let kind = fields.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
            for (keyword, bound) in limit.map(|limit| bounds(limit, &kind)).unwrap_or_default() {
                fields.entry(keyword).or_insert(bound);
            }
        }
        _ => {}
    }
}

/// The keywords of JSON Schema that bound a value of this type.
fn bounds(limit: &Limit, kind: &str) -> Vec<(&'static str, Value)> {
    let number = |bound: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "every integer bound used here fits")]
        let whole = bound as i64;
        if kind == "integer" { json!(whole) } else { json!(bound) }
    };
    let least = if limit.min_exclusive { "exclusiveMinimum" } else { "minimum" };
    let bounds = match kind {
        "number" | "integer" => vec![
            (least, limit.min.is_finite().then(|| number(limit.min))),
            ("maximum", limit.max.is_finite().then(|| number(limit.max))),
        ],
        "array" => vec![("maxItems", limit.max_items.map(Value::from))],
        "object" => vec![("maxProperties", limit.max_items.map(Value::from))],
        // No string of so few bytes has more characters.
        "string" => vec![("maxLength", limit.max_bytes.map(Value::from))],
        _ => Vec::new(),
    };
    bounds.into_iter().filter_map(|(keyword, bound)| Some((keyword, bound?))).collect()
}

/// Lets every field that is not required be null, at every depth.
fn admit_nulls(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(admit_nulls),
        Value::Object(fields) => {
            let required = fields.get("required").cloned().unwrap_or_default();
            let is_required = |name: &str| required.as_array().is_some_and(|names| names.iter().any(|one| one == name));
            for (keyword, inner) in fields.iter_mut() {
                admit_nulls(inner);
                if keyword == "properties"
                    && let Value::Object(properties) = inner
                {
                    properties
                        .iter_mut()
                        .filter(|(name, _)| !is_required(name))
                        .for_each(|(_, field)| admit_null(field));
                }
            }
        }
        _ => {}
    }
}

fn admit_null(schema: &mut Value) {
    if let Some(kind) = schema.get("type").filter(|kind| kind.is_string()).cloned() {
        schema["type"] = json!([kind, "null"]);
    } else if let Some(Value::Array(words)) = schema.get_mut("enum") {
        words.push(Value::Null);
    } else if let Some(Value::Array(choices)) = schema.get_mut("anyOf") {
        choices.push(json!({"type": "null"}));
    } else {
        *schema = json!({"anyOf": [schema, {"type": "null"}]});
    }
}

/// Writes out the errors that an operation may answer with.
fn fill_errors(operation: &mut Value, statuses: &Value) {
    let Some(errors) = operation.as_object_mut().and_then(|operation| operation.shift_remove("x-errors")) else {
        return;
    };
    let schema = errors["schema"].as_str().unwrap_or_default();
    for status in errors["statuses"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let content = json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{schema}")}}});
        operation["responses"][status] = json!({"description": statuses[status], "content": content});
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use serde_json::{Value, json};

    use super::{REQUESTS, document};
    use crate::openai::Limits;

    /// Every value under a key, at any depth.
    fn values<'a>(root: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
        match root {
            Value::Array(list) => list.iter().for_each(|inner| values(inner, key, found)),
            Value::Object(fields) => {
                found.extend(fields.get(key));
                fields.values().for_each(|inner| values(inner, key, found));
            }
            _ => {}
        }
    }

    #[test]
    fn bounds_come_from_the_table_and_every_row_of_it_is_shown() {
        let written: Value = serde_json::from_str(REQUESTS).unwrap();
        let mut named = Vec::new();
        values(&written, "x-limit", &mut named);
        let known = Limits::table().unwrap();
        assert!(named.iter().all(|name| known.contains_key(name.as_str().unwrap())), "{named:?}");
        // A seed is any integer of 64 bits; the others bound what the gateway makes of a request.
        let apart = ["seed", "prompt_logprobs", "constraint"];
        for name in Limits::table().unwrap().keys().filter(|name| !apart.contains(&name.as_str())) {
            assert!(named.iter().any(|shown| **shown == json!(name)), "no field shows the limit {name}");
        }
        let schemas = &document().unwrap()["components"]["schemas"];
        let sampling = &schemas["Sampling"]["properties"];
        assert_eq!(sampling["temperature"]["maximum"], json!(2.0));
        assert_eq!(sampling["temperature"]["type"], json!(["number", "null"]));
        assert_eq!(sampling["top_p"]["exclusiveMinimum"], json!(0.0));
        assert_eq!(
            (&sampling["logit_bias"]["maxProperties"], &sampling["stop_token_ids"]["maxItems"]),
            (&json!(300), &json!(64))
        );
        assert_eq!(schemas["Stop"]["anyOf"][1]["maxItems"], json!(16));
        assert_eq!(schemas["ChatCompletionRequest"]["properties"]["n"]["maximum"], json!(8));
        assert_eq!(schemas["Generation"]["properties"]["cache_salt"]["maxLength"], json!(256));
    }

    #[test]
    fn nothing_is_left_to_fill_in_and_every_reference_leads_somewhere() {
        let document = document().unwrap();
        for word in ["x-limit", "x-errors", "x-statuses", "x-version"] {
            assert!(!document.to_string().contains(&format!("\"{word}\"")), "{word}");
        }
        let mut references = Vec::new();
        values(&document, "$ref", &mut references);
        assert!(references.len() > 50);
        for reference in references {
            let pointer = reference.as_str().unwrap().strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
        let errors = &document["paths"]["/v1/messages"]["post"]["responses"]["400"];
        assert_eq!(errors["content"]["application/json"]["schema"]["$ref"], "#/components/schemas/MessageError");
        assert!(errors["description"].is_string());
    }

    #[test]
    fn required_fields_may_not_be_null_and_others_may() {
        let document = document().unwrap();
        let chat = &document["components"]["schemas"]["ChatCompletionRequest"]["properties"];
        assert_eq!(chat["messages"]["type"], "array");
        assert_eq!(chat["stop"]["anyOf"][1], json!({"type": "null"}));
        let effort = &document["components"]["schemas"]["MessagePrompt"]["properties"]["output_config"]["properties"];
        assert!(effort["effort"]["enum"].as_array().unwrap().contains(&Value::Null));
    }
}
