//! The one pipeline from a validated request to its events: choose its workers, submit, fold what comes back into text,
//! and go on elsewhere when a worker is lost.
//!
//! HTTP types never enter here. A `Generation` is pulled by whoever writes the response, so a client that reads slowly
//! slows nobody but itself; dropping it, wherever that happens, aborts in the workers what has not ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use self::limits::ReplayLimits;
use self::needs::needs;
use self::place::Search;
use self::trials::Trials;
use crate::chat::constraint::Constraint;
use crate::chat::output::OutputOptions;
use crate::openai::{GenerationSpec, SamplingSpec};
use crate::route::Router;
use crate::route::policy::Policies;
use crate::telemetry::Metrics;
use crate::text::tokenizer::Tokenizer;
use crate::worker::Failure;
use crate::worker::mailbox::{Cut, Mailbox};
use crate::worker::pool::{Condition, Pool};
use crate::worker::submit::{Sample, Submission};

mod attempts;
mod generation;
mod limits;
mod needs;
mod pace;
mod place;
mod retained;
mod trials;

pub use generation::{Choice, Finish, Generation, Progress};

/// A request as the pipeline sees it: token ids in, and how to turn tokens back into text.
#[derive(Clone, Debug)]
pub struct GenerateSpec {
    /// Names the request to clients and, as the request id of its first choice, to workers.
    pub id: u128,
    /// Each is continued `n` times; choice `p * n + s` is sample `s` of prompt `p`.
    pub prompts: Vec<Prompt>,
    pub n: u32,
    /// `max_tokens` is each prompt's own.
    pub sampling: SamplingSpec,
    pub output: OutputOptions,
    /// What the worker enforces, from the end of reasoning on.
    pub constraint: Option<Enforced>,
    /// Whether choices keep their token ids.
    pub keeps_token_ids: bool,
    pub priority: i32,
    pub deadline_ms: Option<u64>,
    pub cache_salt: String,
    /// Hash of what names the session, if anything does; see `session`.
    pub session: Option<u64>,
}

impl GenerateSpec {
    /// What `generation` asks for, of these prompts, under a new id.
    #[must_use]
    pub fn new(generation: &GenerationSpec, output: OutputOptions, prompts: Vec<Prompt>) -> Self {
        Self {
            id: rand::random(),
            prompts,
            n: generation.n,
            sampling: generation.sampling.clone(),
            output,
            constraint: None,
            keeps_token_ids: generation.return_token_ids,
            priority: generation.priority,
            deadline_ms: generation.deadline_ms,
            cache_salt: generation.cache_salt.clone(),
            session: generation.session.as_deref().map(|name| xxh3_64(name.as_bytes())),
        }
    }
}

/// A constraint, and the request's field that asks for it.
#[derive(Clone, Debug)]
pub struct Enforced {
    pub constraint: Arc<Constraint>,
    pub field: String,
}

impl Enforced {
    /// Says a worker's complaint about the constraint in the client's terms.
    fn explain(&self, mut failure: Failure) -> Failure {
        let ability = self.constraint.ability();
        if failure.field.as_deref() == Some(ability) {
            let cause =
                failure.message.strip_prefix(ability).map_or(&*failure.message, |rest| rest.trim_start_matches(": "));
            failure.message = format!("'{}': {cause}", self.field);
            failure.field = Some(self.field.clone());
        }
        failure
    }
}

/// One prompt, and how far it may be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub token_ids: Vec<u32>,
    pub max_tokens: u32,
}

/// Why a generation ended without an answer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GenerateError {
    #[error("{0}")]
    NoWorker(String),
    /// No worker can do what the request's field asks for.
    #[error("'{field}' is not implemented by this server: no worker has the ability '{ability}', which it takes.")]
    Unable { field: String, ability: &'static str },
    #[error("{0}")]
    Worker(Failure),
    #[error("The client did not read its answer fast enough, so the request was ended.")]
    SlowClient,
}

/// Starts generations, and knows those in progress.
pub struct Generator {
    pool: Arc<Pool>,
    metrics: Arc<Metrics>,
    router: Router,
    limits: Arc<ReplayLimits>,
    trials: Arc<Trials>,
    in_progress: Mutex<HashMap<u128, Weak<Mailbox>>>,
}

impl Generator {
    #[must_use]
    pub fn new(pool: Arc<Pool>, policies: Policies, metrics: Arc<Metrics>) -> Arc<Self> {
        let router = Router::new(policies, pool.prefixes.clone());
        Arc::new(Self {
            pool,
            metrics,
            router,
            limits: Arc::default(),
            trials: Arc::default(),
            in_progress: Mutex::default(),
        })
    }

    /// Submits every choice of `spec` to one worker, or to one pair, that has all it takes. `arrived` is when the
    /// client's request came in. Waits a moment where nobody can serve it and somebody is about to.
    ///
    /// # Errors
    /// No worker is ready, or none of them can do all that is asked for.
    pub async fn start(
        self: &Arc<Self>,
        spec: GenerateSpec,
        tokenizer: &Arc<Tokenizer>,
        arrived: Instant,
    ) -> Result<Generation, GenerateError> {
        let mut generation = Generation::new(self.clone(), &spec, tokenizer, arrived);
        for prompt in &spec.prompts {
            let num_tokens = prompt.token_ids.len();
            self.metrics.prompt_tokens.increment(num_tokens as u64);
            self.metrics.request_prompt_tokens.record(num_tokens as f64);
        }
        let needs = needs(&spec);
        let submissions = submissions(spec);
        let now = Instant::now();
        let is_poison = |submission: &Submission| self.limits.is_poison(|| retained::fingerprint(submission), now);
        if submissions.iter().any(is_poison) {
            return Err(GenerateError::Worker(Failure::poison()));
        }
        let search = Search { submissions: &submissions, needs: &needs, avoided: &[] };
        let place = || self.place_newcomer(&search, generation.mailbox());
        let placements = self.pool.attempt_while_recovering(place).await?;
        self.limits.note_request(Instant::now());
        self.lock().insert(generation.id, Arc::downgrade(generation.mailbox()));
        generation.hold(placements, submissions, needs);
        Ok(generation)
    }

    /// Ends the generation with this id as aborted; false where there is none.
    pub fn abort(&self, id: u128) -> bool {
        let mailbox = self.lock().get(&id).and_then(Weak::upgrade);
        mailbox.inspect(|mailbox| mailbox.cut(Cut::Aborted)).is_some()
    }

    /// Ends every generation as aborted; returns how many there were.
    pub fn abort_all(&self) -> usize {
        let mailboxes: Vec<_> = self.lock().values().filter_map(Weak::upgrade).collect();
        mailboxes.iter().for_each(|mailbox| mailbox.cut(Cut::Aborted));
        mailboxes.len()
    }

    /// One sentence for a client that finds no worker.
    #[must_use]
    pub fn why_not_ready(&self) -> String {
        format!("No worker is ready ({}). Try again shortly.", self.reasons())
    }

    /// What keeps each worker that is not ready.
    fn reasons(&self) -> String {
        let slots = self.pool.slots();
        let reasons = slots.iter().filter_map(|slot| match slot.condition() {
            Condition::Ready => None,
            Condition::Draining => Some(format!("{} is shutting down", slot.name)),
            Condition::NotReady(reason) | Condition::Refused(reason) => Some(format!("{}: {reason}", slot.name)),
        });
        reasons.chain(self.pool.unpaired()).collect::<Vec<_>>().join("; ")
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Weak<Mailbox>>> {
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One submission per choice. A client's seed goes to sample 0 as it is; the others get seeds derived from it, so that
/// samples differ and the whole request is reproducible.
fn submissions(spec: GenerateSpec) -> Vec<Submission> {
    let GenerateSpec {
        id,
        prompts,
        n,
        mut sampling,
        priority,
        deadline_ms,
        cache_salt,
        session,
        constraint,
        output,
        ..
    } = spec;
    let seed = sampling.seed.unwrap_or_else(rand::random);
    let cache_salt: Arc<str> = cache_salt.into();
    let mut submissions = Vec::with_capacity(prompts.len() * n as usize);
    for Prompt { token_ids, max_tokens } in prompts {
        sampling.max_tokens = Some(max_tokens);
        let prompt_token_ids = Arc::new(token_ids);
        let group_id = if submissions.is_empty() { id } else { rand::random() };
        for index in 0..n {
            sampling.seed = Some(sample_seed(seed, index));
            submissions.push(Submission {
                choice: u32::try_from(submissions.len()).unwrap_or(u32::MAX),
                request_id: if index == 0 { group_id } else { rand::random() },
                attempt: 0,
                prompt_token_ids: prompt_token_ids.clone(),
                resumed_token_ids: Vec::new(),
                sampling: sampling.clone(),
                sample: Sample { group_id, index, size: n },
                priority,
                deadline_ms,
                cache_salt: cache_salt.clone(),
                session,
                constraint: constraint.as_ref().map(|enforced| enforced.constraint.clone()),
                starts_in_reasoning: output.starts_in_reasoning,
            });
        }
    }
    submissions
}

/// Seed of sample `index`: the client's own for the first, then the SplitMix64 sequence that starts there.
fn sample_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut mixed = seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::sample_seed;

    #[test]
    fn samples_get_seeds_of_their_own_and_the_first_keeps_the_clients() {
        let seeds: Vec<u64> = (0..4).map(|index| sample_seed(7, index)).collect();
        assert_eq!(seeds[0], 7);
        assert_eq!(seeds, (0..4).map(|index| sample_seed(7, index)).collect::<Vec<_>>());
        let distinct: std::collections::HashSet<_> = seeds.iter().collect();
        assert_eq!(distinct.len(), 4);
        assert_eq!(sample_seed(u64::MAX, 0), u64::MAX);
    }
}
