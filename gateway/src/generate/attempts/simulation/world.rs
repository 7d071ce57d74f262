//! Workers, streams and the clock, simulated, under the product's router, breakers, attempts, limits and trials.
//!
//! Rows of one stream stay in order, those of different ones do not, and rows of an aborted attempt still arrive.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::{Attempts, Failed, MAX_DEATHS, MAX_DEATHS_IN_COMPANY, MAX_TRIES_IN_VAIN, REST, Verdict};
use crate::generate::limits::ReplayLimits;
use crate::generate::trials::{self, Trial, Trials};
use crate::route::cost::CostModel;
use crate::route::policy::Policy;
use crate::route::{Candidate, RouteRequest, Router};
use crate::worker::breaker::Breaker;
use crate::worker::mailbox::Origin;
use crate::worker::pool::Life;
use crate::worker::{FailureKind, Role};

mod workers;

pub(super) const NUM_REQUESTS: usize = 24;
/// From a rank's death to the end of its worker's stream, milliseconds at most.
const UNNOTICED_MS: u64 = 400;

fn token(request: usize, position: usize) -> u32 {
    u32::try_from(request * 1_000 + position).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum News {
    Token(u32),
    Last,
    HandedOver,
    Failed(FailureKind),
}

#[derive(Clone, Copy, Debug)]
struct Leg {
    request: usize,
    origin: Origin,
    /// Tokens it has yet to give, by position.
    next: usize,
    end: usize,
}

#[derive(Default)]
pub(super) struct Worker {
    breaker: Breaker,
    legs: Vec<Leg>,
    /// That it has had.
    num_streams: u64,
    /// Rows on their way to the gateway.
    stream: VecDeque<(usize, Origin, News)>,
    /// It computes nothing any more, and its stream is about to end.
    is_dying_until: Option<Instant>,
    pub(super) down_until: Option<Instant>,
    /// What the gateway does not know to be survived, by request and attempt, and when such a one was taken back.
    untried: HashSet<(usize, u32)>,
    taken_back_at: Option<Instant>,
}

pub(super) struct Request {
    pub(super) attempts: Attempts,
    /// It kills whoever computes its prompt: these, so far.
    pub(super) is_deadly: bool,
    pub(super) victims: usize,
    pub(super) is_accused: bool,
    length: usize,
    given: Vec<u32>,
    deaths: u32,
    /// In a row without a token.
    deaths_in_vain: u32,
    tries_in_vain: u32,
    num_tokens_before: usize,
    pair: Option<(usize, usize)>,
    waits: bool,
    hearing: Option<(Trial, (usize, usize))>,
    /// Streams that its prefill worker had had when it was submitted there.
    life: u64,
    /// A worker that may have died in a trial, and this number of it.
    mourned: Option<(usize, u64)>,
    pub(super) ends: u32,
}

pub(super) struct World {
    pub(super) random: StdRng,
    pub(super) now: Instant,
    router: Router,
    pub(super) limits: Arc<ReplayLimits>,
    trials: Arc<Trials>,
    /// Prefill workers, then decode workers.
    pub(super) workers: Vec<Worker>,
    num_prefills: usize,
    pub(super) requests: Vec<Request>,
    retries: u32,
    /// Nothing happens but what deadly requests do.
    pub(super) is_calm: bool,
}

fn life(number: usize) -> Life {
    (u16::try_from(number).unwrap(), 0)
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let (num_prefills, num_decodes) = (random.random_range(1..4), random.random_range(1..4));
        Self::of(num_prefills, num_decodes, random)
    }

    pub(super) fn of(num_prefills: usize, num_decodes: usize, random: StdRng) -> Self {
        Self {
            now: Instant::now(),
            router: Router::new(Policy::CacheAware, Arc::default()),
            limits: Arc::default(),
            trials: Arc::default(),
            workers: (0..num_prefills + num_decodes).map(|_| Worker::default()).collect(),
            num_prefills,
            requests: Vec::new(),
            retries: 0,
            is_calm: false,
            random,
        }
    }

    pub(super) fn run(mut self) {
        for _ in 0..20_000 {
            self.now += Duration::from_millis(self.random.random_range(1..20));
            self.step();
            let is_over = |request: &Request| request.ends > 0;
            if self.requests.len() == NUM_REQUESTS && self.requests.iter().all(is_over) {
                break;
            }
        }
        assert!(self.requests.iter().all(|request| request.ends == 1), "each request ends once");
        self.workers.iter().for_each(|worker| assert!(worker.legs.is_empty(), "no leg is left behind"));
        let allowed = 10 + u32::try_from(NUM_REQUESTS).unwrap() / 5;
        assert!(self.retries <= allowed * 3, "retries of three windows at most");
    }

    pub(super) fn step(&mut self) {
        let event = match self.random.random_range(0..100) {
            6..10 if self.is_calm => 50,
            event => event,
        };
        match event {
            0..6 if self.requests.len() < NUM_REQUESTS => self.arrive(),
            6..8 => {
                let number = self.random.random_range(0..self.workers.len());
                self.die(number);
            }
            8..9 => self.refuse(),
            9..10 => self.leave(),
            10..50 => self.compute(),
            _ => self.deliver(),
        }
        self.look_after();
    }

    /// Workers come back, and requests that wait find one.
    pub(super) fn look_after(&mut self) {
        for number in 0..self.workers.len() {
            let worker = &mut self.workers[number];
            worker.down_until = worker.down_until.filter(|until| *until > self.now);
            if worker.is_dying_until.is_some_and(|until| until <= self.now) {
                self.die(number);
            }
        }
        for index in 0..self.requests.len() {
            if self.requests[index].waits {
                self.place(index);
            }
        }
    }

    pub(super) fn arrive(&mut self) {
        self.limits.note_request(self.now);
        let length = self.random.random_range(1..12);
        let (attempts, given) = (Attempts::default(), Vec::new());
        self.requests.push(Request {
            attempts,
            is_deadly: false,
            victims: 0,
            is_accused: false,
            length,
            given,
            deaths: 0,
            deaths_in_vain: 0,
            tries_in_vain: 0,
            num_tokens_before: 0,
            pair: None,
            waits: true,
            hearing: None,
            life: 0,
            mourned: None,
            ends: 0,
        });
    }

    fn place(&mut self, index: usize) {
        if !self.requests[index].attempts.has_rested(self.now) {
            return;
        }
        let is_alive = |(number, num_streams): (usize, u64)| self.workers[number].num_streams == num_streams;
        if self.requests[index].mourned.take().is_some_and(is_alive) {
            self.requests[index].attempts.acquit();
        }
        let attempts = self.requests[index].attempts;
        if attempts.is_condemned() {
            self.requests[index].is_accused = true;
            return self.end(index);
        }
        let pair = match attempts.is_suspect() {
            true => self.hear(index),
            false => {
                let choose = |taken: &[Life]| self.choose(taken).ok_or(());
                self.trials.place_newcomer(self.now, choose, |pair| vec![life(pair.0), life(pair.1)]).ok()
            }
        };
        if let Some(pair) = pair {
            self.submit(index, pair);
        }
    }

    /// A pair without workers that are taken.
    fn choose(&self, taken: &[Life]) -> Option<(usize, usize)> {
        let up = |number: usize| self.workers[number].down_until.is_none() && !taken.contains(&life(number));
        let candidates = |range: std::ops::Range<usize>| -> Vec<Candidate> {
            let up: Vec<usize> = range.filter(|&number| up(number)).collect();
            let good = up.iter().copied().filter(|&number| self.workers[number].breaker.allows(self.now));
            let good: Vec<usize> = good.collect();
            let chosen = if good.is_empty() { up } else { good };
            let number = |number: usize| Candidate { worker: u16::try_from(number).unwrap(), ..Candidate::default() };
            chosen.into_iter().map(number).collect()
        };
        let (prefills, decodes) = (candidates(0..self.num_prefills), candidates(self.num_prefills..self.workers.len()));
        let prompt = [0; 100];
        let route = RouteRequest {
            prompt: &prompt,
            cache_salt: "",
            session: None,
            page_size_tokens: 64,
            cost: CostModel::SPARSE,
        };
        let pair = self.router.choose_pair(&route, &prefills, &decodes, &HashSet::new())?;
        Some((usize::from(prefills[pair.prefill].worker), usize::from(decodes[pair.decode].worker)))
    }

    /// The pair at which a suspect is tried, once that is free.
    fn hear(&mut self, index: usize) -> Option<(usize, usize)> {
        let is_up = |number: usize| self.workers[number].down_until.is_none();
        let held = self.requests[index].hearing.take().filter(|(_, pair)| is_up(pair.0) && is_up(pair.1));
        let role = |number| if number < self.num_prefills { Role::Prefill } else { Role::Decode };
        let ready = (0..self.workers.len()).filter(|&number| is_up(number)).map(|number| (role(number), life(number)));
        let choose = |taken: &[Life], kept: &[Life]| {
            let others: Vec<Life> =
                ready.clone().map(|(_, worker)| worker).filter(|other| !kept.contains(other)).collect();
            let at_kept = (!kept.is_empty()).then(|| self.choose(&others)).flatten();
            let elsewhere = || self.choose(taken).filter(|_| trials::have_room(ready, taken));
            let pair = at_kept.or_else(elsewhere)?;
            Some((pair, vec![life(pair.0), life(pair.1)]))
        };
        let (mut trial, pair) = held.or_else(|| self.trials.take(self.now, choose))?;
        let have_survived = [pair.0, pair.1].into_iter().all(|number| {
            let Worker { untried, taken_back_at, .. } = &self.workers[number];
            untried.is_empty() && taken_back_at.is_none_or(|at| self.now >= at + REST)
        });
        let may_begin = trial.may_begin(have_survived, self.now);
        self.requests[index].hearing = Some((trial, pair));
        may_begin.then_some(pair)
    }

    fn submit(&mut self, index: usize, pair: (usize, usize)) {
        let request = &mut self.requests[index];
        let leg = |is_prefill_leg| Leg {
            request: index,
            origin: Origin { attempt: request.attempts.current, is_prefill_leg },
            next: request.given.len(),
            end: request.length,
        };
        self.workers[pair.0].legs.push(leg(true));
        self.workers[pair.1].legs.push(leg(false));
        (request.pair, request.waits) = (Some(pair), false);
        request.life = self.workers[pair.0].num_streams;
        let attempt = request.attempts.current;
        for number in [pair.0, pair.1] {
            self.workers[number].breaker.submitted(self.now);
            self.workers[number].untried.insert((index, attempt));
        }
    }

    /// What dropping a placement does.
    fn release(&mut self, index: usize) -> Option<(usize, usize)> {
        self.requests[index].hearing = None;
        let pair = self.requests[index].pair.take()?;
        for number in [pair.0, pair.1] {
            let worker = &mut self.workers[number];
            worker.legs.retain(|leg| leg.request != index);
            let num_untried = worker.untried.len();
            worker.untried.retain(|(request, _)| *request != index);
            if worker.untried.len() < num_untried {
                worker.taken_back_at = Some(self.now);
            }
        }
        Some(pair)
    }

    /// A client leaves.
    fn leave(&mut self) {
        let open: Vec<usize> = (0..self.requests.len()).filter(|&index| self.requests[index].ends == 0).collect();
        if open.is_empty() {
            return;
        }
        let index = open[self.random.random_range(0..open.len())];
        self.release(index);
        self.end(index);
    }

    fn end(&mut self, index: usize) {
        self.requests[index].ends += 1;
        self.requests[index].waits = false;
    }

    fn fail(&mut self, index: usize, number: usize, is_prefill_leg: bool, kind: FailureKind) {
        let request = &mut self.requests[index];
        let hearing = request.hearing.take();
        let in_trial = hearing.as_ref().is_some_and(|(trial, _)| trial.is_conclusive());
        let failed = Failed {
            kind,
            in_prefill_leg: is_prefill_leg,
            num_tokens: u32::try_from(request.given.len()).unwrap(),
            can_resume: true,
            in_trial,
        };
        let verdict = request.attempts.fail(failed, self.now);
        if verdict == Verdict::GoOn {
            request.hearing = hearing;
            return;
        }
        if request.given.len() > request.num_tokens_before {
            (request.deaths_in_vain, request.tries_in_vain) = (0, 0);
        } else {
            request.deaths_in_vain += u32::from(kind == FailureKind::Lost);
            request.tries_in_vain += 1;
        }
        request.num_tokens_before = request.given.len();
        request.deaths += u32::from(kind == FailureKind::Lost);
        assert!(request.deaths <= MAX_DEATHS && request.deaths_in_vain <= MAX_DEATHS_IN_COMPANY);
        assert!(request.tries_in_vain <= MAX_TRIES_IN_VAIN);
        let pair = self.release(index);
        let blamed = if kind == FailureKind::PeerFailed { pair.unwrap().0 } else { number };
        if kind == FailureKind::PeerFailed {
            let request = &mut self.requests[index];
            request.mourned = Some((blamed, request.life));
            if let Some((trial, _)) = hearing {
                trial.end_in_doubt(life(blamed), self.now + REST);
            }
        }
        let worker = &mut self.workers[blamed];
        match kind {
            FailureKind::Unavailable => {}
            FailureKind::Lost => worker.breaker.lost(worker.num_streams, self.now),
            FailureKind::PeerFailed => worker.breaker.failed_peer(self.now),
            _ => worker.breaker.failed(self.now),
        }
        let goes_on = match verdict {
            Verdict::Replay => true,
            Verdict::Retry => self.limits.take_retry(self.now),
            Verdict::Fail | Verdict::GoOn => false,
        };
        self.retries += u32::from(goes_on && verdict == Verdict::Retry);
        if goes_on {
            self.requests[index].waits = true;
        } else {
            self.end(index);
        }
    }
}
