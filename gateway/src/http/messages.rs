//! `POST /v1/messages` and `/v1/messages/count_tokens`: from the body to a specification, and from a generation to
//! content blocks and events. Errors of these paths have Anthropic's shape.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, header};

use super::answer::{Answer, Prepared};
use super::chat::{Specified, specify};
use super::frames::write_named_event;
use super::respond::{respond, respond_at_once};
use super::tokenize::count;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generate::{Choice, Finish, Generation};
use crate::openai::InvalidRequest;
use crate::openai::anthropic::response::{Block, BlockDelta, ErrorObject, Event, Message, Stop, StopReason};
use crate::openai::anthropic::{MessagesRequest, Purpose};
use crate::openai::response::ResponseHead;
use crate::openai::sections::{Change, Kind, Section, Sections};
use crate::telemetry::EndpointName;

/// What a stream says at its start, and when it has nothing to say.
const PING: &[u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

const PATH: &str = "/v1/messages";
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The endpoint.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    respond(app, EndpointName::Messages, request, prepare).await
}

/// `POST /v1/messages/count_tokens`: the prompt that a message would have, counted.
pub async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    respond_at_once(app, EndpointName::CountTokens, request, |model, body| {
        let MessagesRequest { chat, names } = MessagesRequest::parse(body, Purpose::Count)?;
        let num_tokens = count(model, chat).map_err(|refusal| names.rename(refusal))?;
        Ok(serde_json::json!({"input_tokens": num_tokens}))
    })
    .await
}

/// Says errors of this dialect's paths in its own shape, and the request's id under its own name.
pub async fn speak(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_ours = path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut response = next.run(request).await;
    if !is_ours {
        return response;
    }
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let headers = std::mem::take(response.headers_mut());
        response = (error.status, error_json(&error)).into_response();
        *response.headers_mut() = headers;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if let Some(id) = response.headers().get("x-request-id").cloned() {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn error_json(error: &ApiError) -> Vec<u8> {
    let object = ErrorObject::new(error.status.as_u16(), &error.message, error.param.as_deref());
    // Strings and nulls always serialise.
    serde_json::to_vec(&object).unwrap_or_default()
}

fn prepare(model: &Arc<Model>, body: &[u8]) -> Result<Prepared, InvalidRequest> {
    let MessagesRequest { chat, names } = MessagesRequest::parse(body, Purpose::Answer)?;
    let Specified { spec, generation, .. } = specify(model, chat).map_err(|refusal| names.rename(refusal))?;
    let answer = MessagesAnswer {
        head: model.response_head(format!("msg_{:032x}", spec.id)),
        request_id: spec.id,
        sections: Sections::default(),
        has_begun: false,
    };
    Ok(Prepared { spec, stream: generation.stream, answer: Box::new(answer) })
}

/// Writes one message.
pub struct MessagesAnswer {
    head: ResponseHead,
    /// Ids of calls are made from it.
    request_id: u128,
    sections: Sections,
    has_begun: bool,
}

impl Answer for MessagesAnswer {
    fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>) {
        if !self.has_begun {
            self.has_begun = true;
            let message = Message::new(&self.head, generation.usage());
            write(&Event::MessageStart { message }, out);
            out.extend_from_slice(PING);
        }
        let Some(choice) = generation.choices.first_mut() else { return };
        let (request_id, head) = (self.request_id, &self.head);
        self.sections.push(&choice.delta, &mut |index, section, change| {
            write_change(request_id, head, index, section, change, out);
        });
        choice.delta.clear();
    }

    fn write_end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        let Some(choice) = generation.choices.first() else { return };
        let (request_id, head) = (self.request_id, &self.head);
        self.sections.close(&mut |index, section, change| {
            write_change(request_id, head, index, section, change, out);
        });
        write(&Event::MessageDelta { delta: stop_of(choice), usage: generation.usage().into() }, out);
        write(&Event::MessageStop, out);
    }

    fn write_error(&mut self, _: &Generation, error: &ApiError, out: &mut Vec<u8>) {
        write_named_event(out, "error", |out| {
            out.extend_from_slice(&error_json(error));
            Ok(())
        });
    }

    fn keep_alive(&self) -> &'static [u8] {
        PING
    }

    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let Some(choice) = generation.choices.first() else { return Ok(()) };
        self.sections.push(&choice.delta, &mut |_, _, _| ());
        let mut message = Message::new(&self.head, generation.usage());
        let blocks = self.sections.list().iter().map(|section| Block::whole(self.request_id, &self.head, section));
        message.content = blocks.collect();
        message.stop = stop_of(choice);
        serde_json::to_writer(out, &message)
    }
}

fn write(event: &Event<'_>, out: &mut Vec<u8>) {
    write_named_event(out, event.name(), |out| serde_json::to_writer(out, event));
}

fn write_change(
    request_id: u128,
    head: &ResponseHead,
    index: usize,
    section: &Section,
    change: Change<'_>,
    out: &mut Vec<u8>,
) {
    let event = match change {
        Change::Opened => Event::ContentBlockStart { index, content_block: Block::empty(request_id, section) },
        Change::Grew(text) => Event::ContentBlockDelta { index, delta: BlockDelta::of(&section.kind, text) },
        Change::Closed => {
            if section.kind == Kind::Reasoning {
                let delta = BlockDelta::SignatureDelta { signature: &head.id };
                write(&Event::ContentBlockDelta { index, delta }, out);
            }
            Event::ContentBlockStop { index }
        }
    };
    write(&event, out);
}

/// Why a choice that has ended did so. One that ended by itself with a whole call ended for its calls.
fn stop_of(choice: &Choice) -> Stop<'_> {
    let called = choice.num_complete_calls() > 0;
    let (reason, stop_sequence) = match &choice.finish {
        Some(Finish::StopToken(_) | Finish::StopString(_)) if called => (StopReason::ToolUse, None),
        Some(Finish::StopString(text)) => (StopReason::StopSequence, Some(text.as_str())),
        Some(Finish::StopToken(_)) => (StopReason::EndTurn, None),
        Some(Finish::Length) => (StopReason::MaxTokens, None),
        Some(Finish::Abort) | None => (StopReason::Abort, None),
    };
    Stop { stop_reason: Some(reason), stop_sequence }
}
