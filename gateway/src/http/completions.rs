//! `POST /v1/completions`: from the body to a specification, and from a generation to the answer.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::answer::{Answer, Prepared, check_model, finish_of};
use super::frames::{DONE, write_event};
use super::respond::respond;
use crate::app::{App, Model};
use crate::chat::output::OutputOptions;
use crate::generate::{Choice, Finish, GenerateSpec, Generation, Prompt};
use crate::openai::completions::response::{CompletionChoice, CompletionChunkWriter, write_completion};
use crate::openai::completions::{CompletionRequest, CompletionSpec, PromptSource};
use crate::openai::logprobs::{CompletionLogprobRecorder, CompletionLogprobs, TokenLogprob};
use crate::openai::response::{ResponseHead, Usage};
use crate::openai::{GenerationSpec, InvalidRequest, StreamSpec};
use crate::telemetry::EndpointName;
use crate::text::detokenizer::Detokenizer;
use crate::text::tokenizer::Tokenizer;

/// The endpoint.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    respond(app, EndpointName::Completions, request, prepare).await
}

fn prepare(model: &Arc<Model>, body: &[u8]) -> Result<Prepared, InvalidRequest> {
    let request = CompletionRequest::parse(body)?;
    check_model(model, request.model())?;
    let CompletionSpec { prompts: sources, echo, rule, generation } = request.validate(&model.limits, &model.facts)?;
    let echoes = echo.then(|| sources.iter().map(|source| shown(&model.tokenizer, source)).collect::<Vec<String>>());
    let prompts = prompts(model, sources, &generation)?;
    let output = OutputOptions {
        stop: generation.stop.clone(),
        include_stop: generation.include_stop,
        starts_in_reasoning: false,
        skip_special_tokens: generation.skip_special_tokens,
        ..OutputOptions::default()
    };
    let keeps_prompts = generation.return_token_ids || (echo && generation.sampling.logprobs.is_some());
    let num_choices = prompts.len() * generation.n as usize;
    let kept = keeps_prompts.then(|| prompts.iter().map(|prompt| prompt.token_ids.clone()).collect());
    let mut spec = GenerateSpec::new(&generation, output, prompts);
    spec.constraint = model.compile(rule)?;
    let head = model.response_head(format!("cmpl-{:032x}", spec.id));
    let stream = generation.stream.unwrap_or_default();
    let answer = CompletionAnswer {
        writer: CompletionChunkWriter::new(head.clone(), stream.include_usage || stream.continuous_usage),
        head,
        stream,
        model: model.clone(),
        echoes,
        prompt_token_ids: kept,
        with_token_ids: generation.return_token_ids,
        with_logprobs: generation.sampling.logprobs.is_some(),
        choices: (0..num_choices).map(|_| Written::default()).collect(),
    };
    Ok(Prepared { spec, stream: generation.stream, answer: Box::new(answer) })
}

fn prompts(
    model: &Model,
    sources: Vec<PromptSource>,
    generation: &GenerationSpec,
) -> Result<Vec<Prompt>, InvalidRequest> {
    let is_list = sources.len() > 1;
    let prompt = |(index, source)| {
        let param = if is_list { format!("prompt[{index}]") } else { "prompt".to_owned() };
        let token_ids = match source {
            PromptSource::Ids(ids) => ids,
            PromptSource::Text(text) => {
                model.tokenizer.encode_raw(&text).map_err(|error| InvalidRequest::from_tokenizer(&error, &param))?
            }
        };
        let max_tokens = generation.fit_context(token_ids.len(), &param, &model.facts)?;
        Ok(Prompt { token_ids, max_tokens })
    };
    sources.into_iter().enumerate().map(prompt).collect()
}

/// A prompt as `echo` shows it.
fn shown(tokenizer: &Tokenizer, source: &PromptSource) -> String {
    match source {
        PromptSource::Text(text) => text.clone(),
        PromptSource::Ids(ids) => {
            let (mut detokenizer, mut text) = (Detokenizer::new(), String::new());
            ids.iter().for_each(|&id| detokenizer.push(tokenizer.token_bytes(id), &mut text));
            detokenizer.finish(&mut text);
            text
        }
    }
}

/// Writes one completion answer.
pub struct CompletionAnswer {
    writer: CompletionChunkWriter,
    head: ResponseHead,
    stream: StreamSpec,
    model: Arc<Model>,
    /// Text of each prompt, where it is repeated.
    echoes: Option<Vec<String>>,
    /// Ids of each prompt, where they are scored or shown.
    prompt_token_ids: Option<Vec<Vec<u32>>>,
    with_token_ids: bool,
    with_logprobs: bool,
    choices: Vec<Written>,
}

/// What of a choice has been written.
#[derive(Default)]
struct Written {
    prompt: bool,
    finish: bool,
    recorder: CompletionLogprobRecorder,
}

impl Answer for CompletionAnswer {
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
        let mut parts = Vec::with_capacity(generation.choices.len());
        for (index, choice) in generation.choices.iter().enumerate() {
            parts.push((self.text(true, choice), self.logprobs(index, true, choice)));
        }
        let choices = generation.choices.iter().zip(&parts).enumerate().map(|(index, (choice, (text, logprobs)))| {
            let finish = finish_of(&self.model, choice);
            CompletionChoice {
                logprobs: logprobs.as_ref(),
                finish_reason: finish.map(|(reason, _)| reason),
                stop_reason: finish.and_then(|(_, reason)| reason),
                token_ids: self.with_token_ids.then_some(choice.token_ids.as_slice()),
                prompt_token_ids: self.shown_prompt_ids(choice),
                ..CompletionChoice::new(choice_number(index), text)
            }
        });
        let choices: Vec<CompletionChoice<'_>> = choices.collect();
        write_completion(&self.head, &choices, &generation.usage(), out)
    }
}

impl CompletionAnswer {
    fn write_choice(&mut self, index: usize, choice: &mut Choice, usage: Option<&Usage>, out: &mut Vec<u8>) {
        if choice.num_tokens == 0 && choice.finish.is_none() {
            // Scores of a prompt come chunk by chunk; they are shown together.
            return;
        }
        let is_first = !std::mem::replace(&mut self.choices[index].prompt, true);
        let finish = finish_of(&self.model, choice).filter(|_| !self.choices[index].finish);
        self.choices[index].finish |= finish.is_some();
        let text = self.text(is_first, choice);
        let logprobs = self.logprobs(index, is_first, choice);
        let shows_tokens = logprobs.as_ref().is_some_and(|scores| !scores.tokens.is_empty()) || self.with_token_ids;
        if text.is_empty() && finish.is_none() && !shows_tokens {
            return;
        }
        let chunk = CompletionChoice {
            logprobs: logprobs.as_ref(),
            finish_reason: finish.map(|(reason, _)| reason),
            stop_reason: finish.and_then(|(_, reason)| reason),
            token_ids: self.with_token_ids.then_some(choice.token_ids.as_slice()),
            prompt_token_ids: self.shown_prompt_ids(choice).filter(|_| is_first),
            ..CompletionChoice::new(choice_number(index), &text)
        };
        write_event(out, |out| self.writer.write(&chunk, usage, out));
        choice.delta.clear();
        choice.logprobs.clear();
        choice.token_ids.clear();
    }

    /// Text of the step, behind the prompt's where that is repeated.
    fn text(&self, is_first: bool, choice: &Choice) -> String {
        match &self.echoes {
            Some(echoes) if is_first => {
                let prompt = &echoes[choice.prompt_index];
                let mut text = String::with_capacity(prompt.len() + choice.delta.content.len());
                text.push_str(prompt);
                text.push_str(&choice.delta.content);
                text
            }
            _ => choice.delta.content.clone(),
        }
    }

    /// Log-probabilities of the step's tokens, behind the prompt's where that is repeated.
    fn logprobs(&mut self, index: usize, is_first: bool, choice: &Choice) -> Option<CompletionLogprobs> {
        if !self.with_logprobs {
            return None;
        }
        let tokenizer = &self.model.tokenizer;
        let recorder = &mut self.choices[index].recorder;
        if is_first && self.echoes.is_some() {
            let prompt = self.prompt_token_ids.as_ref().map(|prompts| prompts[choice.prompt_index].as_slice());
            // Nothing predicts the first token.
            if let Some(&token_id) = prompt.and_then(<[u32]>::first) {
                recorder.record(tokenizer, &TokenLogprob { token_id, logprob: None, top: Vec::new() }, true);
            }
            choice.prompt_logprobs.iter().for_each(|token| recorder.record(tokenizer, token, true));
        }
        let ends_invisibly = matches!(choice.finish, Some(Finish::StopToken(_)));
        for (place, token) in choice.logprobs.iter().enumerate() {
            let is_stop_token = ends_invisibly && place + 1 == choice.logprobs.len();
            recorder.record(tokenizer, token, !is_stop_token);
        }
        Some(recorder.take())
    }

    fn shown_prompt_ids(&self, choice: &Choice) -> Option<&[u32]> {
        let prompts = self.prompt_token_ids.as_ref().filter(|_| self.with_token_ids)?;
        Some(&prompts[choice.prompt_index])
    }
}

/// A choice's `index`; validation keeps the number of choices far below 2³².
fn choice_number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
