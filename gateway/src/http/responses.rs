//! `POST /v1/responses`: from the body to a specification, and from a generation to items and events.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response as HttpResponse;
use serde_json::{Map, Value};

use super::answer::{Answer, Prepared};
use super::chat::{Specified, specify};
use super::frames::write_named_event;
use super::respond::respond;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generate::{Choice, Finish, Generation};
use crate::openai::InvalidRequest;
use crate::openai::logprobs::{ChatLogprobs, TokenLogprob};
use crate::openai::response::ResponseHead;
use crate::openai::responses::ResponsesRequest;
use crate::openai::responses::response::{
    Event, Growth, IncompleteDetails, Item, News, Part, Response, ResponseError, Spot, Status, TextLogprobs, Whole,
    section_id,
};
use crate::openai::sections::{Change, Kind, Report, Section, Sections};
use crate::telemetry::EndpointName;

/// The endpoint.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> HttpResponse {
    respond(app, EndpointName::Responses, request, prepare).await
}

fn prepare(model: &Arc<Model>, body: &[u8]) -> Result<Prepared, InvalidRequest> {
    let ResponsesRequest { chat, names, echo } = ResponsesRequest::parse(body)?;
    let Specified { spec, generation, thinks } = specify(model, chat).map_err(|refusal| names.rename(refusal))?;
    let with_logprobs = generation.sampling.logprobs.is_some();
    if with_logprobs && (thinks || spec.output.max_tool_calls > 0) {
        let message = "'include' asks for log-probabilities, which are not implemented for answers that think or may \
                       call functions.";
        return Err(InvalidRequest::not_implemented("include", message));
    }
    let answer = ResponsesAnswer {
        head: model.response_head(format!("resp_{:032x}", spec.id)),
        request_id: spec.id,
        echo,
        model: model.clone(),
        sections: Sections::default(),
        logprobs: with_logprobs.then(Vec::new),
        num_shown_logprobs: 0,
        num_events: 0,
    };
    Ok(Prepared { spec, stream: generation.stream, answer: Box::new(answer) })
}

/// Writes one response.
pub struct ResponsesAnswer {
    head: ResponseHead,
    /// Ids of items are made from it.
    request_id: u128,
    echo: Map<String, Value>,
    model: Arc<Model>,
    sections: Sections,
    /// Of all tokens so far, where asked for.
    logprobs: Option<Vec<TokenLogprob>>,
    /// How many of them have been sent with a piece of text.
    num_shown_logprobs: usize,
    num_events: u64,
}

impl Answer for ResponsesAnswer {
    fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>) {
        self.begin(out);
        let Some(choice) = generation.choices.first_mut() else { return };
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.append(&mut choice.logprobs);
        }
        self.fold(out, |sections, report| sections.push(&choice.delta, report), Status::Completed);
        choice.delta.clear();
    }

    fn write_end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        let Some(choice) = generation.choices.first() else { return };
        let (status, _) = status_of(choice);
        self.fold(out, |sections, report| sections.close(report), status);
        let response = self.response(choice, generation);
        let news = match status {
            Status::Completed => News::Completed { response: &response },
            _ => News::Incomplete { response: &response },
        };
        write_news(self.num_events, &news, out);
    }

    fn write_error(&mut self, generation: &Generation, error: &ApiError, out: &mut Vec<u8>) {
        self.begin(out);
        self.fold(out, |sections, report| sections.close(report), Status::Incomplete);
        let mut response = Response::new(&self.head, &self.echo, Status::Failed);
        response.output = self.items(Status::Incomplete);
        response.usage = Some(generation.usage().into());
        response.error = Some(ResponseError { code: "server_error", message: &error.message });
        write_news(self.num_events, &News::Failed { response: &response }, out);
    }

    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let Some(choice) = generation.choices.first() else { return Ok(()) };
        self.sections.push(&choice.delta, &mut |_, _, _| ());
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend_from_slice(&choice.logprobs);
        }
        serde_json::to_writer(out, &self.response(choice, generation))
    }
}

impl ResponsesAnswer {
    /// The response that has ended as `choice` did.
    fn response<'a>(&'a self, choice: &Choice, generation: &Generation) -> Response<'a> {
        let (status, details) = status_of(choice);
        let mut response = Response::new(&self.head, &self.echo, status);
        response.incomplete_details = details;
        response.output = self.items(status);
        response.usage = Some(generation.usage().into());
        response
    }

    /// Every section as an item; the last one ended with this status.
    fn items(&self, last: Status) -> Vec<Item<'_>> {
        let sections = self.sections.list();
        let logprobs = TextLogprobs(self.scores(self.logprobs.as_deref()));
        let item = |(place, section)| {
            let status = if place + 1 == sections.len() { last } else { Status::Completed };
            Item::of(self.request_id, place, section, status, logprobs)
        };
        sections.iter().enumerate().map(item).collect()
    }

    fn scores<'a>(&'a self, tokens: Option<&'a [TokenLogprob]>) -> Option<ChatLogprobs<'a>> {
        tokens.map(|tokens| ChatLogprobs { tokenizer: &self.model.tokenizer, tokens })
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if self.num_events > 0 {
            return;
        }
        let response = Response::new(&self.head, &self.echo, Status::InProgress);
        write_news(0, &News::Created { response: &response }, out);
        write_news(1, &News::InProgress { response: &response }, out);
        self.num_events = 2;
    }

    /// Lets `change` change the sections and writes the events of it; a section that it closes ends as `status`.
    fn fold(&mut self, out: &mut Vec<u8>, change: impl FnOnce(&mut Sections, &mut Report<'_>), status: Status) {
        let mut sections = std::mem::take(&mut self.sections);
        let all = self.logprobs.take();
        let mut num_shown = self.num_shown_logprobs;
        let mut num_events = self.num_events;
        let mut report = |place: usize, section: &Section, change: Change<'_>| {
            let mut write = |news: News<'_>| {
                write_news(num_events, &news, out);
                num_events += 1;
            };
            let shown = match (change, &section.kind) {
                (Change::Grew(_), Kind::Text) => {
                    let fresh = all.as_deref().map(|all| &all[num_shown..]);
                    num_shown += fresh.map_or(0, <[_]>::len);
                    fresh
                }
                _ => all.as_deref(),
            };
            let logprobs = TextLogprobs(self.scores(shown));
            write_change(self.request_id, place, section, change, status, logprobs, &mut write);
        };
        change(&mut sections, &mut report);
        self.sections = sections;
        self.num_shown_logprobs = num_shown;
        self.num_events = num_events;
        self.logprobs = all;
    }
}

fn write_news(sequence_number: u64, news: &News<'_>, out: &mut Vec<u8>) {
    let event = Event::new(sequence_number, news);
    write_named_event(out, news.name(), |out| serde_json::to_writer(out, &event));
}

/// The events of one change of a section, in the order that clients count on.
fn write_change(
    request_id: u128,
    place: usize,
    section: &Section,
    change: Change<'_>,
    status: Status,
    logprobs: TextLogprobs<'_>,
    write: &mut impl FnMut(News<'_>),
) {
    let id = section_id(request_id, place, section);
    let content_index = (!matches!(section.kind, Kind::Call { .. })).then_some(0);
    let spot = Spot { item_id: &id, output_index: place, content_index };
    match change {
        Change::Opened => {
            let item = Item::of(request_id, place, section, Status::InProgress, logprobs);
            write(News::ItemAdded { output_index: place, item });
            if let Some(part) = Part::of(section, TextLogprobs(None)) {
                write(News::PartAdded { spot, part });
            }
        }
        Change::Grew(delta) => write(match section.kind {
            Kind::Reasoning => News::ReasoningDelta(Growth { spot, delta, logprobs: None }),
            Kind::Text => News::TextDelta(Growth { spot, delta, logprobs: Some(logprobs) }),
            Kind::Call { .. } => News::ArgumentsDelta(Growth { spot, delta, logprobs: None }),
        }),
        Change::Closed => {
            write(match &section.kind {
                Kind::Reasoning => News::ReasoningDone(Whole { spot, text: &section.text, logprobs: None }),
                Kind::Text => News::TextDone(Whole { spot, text: &section.text, logprobs: Some(logprobs) }),
                Kind::Call { name, .. } => News::ArgumentsDone { spot, name, arguments: &section.text },
            });
            if let Some(part) = Part::of(section, logprobs) {
                write(News::PartDone { spot, part });
            }
            let item = Item::of(request_id, place, section, status, logprobs);
            write(News::ItemDone { output_index: place, item });
        }
    }
}

/// How a response ends whose choice has ended.
fn status_of(choice: &Choice) -> (Status, Option<IncompleteDetails>) {
    match choice.finish {
        Some(Finish::StopToken(_) | Finish::StopString(_)) => (Status::Completed, None),
        Some(Finish::Length) => (Status::Incomplete, Some(IncompleteDetails { reason: "max_output_tokens" })),
        Some(Finish::Abort) | None => (Status::Incomplete, Some(IncompleteDetails { reason: "abort" })),
    }
}
