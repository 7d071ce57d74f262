//! `POST /v1/tokenize` and `/v1/detokenize`: what a prompt becomes, and what token ids say.

use serde::Serialize;

use super::chat::ChatRequest;
use super::error::InvalidRequest;
use super::facts::ModelFacts;
use super::fields::{Integer, Object};
use super::node::{Fields, Node};
use super::rewrite::refuse_foreign;

/// What is to be tokenized.
#[derive(Debug)]
pub enum Source {
    /// A prompt as `/v1/completions` takes it.
    Prompt {
        text: String,
        /// Whether the begin-of-sentence token is put before it.
        add_special_tokens: bool,
    },
    /// A conversation as `/v1/chat/completions` takes it.
    Chat {
        request: Box<ChatRequest>,
        /// Whether the model's turn is opened at the end.
        add_generation_prompt: bool,
    },
}

/// A request to tokenize.
#[derive(Debug)]
pub struct TokenizeRequest {
    pub model: Option<String>,
    pub source: Source,
}

impl TokenizeRequest {
    /// Parses a body: `prompt`, or `messages` with whatever shapes a chat prompt.
    ///
    /// # Errors
    /// The field that is missing or wrong.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let mut fields = Fields::parse(body)?;
        let model = fields.take("model").map(Node::string).transpose()?;
        let flag = |fields: &mut Fields, name: &str| fields.take(name).map(Node::bool).transpose();
        let add_special_tokens = flag(&mut fields, "add_special_tokens")?;
        let add_generation_prompt = flag(&mut fields, "add_generation_prompt")?;
        refuse_foreign(&mut fields, "/v1/tokenize", &[("input", Some("prompt")), ("tokens", None)])?;
        let Some(prompt) = fields.take("prompt") else {
            if fields.get("messages").is_none() {
                let message = "'prompt' or 'messages' is required.";
                return Err(InvalidRequest::field("prompt", message));
            }
            let source = Source::Chat {
                request: Box::new(ChatRequest::parse(body)?),
                add_generation_prompt: add_generation_prompt.unwrap_or(true),
            };
            return Ok(Self { model, source });
        };
        for of_chat in ["messages", "tools"] {
            if let Some(node) = fields.take(of_chat) {
                return Err(node.invalid("is not allowed together with 'prompt'"));
            }
        }
        let source = Source::Prompt { text: prompt.string()?, add_special_tokens: add_special_tokens.unwrap_or(false) };
        Ok(Self { model, source })
    }
}

/// The answer to a request to tokenize.
#[derive(Debug, Serialize)]
pub struct Tokenized {
    pub tokens: Vec<u32>,
    pub count: usize,
    /// Tokens of prompt and answer together.
    pub max_model_len: u32,
}

/// A request to detokenize: ids as they were sent.
#[derive(Debug)]
pub struct DetokenizeRequest {
    pub model: Option<String>,
    tokens: Vec<Integer>,
    /// Whether control tokens give no text.
    pub skip_special_tokens: bool,
}

impl DetokenizeRequest {
    /// Parses a body.
    ///
    /// # Errors
    /// The field that is missing or wrong.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        #[derive(serde::Deserialize)]
        struct Wire {
            model: Option<String>,
            tokens: Option<Vec<Integer>>,
            skip_special_tokens: Option<bool>,
        }
        let Object(Wire { model, tokens, skip_special_tokens }) = super::fields::parse_body(body)?;
        let tokens = tokens.ok_or_else(|| InvalidRequest::field("tokens", "'tokens' is required."))?;
        Ok(Self { model, tokens, skip_special_tokens: skip_special_tokens.unwrap_or(false) })
    }

    /// The ids, each of which the model has.
    ///
    /// # Errors
    /// The first one that is none of the model's.
    pub fn token_ids(&self, model: &ModelFacts) -> Result<Vec<u32>, InvalidRequest> {
        let check = |(index, Integer(id)): (usize, &Integer)| model.check_token_id(&format!("tokens[{index}]"), *id);
        self.tokens.iter().enumerate().map(check).collect()
    }
}

/// The answer to a request to detokenize.
#[derive(Debug, Serialize)]
pub struct Detokenized {
    pub prompt: String,
}
