//! Logit processors of a request: plugins of the server, asked for by name. A request cannot bring code.

use serde::de::MapAccess;
use serde_json::{Map, Number, Value};

use super::error::InvalidRequest;
use super::fields::Integer;
use super::limits::Limits;

const MAX_NAME_CHARS: usize = 64;

/// The fields as they stand in the request.
#[derive(Debug, Default)]
pub(super) struct ProcessorFields {
    /// SGLang's field, made for serialized code.
    custom_logit_processor: Option<Value>,
    /// vLLM's list.
    logit_processors: Option<Value>,
    /// SGLang's arguments for a processor; one of them has a meaning of its own.
    custom_params: Option<Map<String, Value>>,
}

impl ProcessorFields {
    /// Reads the value if `key` is one of these fields.
    pub(super) fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
        match key {
            "custom_logit_processor" => self.custom_logit_processor = map.next_value()?,
            "logit_processors" | "logits_processors" => self.logit_processors = map.next_value()?,
            "custom_params" => self.custom_params = map.next_value()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reasoning tokens as SGLang's processor takes them, within no bounds yet.
    pub(super) fn take_thinking_budget(&mut self) -> Result<Option<Integer>, InvalidRequest> {
        match self.custom_params.as_mut().and_then(|params| params.shift_remove("thinking_budget")) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_number().and_then(Number::as_i128) {
                Some(budget) => Ok(Some(Integer(budget))),
                None => {
                    let param = "custom_params.thinking_budget";
                    Err(InvalidRequest::field(param, format!("'{param}' must be an integer.")))
                }
            },
        }
    }

    /// Names of plugins, each once.
    pub(super) fn validate(self, limits: &Limits) -> Result<Vec<String>, InvalidRequest> {
        if let Some(key) = self.custom_params.and_then(|params| params.keys().next().cloned()) {
            let param = format!("custom_params.{key}");
            let message = format!("'{param}' is not implemented by this server: plugins take no arguments.");
            return Err(InvalidRequest::not_implemented(param, message));
        }
        let mut names = Vec::new();
        match self.custom_logit_processor {
            None | Some(Value::Null) => {}
            Some(Value::String(name)) if name.is_empty() => {}
            Some(value) => names.push(plugin("custom_logit_processor", &value)?),
        }
        match self.logit_processors {
            None | Some(Value::Null) => {}
            Some(Value::Array(list)) => {
                for (index, value) in list.iter().enumerate() {
                    names.push(plugin(&format!("logit_processors[{index}]"), value)?);
                }
            }
            Some(_) => {
                let message = "'logit_processors' must be a list of names of plugins.";
                return Err(InvalidRequest::field("logit_processors", message));
            }
        }
        limits.logit_processors.check_items("logit_processors", names.len())?;
        let mut known = std::collections::HashSet::new();
        names.retain(|name| known.insert(name.clone()));
        Ok(names)
    }
}

/// The name of a plugin; anything that could be code is refused as such.
fn plugin(param: &str, value: &Value) -> Result<String, InvalidRequest> {
    let is_name = |name: &&String| {
        (1..=MAX_NAME_CHARS).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
    };
    match value {
        Value::String(name) if is_name(&name) => Ok(name.clone()),
        _ => {
            let message = format!(
                "'{param}' must be the name of a plugin that this server was started with, 1 to {MAX_NAME_CHARS} \
                 letters, digits, dots, underscores or hyphens: a request cannot bring code to run."
            );
            Err(InvalidRequest::field(param, message))
        }
    }
}
