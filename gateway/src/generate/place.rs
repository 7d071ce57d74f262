//! Finds the worker of a request, or the pair of workers, and submits to it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use xxhash_rust::xxh3::xxh3_64;

use super::needs::{self, Need};
use super::{GenerateError, Generator};
use crate::route::cost::CostModel;
use crate::route::load::WorkerLoad;
use crate::route::{Candidate, RouteRequest};
use crate::worker::client::Ticket;
use crate::worker::mailbox::Mailbox;
use crate::worker::pool::{Condition, ReadyWorker};
use crate::worker::submit::{Part, Submission};
use crate::worker::{RESUME, Role};

/// One life of a worker.
pub(super) type Life = (u16, u64);

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

/// This life of a worker.
pub(super) fn life(worker: &ReadyWorker) -> Life {
    (worker.number, worker.info.boot_epoch)
}

impl Generator {
    /// Submits where the router says, and elsewhere where that worker's stream has ended a moment ago.
    ///
    /// # Errors
    /// No worker is ready, or none of them can do all that is asked for.
    pub(super) fn place(&self, search: &Search<'_>, mailbox: &Arc<Mailbox>) -> Result<Vec<Placement>, GenerateError> {
        let ready = self.pool.ready();
        let resumes = search.submissions.iter().any(|submission| !submission.resumed_token_ids.is_empty());
        let can = |worker: &&ReadyWorker| {
            search.needs.iter().all(|need| need.is_met_by(&worker.info))
                && (!resumes || worker.info.has_feature(RESUME))
                && !search.avoided.contains(&life(worker))
        };
        let able: Vec<ReadyWorker> = ready.iter().filter(can).cloned().collect();
        if let (true, Some(need)) = (able.is_empty(), needs::unmet(search.needs, &ready)) {
            return Err(self.unable(need.clone()));
        }
        // Those that are set aside too where the others have no way to serve it.
        in_good_standing(&able)
            .and_then(|others| self.place_among(search, others, mailbox))
            .or_else(|| self.place_among(search, able, mailbox))
            .ok_or_else(|| GenerateError::NoWorker(self.why_not_ready()))
    }

    fn place_among(
        &self,
        search: &Search<'_>,
        mut able: Vec<ReadyWorker>,
        mailbox: &Arc<Mailbox>,
    ) -> Option<Vec<Placement>> {
        let is_disaggregated = able.iter().any(|worker| worker.info.role != Role::Unified);
        if is_disaggregated && search.only_scores() {
            // Nothing is decoded: the prompt's scores come from the worker that computes it.
            able.retain(|worker| worker.info.role == Role::Prefill);
        }
        match is_disaggregated && !search.only_scores() {
            true => self.place_on_pair(search, &mut able, mailbox),
            false => self.place_on_one(search, &mut able, mailbox),
        }
    }

    fn place_on_one(
        &self,
        search: &Search<'_>,
        workers: &mut Vec<ReadyWorker>,
        mailbox: &Arc<Mailbox>,
    ) -> Option<Vec<Placement>> {
        loop {
            let request = route_request(search.submissions, workers)?;
            let candidates: Vec<Candidate> = workers.iter().map(candidate).collect();
            let choice = self.router.choose(&request, &candidates)?;
            let worker = Arc::new(workers.swap_remove(choice.index));
            let tickets = worker.link.submit(search.submissions, &Part::Whole, choice.prefill_us, mailbox);
            if let Some(tickets) = tickets {
                worker.breaker().submitted(Instant::now());
                let placement = |ticket| Placement {
                    worker: worker.clone(),
                    _ticket: ticket,
                    prefill_worker: None,
                    prefill_ticket: None,
                };
                return Some(tickets.into_iter().map(placement).collect());
            }
        }
    }

    /// Both legs are submitted at once: the decode worker makes room while the prompt is computed.
    fn place_on_pair(
        &self,
        search: &Search<'_>,
        workers: &mut Vec<ReadyWorker>,
        mailbox: &Arc<Mailbox>,
    ) -> Option<Vec<Placement>> {
        loop {
            let of = |role| -> Vec<ReadyWorker> {
                workers.iter().filter(|worker| worker.info.role == role).cloned().collect()
            };
            let (prefills, decodes) = (of(Role::Prefill), of(Role::Decode));
            let request = route_request(search.submissions, workers)?;
            let candidates = |workers: &[ReadyWorker]| workers.iter().map(candidate).collect::<Vec<_>>();
            let closed = self.pool.closed_pairs();
            let choice = self.router.choose_pair(&request, &candidates(&prefills), &candidates(&decodes), &closed)?;
            let (prefill, decode) = (Arc::new(prefills[choice.prefill].clone()), &decodes[choice.decode]);
            let decode = Arc::new(decode.clone());
            let legs = submit_pair(search.submissions, &prefill, &decode, choice.prefill_us, mailbox);
            let (prefill_tickets, decode_tickets) = match legs {
                Ok(legs) => legs,
                Err(lost) => {
                    workers.retain(|worker| life(worker) != lost);
                    continue;
                }
            };
            prefill.breaker().submitted(Instant::now());
            decode.breaker().submitted(Instant::now());
            let placement = |(prefill_ticket, ticket)| Placement {
                worker: decode.clone(),
                _ticket: ticket,
                prefill_worker: Some(prefill.clone()),
                prefill_ticket: Some(prefill_ticket),
            };
            return Some(prefill_tickets.into_iter().zip(decode_tickets).map(placement).collect());
        }
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

    /// Submits what nobody suspects: away from workers on which suspects are tried, where there are others.
    ///
    /// # Errors
    /// As `place`.
    pub(super) fn place_newcomer(
        &self,
        search: &Search<'_>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Placement>, GenerateError> {
        let trials = self.limits.trials();
        if trials.is_empty() {
            return self.place(search, mailbox);
        }
        if let Ok(placed) = self.place(&Search { avoided: &trials, ..*search }, mailbox) {
            return Ok(placed);
        }
        let placed = self.place(search, mailbox)?;
        placed.iter().for_each(|placement| self.spoil_trials(placement));
        Ok(placed)
    }

    /// A death at these workers says nothing of a suspect any more.
    pub(super) fn spoil_trials(&self, placement: &Placement) {
        let workers = std::iter::once(&placement.worker).chain(&placement.prefill_worker);
        workers.for_each(|worker| self.limits.spoil_trials(life(worker)));
    }

    /// Whether one more trial leaves workers of each role to everybody else.
    pub(super) fn has_room_for_trial(&self, trials: &[Life]) -> bool {
        let ready = self.pool.ready();
        [Role::Unified, Role::Prefill, Role::Decode].into_iter().all(|role| {
            let of_role = ready.iter().filter(|worker| worker.info.role == role);
            let num_free = of_role.clone().filter(|worker| !trials.contains(&life(worker))).count();
            num_free != 1 || of_role.count() == 1
        })
    }

    /// Whether this life of a worker goes on, as far as is known.
    pub(super) fn is_alive(&self, worker: Life) -> bool {
        self.pool.ready().iter().any(|ready| life(ready) == worker)
    }

    /// Whether a worker that is ready can go on after tokens that another one gave.
    pub(super) fn can_resume(&self) -> bool {
        self.pool.ready().iter().any(|worker| worker.info.has_feature(RESUME))
    }
}

/// The tickets of both legs, or the life of the worker whose stream has ended.
fn submit_pair(
    submissions: &[Submission],
    prefill: &ReadyWorker,
    decode: &ReadyWorker,
    prefill_us: f64,
    mailbox: &Arc<Mailbox>,
) -> Result<(Vec<Ticket>, Vec<Ticket>), Life> {
    // A prefill worker without an endpoint never becomes ready.
    let peer = prefill.info.transfer_endpoints.first().ok_or_else(|| life(prefill))?.clone();
    let part = Part::Decode { peer, peer_boot_epoch: prefill.info.boot_epoch };
    let prefill_tickets =
        prefill.link.submit(submissions, &Part::Prefill, prefill_us, mailbox).ok_or_else(|| life(prefill))?;
    let decode_tickets = decode.link.submit(submissions, &part, 0.0, mailbox).ok_or_else(|| life(decode))?;
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
