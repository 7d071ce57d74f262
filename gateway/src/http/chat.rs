//! `POST /v1/chat/completions`: from the body to a specification, and from a generation to the answer.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::answer::{Answer, Prepared, check_model, finish_of};
use super::frames::{DONE, write_event};
use super::respond::respond;
use crate::app::{App, Model};
use crate::chat::encode::encode;
use crate::chat::output::{Delta, OutputOptions};
use crate::generate::{Choice, GenerateSpec, Generation, Prompt};
use crate::openai::chat::response::{
    ChatChoice, ChatChunkChoice, ChatChunkWriter, ChatDelta, ChatMessage, ChatToolCall, ChunkText, write_completion,
};
use crate::openai::chat::{ChatRequest, ChatSpec};
use crate::openai::logprobs::ChatLogprobs;
use crate::openai::response::{FinishReason, ResponseHead, StopReason, Usage, item_id};
use crate::openai::{GenerationSpec, InvalidRequest, StreamSpec};
use crate::telemetry::EndpointName;

/// The endpoint.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    respond(app, EndpointName::ChatCompletions, request, prepare).await
}

fn prepare(model: &Arc<Model>, body: &[u8]) -> Result<Prepared, InvalidRequest> {
    let Specified { spec, generation, thinks } = specify(model, ChatRequest::parse(body)?)?;
    let head = model.response_head(format!("chatcmpl-{:032x}", spec.id));
    let stream = generation.stream.unwrap_or_default();
    let answer = ChatAnswer {
        writer: ChatChunkWriter::new(head.clone(), stream.include_usage || stream.continuous_usage),
        head,
        request_id: spec.id,
        stream,
        model: model.clone(),
        thinks,
        with_logprobs: generation.sampling.logprobs.is_some(),
        prompt_token_ids: generation.return_token_ids.then(|| spec.prompts[0].token_ids.clone()),
        choices: vec![Written::default(); generation.n as usize],
    };
    Ok(Prepared { spec, stream: generation.stream, answer: Box::new(answer) })
}

/// A conversation ready to be generated.
pub(super) struct Specified {
    pub spec: GenerateSpec,
    pub generation: GenerationSpec,
    /// Whether the answer begins with reasoning.
    pub thinks: bool,
}

/// Checks a chat request, whichever endpoint it came through, and renders its prompt.
///
/// # Errors
/// The first field that is wrong, by its name in a chat request.
pub(super) fn specify(model: &Model, request: ChatRequest) -> Result<Specified, InvalidRequest> {
    check_model(model, request.model())?;
    let ChatSpec { messages, encode: options, generation, rule, max_tool_calls } =
        request.validate(&model.limits, &model.facts)?;
    let dialect = model.facts.style.dialect;
    let constraint = model.compile(rule)?;
    let encoded = encode(&messages, &options, &model.tokenizer)?;
    let token_ids = model
        .spans
        .encode(&model.tokenizer, &encoded.segments, &generation.cache_salt)
        .map_err(|error| InvalidRequest::from_tokenizer(&error, "messages"))?
        .token_ids;
    let max_tokens = generation.fit_context(token_ids.len(), "messages", &model.facts)?;
    let mut spec = GenerateSpec::new(
        &generation,
        OutputOptions {
            stop: generation.stop.clone(),
            include_stop: generation.include_stop,
            starts_in_reasoning: encoded.starts_in_reasoning,
            skip_special_tokens: generation.skip_special_tokens,
            max_tool_calls,
            dialect,
        },
        vec![Prompt { token_ids, max_tokens }],
    );
    spec.constraint = constraint;
    Ok(Specified { spec, generation, thinks: encoded.starts_in_reasoning })
}

/// Writes one chat answer.
pub struct ChatAnswer {
    writer: ChatChunkWriter,
    head: ResponseHead,
    /// Ids of calls are made from it.
    request_id: u128,
    stream: StreamSpec,
    model: Arc<Model>,
    thinks: bool,
    with_logprobs: bool,
    prompt_token_ids: Option<Vec<u32>>,
    choices: Vec<Written>,
}

/// What of a choice has been written.
#[derive(Clone, Copy, Default)]
struct Written {
    role: bool,
    finish: bool,
}

impl Answer for ChatAnswer {
    fn write_step(&mut self, generation: &mut Generation, out: &mut Vec<u8>) {
        let usage = self.stream.continuous_usage.then(|| generation.usage());
        let Generation { choices, moved, .. } = generation;
        for &index in moved.iter() {
            self.write_choice(index, &mut choices[index], usage.as_ref(), out);
        }
    }

    fn write_end(&mut self, generation: &Generation, out: &mut Vec<u8>) {
        if self.stream.include_usage {
            write_event(out, |out| self.writer.write_usage(&generation.usage(), out));
        }
        out.extend_from_slice(DONE);
    }

    fn write_whole(&mut self, generation: &Generation, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let keeps_ids = self.prompt_token_ids.is_some();
        let ids: Vec<Vec<String>> = generation
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                let number = choice_number(index);
                choice.delta.calls.iter().map(|call| item_id("call", self.request_id, number, call.index)).collect()
            })
            .collect();
        let calls: Vec<Vec<ChatToolCall<'_>>> = generation
            .choices
            .iter()
            .zip(&ids)
            .map(|(choice, ids)| {
                choice
                    .delta
                    .calls
                    .iter()
                    .zip(ids)
                    .map(|(call, id)| {
                        ChatToolCall::new(call.index, id, call.name.as_deref().unwrap_or_default(), &call.arguments)
                    })
                    .collect()
            })
            .collect();
        let choices = generation.choices.iter().enumerate().map(|(index, choice)| {
            let (finish_reason, stop_reason) = self.finish_of(choice).unwrap_or((FinishReason::Abort, None));
            let reasoning = self.thinks.then_some(choice.delta.reasoning.as_str());
            ChatChoice {
                index: choice_number(index),
                message: ChatMessage::new(&choice.delta.content, reasoning, &calls[index]),
                logprobs: self
                    .with_logprobs
                    .then_some(ChatLogprobs { tokenizer: &self.model.tokenizer, tokens: &choice.logprobs }),
                finish_reason,
                stop_reason,
                token_ids: keeps_ids.then_some(choice.token_ids.as_slice()),
            }
        });
        let choices: Vec<ChatChoice<'_>> = choices.collect();
        write_completion(&self.head, &choices, &generation.usage(), self.prompt_token_ids.as_deref(), out)
    }
}

impl ChatAnswer {
    fn write_choice(&mut self, index: usize, choice: &mut Choice, usage: Option<&Usage>, out: &mut Vec<u8>) {
        let number = choice_number(index);
        if !self.choices[index].role {
            self.choices[index].role = true;
            let first = ChatChunkChoice::new(number, ChatDelta::role(self.thinks));
            write_event(out, |out| match &self.prompt_token_ids {
                Some(ids) => self.writer.write_first(&first, usage, ids, out),
                None => self.writer.write(&first, usage, out),
            });
        }
        self.write_delta(number, choice, usage, out);
        if let Some((reason, stop_reason)) = self.finish_of(choice)
            && !self.choices[index].finish
        {
            self.choices[index].finish = true;
            let last = ChatChunkChoice::finish(number, reason, stop_reason);
            write_event(out, |out| self.writer.write(&last, usage, out));
        }
    }

    /// Writes the step's text, reasoning first; what describes its tokens goes with the first of the two.
    fn write_delta(&self, number: u32, choice: &mut Choice, usage: Option<&Usage>, out: &mut Vec<u8>) {
        let mut logprobs = (self.with_logprobs && !choice.logprobs.is_empty())
            .then_some(ChatLogprobs { tokenizer: &self.model.tokenizer, tokens: &choice.logprobs });
        let mut token_ids = (!choice.token_ids.is_empty()).then_some(choice.token_ids.as_slice());
        if logprobs.is_none() && token_ids.is_none() && usage.is_none() && choice.delta.calls.is_empty() {
            let Delta { reasoning, content, .. } = &choice.delta;
            for text in [ChunkText::Reasoning(reasoning), ChunkText::Content(content)] {
                if !text.is_empty() {
                    write_event(out, |out| self.writer.write_text(number, text, out));
                }
            }
            choice.delta.clear();
            choice.logprobs.clear();
            return;
        }
        let mut write = |delta: ChatDelta<'_>| {
            let text = ChatChunkChoice {
                logprobs: logprobs.take(),
                token_ids: token_ids.take(),
                ..ChatChunkChoice::new(number, delta)
            };
            write_event(out, |out| self.writer.write(&text, usage, out));
        };
        let nothing_shows = choice.delta.is_empty();
        if !choice.delta.reasoning.is_empty() {
            write(ChatDelta::reasoning(&choice.delta.reasoning));
        }
        if !choice.delta.content.is_empty() {
            write(ChatDelta::content(&choice.delta.content));
        }
        for call in &choice.delta.calls {
            if let Some(name) = &call.name {
                let id = item_id("call", self.request_id, number, call.index);
                write(ChatDelta::tool_call(&ChatToolCall::new(call.index, &id, name, "")));
            }
            if !call.arguments.is_empty() {
                write(ChatDelta::tool_call(&ChatToolCall::arguments(call.index, &call.arguments)));
            }
        }
        if nothing_shows && (!choice.logprobs.is_empty() || !choice.token_ids.is_empty()) {
            write(ChatDelta::empty());
        }
        choice.delta.clear();
        choice.logprobs.clear();
        choice.token_ids.clear();
    }

    /// A choice that ended by itself with a whole call ended for its calls.
    fn finish_of<'a>(&self, choice: &'a Choice) -> Option<(FinishReason, Option<StopReason<'a>>)> {
        let (reason, stop_reason) = finish_of(&self.model, choice)?;
        let called = reason == FinishReason::Stop && choice.num_complete_calls() > 0;
        Some((if called { FinishReason::ToolCalls } else { reason }, stop_reason))
    }
}

/// A choice's `index`; validation keeps the number of choices far below 2³².
fn choice_number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
