//! How the answers of the endpoints differ: each writes its own shape of the same generation.

use super::frames::write_event;
use crate::app::Model;
use crate::error::ApiError;
use crate::generate::{Choice, Finish, GenerateSpec, Generation};
use crate::openai::response::{FinishReason, StopReason};
use crate::openai::{InvalidRequest, StreamSpec};

/// A validated request, ready to be generated, and how it is to be answered.
pub struct Prepared {
    pub spec: GenerateSpec,
    /// Absent: one answer, not streamed.
    pub stream: Option<StreamSpec>,
    pub answer: Box<dyn Answer>,
}

/// How an answer is written. It holds what differs between the endpoints.
pub trait Answer: Send {
    /// Appends the events that the last step brought.
    fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>);

    /// Appends what follows the last choice's end: usage, where asked for, and the mark that the stream is whole.
    fn write_end(&mut self, generation: &Generation, out: &mut Vec<u8>);

    /// Appends the event of an error after the headers have left; nothing follows it.
    fn write_error(&mut self, _: &Generation, error: &ApiError, out: &mut Vec<u8>) {
        write_event(out, |out| {
            out.extend_from_slice(&error.to_json());
            Ok(())
        });
    }

    /// The whole answer as JSON.
    ///
    /// # Errors
    /// A part of it cannot be serialised.
    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()>;

    /// What a stream says that has nothing to say.
    fn keep_alive(&self) -> &'static [u8] {
        b": keep-alive\n\n"
    }
}

/// The model that the request names must be the one that is served.
///
/// # Errors
/// 404 with `param` "model".
pub fn check_model(model: &Model, asked: Option<&str>) -> Result<(), InvalidRequest> {
    match asked {
        Some(name) if name != model.name => Err(InvalidRequest::model_not_found(name)),
        _ => Ok(()),
    }
}

/// Why a choice ended, in OpenAI's terms. A stop token of the request, unlike the model's own, is named.
#[must_use]
pub fn finish_of<'a>(model: &Model, choice: &'a Choice) -> Option<(FinishReason, Option<StopReason<'a>>)> {
    Some(match choice.finish.as_ref()? {
        Finish::StopToken(id) => {
            let is_own = model.info.eos_token_ids.contains(id);
            (FinishReason::Stop, (!is_own).then_some(StopReason::TokenId(*id)))
        }
        Finish::StopString(text) => (FinishReason::Stop, Some(StopReason::Text(text))),
        Finish::Length => (FinishReason::Length, None),
        Finish::Abort => (FinishReason::Abort, None),
    })
}
