//! `POST /v1/tokenize` and `/v1/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::answer::check_model;
use super::respond::respond_at_once;
use crate::app::{App, Model};
use crate::chat::control::BEGIN_OF_SENTENCE;
use crate::chat::encode::{Ending, encode};
use crate::openai::InvalidRequest;
use crate::openai::chat::ChatRequest;
use crate::openai::tokenize::{DetokenizeRequest, Detokenized, Source, TokenizeRequest, Tokenized};
use crate::telemetry::EndpointName;
use crate::text::detokenizer::Detokenizer;
use crate::text::tokenizer::Tokenizer;

/// `POST /v1/tokenize`
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    respond_at_once(app, EndpointName::Tokenize, request, |model, body| {
        let TokenizeRequest { model: name, source } = TokenizeRequest::parse(body)?;
        check_model(model, name.as_deref())?;
        let tokens = match source {
            Source::Prompt { text, add_special_tokens } => prompt(&model.tokenizer, &text, add_special_tokens)?,
            Source::Chat { request, add_generation_prompt } => conversation(model, *request, add_generation_prompt)?,
        };
        Ok(Tokenized { count: tokens.len(), tokens, max_model_len: model.facts.context_len })
    })
    .await
}

/// `POST /v1/detokenize`
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    respond_at_once(app, EndpointName::Detokenize, request, |model, body| {
        let request = DetokenizeRequest::parse(body)?;
        check_model(model, request.model.as_deref())?;
        let ids = request.token_ids(&model.facts)?;
        let (mut detokenizer, mut prompt) = (Detokenizer::new(), String::new());
        for id in ids {
            if !(request.skip_special_tokens && model.tokenizer.is_special(id)) {
                detokenizer.push(model.tokenizer.token_bytes(id), &mut prompt);
            }
        }
        detokenizer.finish(&mut prompt);
        Ok(Detokenized { prompt })
    })
    .await
}

fn prompt(tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, InvalidRequest> {
    let refuse = |error| InvalidRequest::from_tokenizer(&error, "prompt");
    let mut tokens = Vec::new();
    if add_special_tokens {
        tokens.push(tokenizer.control_id(BEGIN_OF_SENTENCE).map_err(refuse)?);
    }
    tokens.append(&mut tokenizer.encode_raw(text).map_err(refuse)?);
    Ok(tokens)
}

/// The prompt of a chat request, of which only what shapes the prompt counts.
fn conversation(model: &Model, request: ChatRequest, opens_turn: bool) -> Result<Vec<u32>, InvalidRequest> {
    check_model(model, request.model())?;
    let mut conversation = request.into_conversation(&model.limits, model.facts.style, true)?;
    if !opens_turn && conversation.encode.ending == Ending::OpenTurn {
        conversation.encode.ending = Ending::Closed;
    }
    let encoded = encode(&conversation.messages, &conversation.encode, &model.tokenizer)?;
    let tokens = model.tokenizer.encode_segments(&encoded.segments);
    tokens.map_err(|error| InvalidRequest::from_tokenizer(&error, "messages"))
}

/// How many tokens a chat request's prompt has.
///
/// # Errors
/// A message, a tool or a switch is wrong, by its name in a chat request.
pub(super) fn count(model: &Model, request: ChatRequest) -> Result<usize, InvalidRequest> {
    Ok(conversation(model, request, true)?.len())
}
