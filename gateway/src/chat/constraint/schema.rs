//! Checks a client's JSON Schema before anything is compiled from it: its form, its bounds, and whether some value can
//! obey it at all. What the worker's grammars cannot enforce is refused where enforcement was promised.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// Schemas within schemas.
const MAX_DEPTH: usize = 32;
/// Subschemas and enumerated values in total.
const MAX_PARTS: usize = 4096;
/// Largest count or length that a schema may demand of a value.
const MAX_DEMANDED: u64 = 4096;

const TYPES: [&str; 7] = ["string", "number", "integer", "boolean", "null", "array", "object"];

/// Keywords that say something about values and that no grammar here enforces.
const UNENFORCED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "contentSchema",
];

/// Keywords that combine schemas; beside others they are not enforced.
const COMBINERS: [&str; 3] = ["anyOf", "oneOf", "allOf"];

/// Keywords that say nothing about values.
const REMARKS: &[&str] = &[
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];

/// Whether a keyword says nothing about values.
#[must_use]
pub fn is_remark(keyword: &str) -> bool {
    REMARKS.contains(&keyword) || keyword.starts_with("x-")
}

/// What is wrong with a schema, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{path}' {rule}")]
pub struct SchemaError {
    /// Of the keyword or subschema, from the request's field on.
    pub path: String,
    /// A predicate.
    pub rule: String,
}

/// Checks the schema found at `path`. With `strict`, every keyword must be one that is enforced. Linear in the schema.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(schema: &Value, path: &str, strict: bool) -> Result<(), SchemaError> {
    let mut checker = Checker { root: schema, strict, num_parts: 0, references: HashSet::new() };
    checker.schema(schema, path, 0)
}

/// What a local reference points to.
#[must_use]
pub fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    root.pointer(pointer)
}

/// Follows references until a schema says something itself; `None` where they lead nowhere or in a circle.
#[must_use]
pub fn resolve<'a>(root: &'a Value, schema: &'a Value) -> Option<&'a Value> {
    let mut current = schema;
    for _ in 0..MAX_DEPTH {
        let Some(reference) = current.get("$ref") else { return Some(current) };
        current = target(root, reference.as_str()?)?;
    }
    None
}

struct Checker<'a> {
    root: &'a Value,
    strict: bool,
    num_parts: usize,
    /// Those that are known to be sound.
    references: HashSet<&'a str>,
}

impl<'a> Checker<'a> {
    fn schema(&mut self, schema: &'a Value, path: &str, depth: usize) -> Result<(), SchemaError> {
        self.count(1, path)?;
        if depth > MAX_DEPTH {
            return wrong(path, format!("is nested more than {MAX_DEPTH} schemas deep"));
        }
        let keywords = match schema {
            Value::Object(keywords) => keywords,
            Value::Bool(true) => return Ok(()),
            Value::Bool(false) => return wrong(path, "is false, which no value obeys"),
            _ => return wrong(path, "must be a JSON Schema, which is an object"),
        };
        self.reference(keywords, path)?;
        types(keywords, path)?;
        self.values(keywords, path)?;
        ranges(keywords, path)?;
        self.object(keywords, path, depth)?;
        self.array(keywords, path, depth)?;
        for combiner in COMBINERS {
            self.list(keywords, combiner, path, depth)?;
        }
        for definitions in ["$defs", "definitions"] {
            self.members(keywords, definitions, path, depth)?;
        }
        if let Some(pattern) = keywords.get("pattern")
            && !pattern.is_string()
        {
            return wrong(&at(path, "pattern"), "must be a string");
        }
        if self.strict { enforceable(keywords, path) } else { Ok(()) }
    }

    fn count(&mut self, parts: usize, path: &str) -> Result<(), SchemaError> {
        self.num_parts += parts;
        if self.num_parts > MAX_PARTS {
            return wrong(path, format!("makes a schema of more than {MAX_PARTS} parts"));
        }
        Ok(())
    }

    fn reference(&mut self, keywords: &'a Map<String, Value>, path: &str) -> Result<(), SchemaError> {
        let Some(reference) = keywords.get("$ref") else { return Ok(()) };
        let path = at(path, "$ref");
        let Some(text) = reference.as_str() else { return wrong(&path, "must be a string") };
        if !self.references.insert(text) {
            return Ok(());
        }
        if !text.starts_with('#') {
            return wrong(&path, format!("is {text:?}; only references into the schema itself are followed"));
        }
        match target(self.root, text) {
            None => wrong(&path, format!("is {text:?}, which leads nowhere")),
            Some(found) if resolve(self.root, found).is_none() => {
                wrong(&path, format!("is {text:?}, which leads in a circle"))
            }
            Some(_) => Ok(()),
        }
    }

    fn values(&mut self, keywords: &'a Map<String, Value>, path: &str) -> Result<(), SchemaError> {
        let Some(values) = keywords.get("enum") else { return Ok(()) };
        let path = at(path, "enum");
        match values {
            Value::Array(values) if !values.is_empty() => self.count(values.len(), &path),
            Value::Array(_) => wrong(&path, "is empty, which no value obeys"),
            _ => wrong(&path, "must be a list"),
        }
    }

    fn object(&mut self, keywords: &'a Map<String, Value>, path: &str, depth: usize) -> Result<(), SchemaError> {
        self.members(keywords, "properties", path, depth)?;
        self.members(keywords, "patternProperties", path, depth)?;
        for keyword in ["additionalProperties", "unevaluatedProperties", "propertyNames"] {
            self.bounded(keywords, keyword, path, depth)?;
        }
        let Some(required) = keywords.get("required") else { return Ok(()) };
        let here = at(path, "required");
        let Some(names) = required.as_array() else { return wrong(&here, "must be a list of names") };
        let properties = keywords.get("properties").and_then(Value::as_object);
        let closed = keywords.get("additionalProperties") == Some(&Value::Bool(false)) || self.strict;
        let closed = closed && !keywords.contains_key("patternProperties");
        for (index, name) in names.iter().enumerate() {
            let Some(name) = name.as_str() else { return wrong(&format!("{here}[{index}]"), "must be a string") };
            let is_declared = properties.is_some_and(|properties| properties.contains_key(name));
            if closed && !is_declared {
                return wrong(&format!("{here}[{index}]"), format!("demands {name:?}, which 'properties' lacks"));
            }
        }
        Ok(())
    }

    fn array(&mut self, keywords: &'a Map<String, Value>, path: &str, depth: usize) -> Result<(), SchemaError> {
        match keywords.get("items") {
            // An older spelling of prefixItems.
            Some(Value::Array(_)) => self.list(keywords, "items", path, depth)?,
            _ => self.bounded(keywords, "items", path, depth)?,
        }
        for keyword in ["additionalItems", "unevaluatedItems"] {
            self.bounded(keywords, keyword, path, depth)?;
        }
        self.list(keywords, "prefixItems", path, depth)
    }

    /// A subschema that may be false: then it closes the object or list.
    fn bounded(
        &mut self,
        keywords: &'a Map<String, Value>,
        keyword: &str,
        path: &str,
        depth: usize,
    ) -> Result<(), SchemaError> {
        match keywords.get(keyword) {
            None | Some(Value::Bool(_)) => Ok(()),
            Some(schema) => self.schema(schema, &at(path, keyword), depth + 1),
        }
    }

    fn list(
        &mut self,
        keywords: &'a Map<String, Value>,
        keyword: &str,
        path: &str,
        depth: usize,
    ) -> Result<(), SchemaError> {
        let Some(schemas) = keywords.get(keyword) else { return Ok(()) };
        let path = at(path, keyword);
        let Some(schemas) = schemas.as_array().filter(|schemas| !schemas.is_empty()) else {
            return wrong(&path, "must be a list of schemas that is not empty");
        };
        for (index, schema) in schemas.iter().enumerate() {
            self.schema(schema, &format!("{path}[{index}]"), depth + 1)?;
        }
        Ok(())
    }

    fn members(
        &mut self,
        keywords: &'a Map<String, Value>,
        keyword: &str,
        path: &str,
        depth: usize,
    ) -> Result<(), SchemaError> {
        let Some(schemas) = keywords.get(keyword) else { return Ok(()) };
        let path = at(path, keyword);
        let Some(schemas) = schemas.as_object() else { return wrong(&path, "must be an object of schemas") };
        for (name, schema) in schemas {
            self.schema(schema, &at(&path, name), depth + 1)?;
        }
        Ok(())
    }
}

fn types(keywords: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let Some(kind) = keywords.get("type") else { return Ok(()) };
    let path = at(path, "type");
    let names = match kind {
        Value::String(_) => std::slice::from_ref(kind),
        Value::Array(names) if !names.is_empty() => names,
        _ => return wrong(&path, "must be the name of a type or a list of names"),
    };
    match names.iter().find(|name| !name.as_str().is_some_and(|name| TYPES.contains(&name))) {
        Some(name) => wrong(&path, format!("is {name}, but the types are {}", TYPES.join(", "))),
        None => Ok(()),
    }
}

/// Bounds that leave nothing between them, and demands that no answer could meet.
fn ranges(keywords: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    for keyword in ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"] {
        // Older drafts have booleans for the exclusive ones.
        if let Some(value) = keywords.get(keyword)
            && !value.is_number()
            && !(value.is_boolean() && keyword.starts_with("exclusive"))
        {
            return wrong(&at(path, keyword), "must be a number");
        }
    }
    let number = |keyword: &str| keywords.get(keyword).and_then(Value::as_f64);
    if number("multipleOf").is_some_and(|step| step <= 0.0) {
        return wrong(&at(path, "multipleOf"), "must be above 0");
    }
    let above = [(number("minimum"), false), (number("exclusiveMinimum"), true)];
    let below = [(number("maximum"), false), (number("exclusiveMaximum"), true)];
    for (min, excludes_min) in above {
        for (max, excludes_max) in below {
            if let (Some(min), Some(max)) = (min, max)
                && (min > max || (min >= max && (excludes_min || excludes_max)))
            {
                return wrong(&at(path, "minimum"), format!("is {min} where the maximum is {max}: no number obeys"));
            }
        }
    }
    for (low, high) in [("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")] {
        let count = |keyword: &str| match keywords.get(keyword) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(count) => Ok(Some(count)),
                None => wrong(&at(path, keyword), "must be a whole number of at least 0"),
            },
        };
        let (min, max) = (count(low)?, count(high)?);
        if let Some(min) = min.filter(|min| *min > MAX_DEMANDED) {
            return wrong(&at(path, low), format!("is {min}; at most {MAX_DEMANDED} can be demanded"));
        }
        if let (Some(min), Some(max)) = (min, max)
            && min > max
        {
            return wrong(&at(path, low), format!("is {min}, more than '{high}', which is {max}: no value obeys"));
        }
    }
    Ok(())
}

/// Whether each keyword is enforced, also in the company of the others.
fn enforceable(keywords: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let unenforced = keywords.keys().find(|keyword| UNENFORCED.contains(&keyword.as_str()));
    if let Some(keyword) = unenforced {
        return wrong(&at(path, keyword), "cannot be enforced, so it must not stand in a strict schema");
    }
    if keywords.get("uniqueItems") == Some(&Value::Bool(true)) {
        return wrong(&at(path, "uniqueItems"), "cannot be enforced, so it must not stand in a strict schema");
    }
    if let Some(Value::Array(members)) = keywords.get("allOf")
        && members.len() > 1
    {
        return wrong(&at(path, "allOf"), "is enforced for a single member only");
    }
    let length = ["minLength", "maxLength"].into_iter().find(|keyword| keywords.contains_key(*keyword));
    let text = ["pattern", "format"].into_iter().find(|keyword| keywords.contains_key(*keyword));
    if let (Some(length), Some(text)) = (length, text) {
        return wrong(&at(path, length), format!("is not enforced beside '{text}': say it in the pattern"));
    }
    let speaks = |keyword: &String| !is_remark(keyword) && keyword != "type";
    for combiner in COMBINERS.into_iter().chain(["$ref", "enum", "const"]) {
        if keywords.contains_key(combiner)
            && let Some(other) = keywords.keys().find(|keyword| speaks(keyword) && *keyword != combiner)
        {
            return wrong(&at(path, other), format!("is not enforced beside '{combiner}'"));
        }
    }
    Ok(())
}

fn at(path: &str, keyword: &str) -> String {
    format!("{path}.{keyword}")
}

fn wrong<T>(path: &str, rule: impl Into<String>) -> Result<T, SchemaError> {
    Err(SchemaError { path: path.to_owned(), rule: rule.into() })
}

#[cfg(test)]
mod tests;
