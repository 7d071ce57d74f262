//! `GET /v1/models` and `GET /v1/models/{id}`.

use serde::Serialize;

#[derive(Debug, Clone, Serialize)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    /// Seconds since 1970, when the server learned of the model.
    pub created: u64,
    pub owned_by: &'static str,
    pub root: String,
    pub parent: Option<String>,
    /// Tokens of prompt and answer together.
    pub max_model_len: u32,
}

impl ModelCard {
    pub fn new(id: impl Into<String>, created: u64, context_len: u32) -> Self {
        let id = id.into();
        Self {
            root: id.clone(),
            id,
            object: "model",
            created,
            owned_by: "baleen",
            parent: None,
            max_model_len: context_len,
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

impl ModelList {
    pub fn new(data: Vec<ModelCard>) -> Self {
        Self { object: "list", data }
    }
}
