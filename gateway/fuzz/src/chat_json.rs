//! The body of a chat request: it is refused with an error object, or it becomes a prompt that says what it says.

use std::sync::LazyLock;

use baleen_gateway::chat::encode::{EncodeError, encode};
use baleen_gateway::chat::style::Style;
use baleen_gateway::error::ApiError;
use baleen_gateway::openai::chat::ChatRequest;
use baleen_gateway::openai::{InvalidRequest, Limits, ModelFacts};
use baleen_gateway::text::tokenizer::Segment;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::input;

/// The body as it came.
pub fn run(body: &[u8]) {
    static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits::load().unwrap());
    let model = ModelFacts { vocab_size: input::VOCAB_SIZE, context_len: 1 << 17, style: Style::V32 };
    let spec = ChatRequest::parse(body).and_then(|request| request.validate(&LIMITS, &model));
    let spec = match spec {
        Ok(spec) => spec,
        Err(error) => return check_refusal(error),
    };
    assert!(serde_json::from_slice::<IgnoredAny>(body).is_ok(), "taken, but it is no JSON");
    let tokenizer = input::tokenizer();
    match encode(&spec.messages, &spec.encode, &tokenizer) {
        Ok(encoded) => check_prompt(&encoded.segments),
        Err(error @ EncodeError::Invalid { .. }) => check_refusal(error.into()),
        Err(EncodeError::Tokenizer(error)) => panic!("the tokenizer has every control token: {error}"),
    }
}

/// A refusal is the client's fault, and says so in one object.
fn check_refusal(error: InvalidRequest) {
    assert!((400..500).contains(&error.status()) || error.status() == 501, "{error:?}");
    let object: Value = serde_json::from_slice(&ApiError::from(error).to_json()).unwrap();
    assert!(object["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{object}");
}

/// The ids spell the prompt, and control tokens stand where the encoding put them and nowhere else.
fn check_prompt(segments: &[Segment]) {
    let tokenizer = input::tokenizer();
    let ids = tokenizer.encode_segments(segments).unwrap();
    let mut rest = &ids[..];
    for segment in segments {
        let text = match segment {
            Segment::Control(id) => {
                assert_eq!(rest.first(), Some(id));
                rest = &rest[1..];
                continue;
            }
            Segment::Text(text) => text.as_bytes(),
        };
        let mut spelled = Vec::with_capacity(text.len());
        while spelled.len() < text.len() {
            spelled.extend_from_slice(tokenizer.token_bytes(rest[0]));
            rest = &rest[1..];
        }
        assert_eq!(spelled, text);
    }
    assert!(rest.is_empty(), "{} tokens too many", rest.len());
}
