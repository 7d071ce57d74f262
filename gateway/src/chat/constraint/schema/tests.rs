#![expect(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};

use super::{MAX_DEPTH, MAX_PARTS, check};

#[track_caller]
fn wrong(schema: &Value, strict: bool, path: &str) {
    let error = check(schema, "s", strict).unwrap_err();
    assert_eq!(error.path, path, "{error}");
}

#[test]
fn sound_schemas_pass() {
    for schema in [
        json!({}),
        json!({"type": "object", "properties": {}, "additionalProperties": false}),
        json!({"type": ["string", "null"], "description": "d", "default": null, "x-order": 1}),
        json!({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}),
        json!({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1}, {"const": null}, {"enum": [1, "a"]}]}),
        json!({"type": "array", "items": {"$ref": "#"}, "minItems": 0, "maxItems": 3}),
        json!({"type": "array", "prefixItems": [{"type": "integer"}], "items": false}),
        json!({"type": "object", "properties": {"$ref": {"type": "string"}, "enum": {"type": "integer"}}, "required": ["enum"]}),
        json!({"type": "string", "pattern": "^a+$"}),
    ] {
        assert_eq!(check(&schema, "s", true), Ok(()), "{schema}");
    }
}

#[test]
fn the_first_fault_is_named_with_its_path() {
    for (schema, path) in [
        (json!([]), "s"),
        (json!(false), "s"),
        (json!({"type": "text"}), "s.type"),
        (json!({"type": []}), "s.type"),
        (json!({"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}}), "s.properties.a.minimum"),
        (json!({"minimum": 1, "exclusiveMaximum": 1}), "s.minimum"),
        (json!({"minLength": 3, "maxLength": 2}), "s.minLength"),
        (json!({"minItems": 1_000_000_000}), "s.minItems"),
        (json!({"maxItems": -1}), "s.maxItems"),
        (json!({"multipleOf": 0}), "s.multipleOf"),
        (json!({"minimum": "1"}), "s.minimum"),
        (json!({"enum": []}), "s.enum"),
        (json!({"anyOf": []}), "s.anyOf"),
        (json!({"items": {"items": {"type": 3}}}), "s.items.items.type"),
        (json!({"required": ["a"], "additionalProperties": false}), "s.required[0]"),
        (json!({"required": [1]}), "s.required[0]"),
        (json!({"$ref": "#/$defs/missing"}), "s.$ref"),
        (json!({"$ref": "https://example.org/schema"}), "s.$ref"),
        (json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "s.$ref"),
        (json!({"pattern": 3}), "s.pattern"),
        (json!({"properties": {"a": 3}}), "s.properties.a"),
    ] {
        wrong(&schema, false, path);
    }
}

#[test]
fn a_strict_schema_holds_only_what_is_enforced() {
    for (schema, path) in [
        (json!({"not": {"type": "string"}}), "s.not"),
        (json!({"type": "array", "uniqueItems": true}), "s.uniqueItems"),
        (json!({"type": "string", "pattern": "a+", "maxLength": 3}), "s.maxLength"),
        (json!({"allOf": [{"type": "object"}, {"required": []}]}), "s.allOf"),
        (json!({"type": "object", "properties": {}, "anyOf": [{"required": []}]}), "s.properties"),
        (json!({"type": "object", "required": ["a"]}), "s.required[0]"),
    ] {
        assert_eq!(check(&schema, "s", false), Ok(()), "{schema}");
        wrong(&schema, true, path);
    }
}

#[test]
fn size_is_bounded() {
    let nested = |depth: usize| (0..depth).fold(json!({}), |schema, _| json!({ "items": schema }));
    assert_eq!(check(&nested(MAX_DEPTH), "s", true), Ok(()));
    assert!(check(&nested(MAX_DEPTH + 1), "s", true).is_err());
    let values: Vec<usize> = (0..=MAX_PARTS).collect();
    wrong(&json!({ "enum": values }), true, "s.enum");
}
