//! Finds the worker of a request, or the pair of workers, and submits to it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use xxhash_rust::xxh3::xxh3_64;

use super::attempts::REST;
use super::needs::{self, Need};
use super::trials::{self, Trial};
use super::{GenerateError, Generator};
use crate::route::cost::CostModel;
use crate::route::load::WorkerLoad;
use crate::route::{Candidate, RouteRequest};
use crate::worker::client::Ticket;
use crate::worker::mailbox::Mailbox;
use crate::worker::pool::{Condition, Life, ReadyWorker};
use crate::worker::submit::{Part, Submission};
use crate::worker::{RESUME, Role};

/// What is to be placed, and where not.
#[derive(Clone, Copy)]
pub(super) struct Search<'a> {
    /// All go to one worker, or to one pair.
    pub submissions: &'a [Submission],
    pub needs: &'a [Need],
    pub avoided: &'a [Life],
}

impl Search<'_> {
    /// Whether no token is asked for.
    fn only_scores(&self) -> bool {
        self.submissions.iter().all(|submission| submission.sampling.max_tokens == Some(0))
    }
}

/// Where one attempt of a choice runs. Dropping it aborts there what has not ended: both legs have this one owner.
#[derive(Debug)]
pub(super) struct Placement {
    /// The worker whose tokens are read.
    pub worker: Arc<ReadyWorker>,
    _ticket: Ticket,
    /// The worker that computes the prompt for it, if that is another one.
    pub prefill_worker: Option<Arc<ReadyWorker>>,
    /// Holds the leg there until it has handed over.
    pub prefill_ticket: Option<Ticket>,
}

impl Placement {
    fn lives(&self) -> impl Iterator<Item = Life> {
        std::iter::once(&self.worker).chain(&self.prefill_worker).map(|worker| worker.life())
    }
}

/// The workers that are to have a request.
#[derive(Debug)]
struct Chosen {
    /// Whose tokens are read.
    worker: Arc<ReadyWorker>,
    prefill_worker: Option<Arc<ReadyWorker>>,
    /// What the prompt is expected to cost there, microseconds.
    prefill_us: f64,
}

impl Chosen {
    fn workers(&self) -> impl Iterator<Item = &Arc<ReadyWorker>> {
        std::iter::once(&self.worker).chain(&self.prefill_worker)
    }

    fn lives(&self) -> Vec<Life> {
        self.workers().map(|worker| worker.life()).collect()
    }
}

/// A suspect's trial, and the workers that are kept free for it.
#[derive(Debug)]
pub(super) struct Hearing {
    pub trial: Trial,
    chosen: Chosen,
}

/// What came of a suspect's wish to be tried.
pub(super) enum Heard {
    Placed(Placement),
    /// Its workers are not free yet.
    Waits,
    /// There is no worker for it.
    Nowhere,
}

impl Generator {
    /// Submits where the router says, and elsewhere where that worker's stream has ended a moment ago.
    ///
    /// # Errors
    /// No worker is ready, or none of them can do all that is asked for.
    pub(super) fn place(&self, search: &Search<'_>, mailbox: &Arc<Mailbox>) -> Result<Vec<Placement>, GenerateError> {
        let mut lost = Vec::new();
        loop {
            let chosen = self.choose(search, &lost)?;
            match submit(search.submissions, &chosen, mailbox) {
                Ok(placements) => return Ok(placements),
                Err(life) => lost.push(life),
            }
        }
    }

    /// Where the router says, but at none of the workers that are `lost`.
    fn choose(&self, search: &Search<'_>, lost: &[Life]) -> Result<Chosen, GenerateError> {
        let ready = self.pool.ready();
        let resumes = search.submissions.iter().any(|submission| !submission.resumed_token_ids.is_empty());
        let can = |worker: &&ReadyWorker| {
            search.needs.iter().all(|need| need.is_met_by(&worker.info))
                && (!resumes || worker.info.has_feature(RESUME))
                && !search.avoided.contains(&worker.life())
                && !lost.contains(&worker.life())
        };
        let able: Vec<ReadyWorker> = ready.iter().filter(can).cloned().collect();
        if let (true, Some(need)) = (able.is_empty(), needs::unmet(search.needs, &ready)) {
            return Err(self.unable(need.clone()));
        }
        // Those that are set aside too where the others have no way to serve it.
        in_good_standing(&able)
            .and_then(|others| self.choose_among(search, others))
            .or_else(|| self.choose_among(search, able))
            .ok_or_else(|| GenerateError::NoWorker(self.why_not_ready()))
    }

    fn choose_among(&self, search: &Search<'_>, mut able: Vec<ReadyWorker>) -> Option<Chosen> {
        let is_disaggregated = able.iter().any(|worker| worker.info.role != Role::Unified);
        if is_disaggregated && search.only_scores() {
            // Nothing is decoded: the prompt's scores come from the worker that computes it.
            able.retain(|worker| worker.info.role == Role::Prefill);
        }
        let request = route_request(search.submissions, &able)?;
        let candidates = |workers: &[ReadyWorker]| workers.iter().map(candidate).collect::<Vec<_>>();
        if !is_disaggregated || search.only_scores() {
            let choice = self.router.choose(&request, &candidates(&able))?;
            let worker = Arc::new(able.swap_remove(choice.index));
            return Some(Chosen { worker, prefill_worker: None, prefill_us: choice.prefill_us });
        }
        let of =
            |role| -> Vec<ReadyWorker> { able.iter().filter(|worker| worker.info.role == role).cloned().collect() };
        let (mut prefills, mut decodes) = (of(Role::Prefill), of(Role::Decode));
        let closed = self.pool.closed_pairs();
        let choice = self.router.choose_pair(&request, &candidates(&prefills), &candidates(&decodes), &closed)?;
        Some(Chosen {
            worker: Arc::new(decodes.swap_remove(choice.decode)),
            prefill_worker: Some(Arc::new(prefills.swap_remove(choice.prefill))),
            prefill_us: choice.prefill_us,
        })
    }

    /// Submits what nobody suspects: away from workers on which suspects are tried, where there are others.
    ///
    /// # Errors
    /// As `place`.
    pub(super) fn place_newcomer(
        &self,
        search: &Search<'_>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Placement>, GenerateError> {
        let away_from = |taken: &[Life]| match taken {
            [] => self.place(search, mailbox),
            taken => self.place(&Search { avoided: &[search.avoided, taken].concat(), ..*search }, mailbox),
        };
        self.trials.place_newcomer(Instant::now(), away_from, |placements| {
            placements.iter().flat_map(Placement::lives).collect()
        })
    }

    /// Takes workers for a suspect, at none of which another one is tried, and submits to them once they have survived
    /// all that was there before it.
    pub(super) fn hear(
        &self,
        search: &Search<'_>,
        hearing: &mut Option<Hearing>,
        mailbox: &Arc<Mailbox>,
        now: Instant,
    ) -> Heard {
        hearing.take_if(|hearing| !hearing.chosen.workers().all(|worker| self.is_ready(worker)));
        if hearing.is_none() {
            let Some((trial, chosen)) = self.trials.take(now, |taken, kept| self.choose_free(search, taken, kept))
            else {
                return if self.trials.are_open(now) { Heard::Waits } else { Heard::Nowhere };
            };
            *hearing = Some(Hearing { trial, chosen });
        }
        let Some(Hearing { trial, chosen }) = hearing else { return Heard::Waits };
        let have_survived = chosen.workers().all(|worker| worker.link.has_survived_all(REST));
        if !trial.may_begin(have_survived, now) {
            return Heard::Waits;
        }
        let placement = submit(search.submissions, chosen, mailbox).ok().and_then(|mut placements| placements.pop());
        if placement.is_none() {
            *hearing = None;
        }
        placement.map_or(Heard::Waits, Heard::Placed)
    }

    /// Workers on which nobody is tried: those that are kept for suspects, or else rather such as have not failed the
    /// request, and never the last free one.
    fn choose_free(&self, search: &Search<'_>, taken: &[Life], kept: &[Life]) -> Option<(Chosen, Vec<Life>)> {
        let ready = self.pool.ready();
        let away_from = |avoided: &[Life]| self.choose(&Search { avoided, ..*search }, &[]).ok();
        let others = || ready.iter().map(ReadyWorker::life).filter(|worker| !kept.contains(worker)).collect::<Vec<_>>();
        let at_kept = (!kept.is_empty()).then(|| away_from(&others())).flatten();
        let has_room = || trials::have_room(ready.iter().map(|worker| (worker.info.role, worker.life())), taken);
        let elsewhere = || away_from(&[search.avoided, taken].concat()).or_else(|| away_from(taken));
        let chosen = at_kept.or_else(|| has_room().then(elsewhere).flatten())?;
        let lives = chosen.lives();
        Some((chosen, lives))
    }

    /// Says that no ready worker meets a need. One that is not ready perhaps does.
    fn unable(&self, Need { ability, field }: Need) -> GenerateError {
        if !self.may_come() {
            return GenerateError::Unable { field, ability };
        }
        let reasons = self.reasons();
        GenerateError::NoWorker(format!(
            "No worker that is ready has the ability '{ability}', which '{field}' takes ({reasons}). Try again shortly."
        ))
    }

    /// Whether a worker that is not ready may become so, or a pair open.
    pub(super) fn may_come(&self) -> bool {
        let may_come = |condition| matches!(condition, Condition::Draining | Condition::NotReady(_));
        self.pool.has_closed_pairs() || self.pool.slots().iter().any(|slot| may_come(slot.condition()))
    }

    /// Whether this life of a worker goes on, as far as is known.
    pub(super) fn is_alive(&self, worker: Life) -> bool {
        self.pool.ready().iter().any(|ready| ready.life() == worker)
    }

    /// Whether a worker takes requests over the same stream as when it was chosen.
    fn is_ready(&self, worker: &ReadyWorker) -> bool {
        self.pool.ready().iter().any(|ready| ready.connection == worker.connection)
    }

    /// Whether a worker that is ready can go on after tokens that another one gave.
    pub(super) fn can_resume(&self) -> bool {
        self.pool.ready().iter().any(|worker| worker.info.has_feature(RESUME))
    }
}

/// A placement for each submission, or the life of the worker whose stream has ended.
fn submit(submissions: &[Submission], chosen: &Chosen, mailbox: &Arc<Mailbox>) -> Result<Vec<Placement>, Life> {
    let Chosen { worker, prefill_worker, prefill_us } = chosen;
    let (prefill_tickets, tickets) = match prefill_worker {
        Some(prefill) => submit_pair(submissions, prefill, worker, *prefill_us, mailbox)?,
        None => {
            let tickets = worker.link.submit(submissions, &Part::Whole, *prefill_us, mailbox);
            (Vec::new(), tickets.ok_or_else(|| worker.life())?)
        }
    };
    let now = Instant::now();
    chosen.workers().for_each(|worker| worker.breaker().submitted(now));
    let mut prefill_tickets = prefill_tickets.into_iter();
    let placement = |ticket| Placement {
        worker: worker.clone(),
        _ticket: ticket,
        prefill_worker: prefill_worker.clone(),
        prefill_ticket: prefill_tickets.next(),
    };
    Ok(tickets.into_iter().map(placement).collect())
}

/// The tickets of both legs, or the life of the worker whose stream has ended. Both are submitted at once: the decode
/// worker makes room while the prompt is computed.
fn submit_pair(
    submissions: &[Submission],
    prefill: &ReadyWorker,
    decode: &ReadyWorker,
    prefill_us: f64,
    mailbox: &Arc<Mailbox>,
) -> Result<(Vec<Ticket>, Vec<Ticket>), Life> {
    // A prefill worker without an endpoint never becomes ready.
    let peer = prefill.info.transfer_endpoints.first().ok_or_else(|| prefill.life())?.clone();
    let part = Part::Decode { peer, peer_boot_epoch: prefill.info.boot_epoch };
    let prefill_tickets =
        prefill.link.submit(submissions, &Part::Prefill, prefill_us, mailbox).ok_or_else(|| prefill.life())?;
    let decode_tickets = decode.link.submit(submissions, &part, 0.0, mailbox).ok_or_else(|| decode.life())?;
    Ok((prefill_tickets, decode_tickets))
}

/// Without the workers that are set aside for their failures, unless that leaves nobody for a role. None: nobody is.
fn in_good_standing(workers: &[ReadyWorker]) -> Option<Vec<ReadyWorker>> {
    let now = Instant::now();
    let allowed: Vec<bool> = workers.iter().map(|worker| worker.breaker().allows(now)).collect();
    if allowed.iter().all(|&allowed| allowed) {
        return None;
    }
    let good = workers.iter().zip(&allowed).filter(|(_, allowed)| **allowed);
    let good_roles: Vec<Role> = good.map(|(worker, _)| worker.info.role).collect();
    let keeps = |worker: &ReadyWorker, allowed: bool| allowed || !good_roles.contains(&worker.info.role);
    let kept = workers.iter().zip(&allowed).filter(|(worker, allowed)| keeps(worker, **allowed));
    Some(kept.map(|(worker, _)| worker.clone()).collect())
}

/// What a choice of workers for all submissions of a request depends on: its first prompt.
fn route_request<'a>(submissions: &'a [Submission], workers: &[ReadyWorker]) -> Option<RouteRequest<'a>> {
    let (first, model) = (submissions.first()?, &workers.first()?.info);
    Some(RouteRequest {
        prompt: &first.prompt_token_ids,
        cache_salt: &first.cache_salt,
        session: first.session,
        page_size_tokens: model.page_size_tokens as usize,
        cost: CostModel::of(&model.model_type),
    })
}

fn candidate(worker: &ReadyWorker) -> Candidate {
    let (load, in_flight) = (&worker.link.load, worker.link.in_flight());
    let reported = load.running_requests.load(Ordering::Relaxed) + load.waiting_requests.load(Ordering::Relaxed);
    let total_pages = load.total_pages.load(Ordering::Relaxed);
    let load = WorkerLoad {
        in_flight: in_flight.requests,
        reported_requests: reported as usize,
        waiting_prompt_tokens: load.waiting_prompt_tokens.load(Ordering::Relaxed),
        pending_prefill_us: in_flight.pending_prefill_us,
        free_pages: (total_pages > 0).then(|| total_pages.saturating_sub(load.used_pages.load(Ordering::Relaxed))),
    };
    let layout = xxh3_64(worker.info.layout_id.as_bytes());
    Candidate { worker: worker.number, name_hash: worker.name_hash, layout, load }
}
