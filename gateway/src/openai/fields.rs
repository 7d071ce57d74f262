//! JSON field types that say in plain words what they expect, and the parser that names the field at fault.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};

use super::error::InvalidRequest;
use super::strict_json;

/// A message quotes the client's value; a quoted megabyte helps nobody.
const MAX_MESSAGE_CHARS: usize = 300;

/// Parses a request body. Wrong types and repeated keys are reported with the path of the field.
pub(super) fn parse_body<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T, InvalidRequest> {
    strict_json::check(body).map_err(|fault| match fault.path() {
        "" => InvalidRequest::body(format!("The request body {fault}.")),
        path => InvalidRequest::field(path, format!("'{path}' {fault}.")),
    })?;
    serde_json::from_slice(body).map_err(|error| explain::<T>(body, &error))
}

/// Parses a second time, slowly, to find out where the error is.
fn explain<'de, T: Deserialize<'de>>(body: &'de [u8], first: &serde_json::Error) -> InvalidRequest {
    let malformed = || InvalidRequest::body(format!("The request body is not valid JSON: {first}."));
    if first.is_eof() {
        return malformed();
    }
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let Err(error) = serde_path_to_error::deserialize::<_, T>(&mut deserializer) else {
        // The object itself is sound, so it is followed by something else.
        return malformed();
    };
    let path = error.path().to_string();
    let is_root = path == ".";
    let message = without_position(&error.inner().to_string());
    // A number beyond double precision is sound JSON, though the parser does not say so.
    if !error.inner().is_data() && message != "number out of range" {
        // Spellings such as NaN are no JSON, but they do have a place in the request.
        let param = (!is_root).then_some(path);
        return InvalidRequest { param, ..malformed() };
    }
    if is_root {
        return InvalidRequest::body(format!("The request body is wrong: {message}."));
    }
    InvalidRequest::field(&path, format!("Invalid value for '{path}': {message}."))
}

fn without_position(message: &str) -> String {
    let end = message.rfind(" at line ").unwrap_or(message.len());
    let text = &message[..end];
    match text.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

/// A JSON object with the fields of `T`. A derived type by itself would take a list of its fields' values as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// Any JSON number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Float(pub f64);

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FloatVisitor;
        #[expect(clippy::cast_precision_loss, reason = "the exact value of a large integer does not matter here")]
        impl Visitor<'_> for FloatVisitor {
            type Value = Float;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number")
            }
            fn visit_f64<E>(self, value: f64) -> Result<Float, E> {
                Ok(Float(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Float, E> {
                Ok(Float(value as f64))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Float, E> {
                Ok(Float(value as f64))
            }
        }
        deserializer.deserialize_f64(FloatVisitor)
    }
}

/// A JSON integer; range checks are left to the limits. One beyond 64 bits, which no range reaches, is the lowest or the
/// highest that fits here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Integer(pub i128);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IntegerVisitor;
        impl Visitor<'_> for IntegerVisitor {
            type Value = Integer;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an integer")
            }
            fn visit_u64<E>(self, value: u64) -> Result<Integer, E> {
                Ok(Integer(value.into()))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Integer, E> {
                Ok(Integer(value.into()))
            }
            /// What the parser makes of integers beyond 64 bits.
            fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Integer, E> {
                if value >= 2_f64.powi(64) {
                    Ok(Integer(i128::MAX))
                } else if value <= -2_f64.powi(63) {
                    Ok(Integer(i128::MIN))
                } else {
                    Err(E::invalid_type(Unexpected::Float(value), &self))
                }
            }
        }
        deserializer.deserialize_i64(IntegerVisitor)
    }
}

/// A string or a list of strings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strings(pub Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or a list of strings")
            }
            fn visit_str<E>(self, value: &str) -> Result<Strings, E> {
                Ok(Strings(vec![value.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Strings, A::Error> {
                let mut strings = Vec::new();
                while let Some(text) = list.next_element()? {
                    strings.push(text);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_any(StringsVisitor)
    }
}

/// Whether a field asks for anything: null, false and everything empty do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Asks(pub bool);

impl<'de> Deserialize<'de> for Asks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AsksVisitor;
        impl<'de> Visitor<'de> for AsksVisitor {
            type Value = Asks;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("any value")
            }
            fn visit_unit<E>(self) -> Result<Asks, E> {
                Ok(Asks(false))
            }
            fn visit_bool<E>(self, value: bool) -> Result<Asks, E> {
                Ok(Asks(value))
            }
            fn visit_u64<E>(self, _: u64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Asks, E> {
                Ok(Asks(true))
            }
            fn visit_str<E>(self, value: &str) -> Result<Asks, E> {
                Ok(Asks(!value.is_empty()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Asks, A::Error> {
                let mut any = false;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    any = true;
                }
                Ok(Asks(any))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Asks, A::Error> {
                let mut any = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    any = true;
                }
                Ok(Asks(any))
            }
        }
        deserializer.deserialize_any(AsksVisitor)
    }
}

/// An object from token id to bias, in the order given.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Biases(pub Vec<(u32, f64)>);

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasesVisitor;
        impl<'de> Visitor<'de> for BiasesVisitor {
            type Value = Biases;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object from token id to bias")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Biases, A::Error> {
                let mut biases = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    let id = key.parse().map_err(|_| A::Error::custom(format!("the key {key:?} is not a token id")))?;
                    biases.push((id, map.next_value::<Float>()?.0));
                }
                Ok(Biases(biases))
            }
        }
        deserializer.deserialize_map(BiasesVisitor)
    }
}
