#![expect(clippy::unwrap_used, reason = "tests")]

//! Requests on pairs of workers that die, refuse and fall silent, in simulated time: what clients may never see.
//!
//! The router, the breaker, the attempts and the limits are the product's; workers, streams and the clock are simulated.
//! Rows of one stream stay in order, those of different ones do not, and rows of an aborted attempt still arrive. A
//! failure prints its seed; `BALEEN_SIMULATION_SEEDS` asks for more of them.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{Attempts, Failed, MAX_DEATHS, MAX_DEATHS_IN_COMPANY, MAX_TRIES_IN_VAIN, Verdict};
use crate::generate::limits::{ReplayLimits, Trial};
use crate::route::cost::CostModel;
use crate::route::policy::Policy;
use crate::route::{Candidate, RouteRequest, Router};
use crate::worker::FailureKind;
use crate::worker::breaker::Breaker;
use crate::worker::mailbox::Origin;

const SEEDS: u64 = 1_000;
const NUM_REQUESTS: usize = 24;

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
struct Worker {
    breaker: Breaker,
    legs: Vec<Leg>,
    /// Rows on their way to the gateway.
    stream: VecDeque<(usize, Origin, News)>,
    down_until: Option<Instant>,
}

struct Request {
    attempts: Attempts,
    length: usize,
    given: Vec<u32>,
    deaths: u32,
    /// In a row without a token.
    deaths_in_vain: u32,
    tries_in_vain: u32,
    num_tokens_before: usize,
    pair: Option<(usize, usize)>,
    waits: bool,
    trial: Option<Trial>,
    ends: u32,
}

struct World {
    random: StdRng,
    now: Instant,
    router: Router,
    limits: Arc<ReplayLimits>,
    /// Prefill workers, then decode workers.
    workers: Vec<Worker>,
    num_prefills: usize,
    requests: Vec<Request>,
    retries: u32,
    /// Requests that were refused as the cause of deaths.
    num_accused: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let (num_prefills, num_decodes) = (random.random_range(1..4), random.random_range(1..4));
        Self::of(num_prefills, num_decodes, random)
    }

    fn of(num_prefills: usize, num_decodes: usize, random: StdRng) -> Self {
        Self {
            now: Instant::now(),
            router: Router::new(Policy::CacheAware, Arc::default()),
            limits: Arc::default(),
            workers: (0..num_prefills + num_decodes).map(|_| Worker::default()).collect(),
            num_prefills,
            requests: Vec::new(),
            retries: 0,
            num_accused: 0,
            random,
        }
    }

    fn run(mut self) {
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

    fn step(&mut self) {
        match self.random.random_range(0..100) {
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
    fn look_after(&mut self) {
        for worker in &mut self.workers {
            worker.down_until = worker.down_until.filter(|until| *until > self.now);
        }
        for index in 0..self.requests.len() {
            if self.requests[index].waits {
                self.place(index);
            }
        }
    }

    fn arrive(&mut self) {
        self.limits.note_request(self.now);
        let length = self.random.random_range(1..12);
        let (attempts, given) = (Attempts::default(), Vec::new());
        self.requests.push(Request {
            attempts,
            length,
            given,
            deaths: 0,
            deaths_in_vain: 0,
            tries_in_vain: 0,
            num_tokens_before: 0,
            pair: None,
            waits: true,
            trial: None,
            ends: 0,
        });
    }

    fn place(&mut self, index: usize) {
        let attempts = self.requests[index].attempts;
        if !attempts.has_rested(self.now) {
            return;
        }
        if attempts.is_condemned() {
            self.num_accused += 1;
            return self.end(index);
        }
        let trials = if attempts.is_suspect() { self.limits.trials() } else { Vec::new() };
        let life = |number: usize| (u16::try_from(number).unwrap(), 0);
        let up = |number: usize| self.workers[number].down_until.is_none() && !trials.contains(&life(number));
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
        let Some(pair) = self.router.choose_pair(&route, &prefills, &decodes, &HashSet::new()) else { return };
        let pair = (usize::from(prefills[pair.prefill].worker), usize::from(decodes[pair.decode].worker));
        let trial = attempts.is_suspect().then(|| self.limits.begin_trial(vec![life(pair.0), life(pair.1)]));
        let request = &mut self.requests[index];
        request.trial = trial;
        if !attempts.is_suspect() {
            [pair.0, pair.1].into_iter().for_each(|number| self.limits.spoil_trials(life(number)));
        }
        let leg = |is_prefill_leg| Leg {
            request: index,
            origin: Origin { attempt: request.attempts.current, is_prefill_leg },
            next: request.given.len(),
            end: request.length,
        };
        self.workers[pair.0].legs.push(leg(true));
        self.workers[pair.1].legs.push(leg(false));
        (request.pair, request.waits) = (Some(pair), false);
        for number in [pair.0, pair.1] {
            self.workers[number].breaker.submitted(self.now);
        }
    }

    /// What dropping a placement does.
    fn release(&mut self, index: usize) -> Option<(usize, usize)> {
        self.requests[index].trial = None;
        let pair = self.requests[index].pair.take()?;
        for number in [pair.0, pair.1] {
            self.workers[number].legs.retain(|leg| leg.request != index);
        }
        Some(pair)
    }

    fn compute(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        let is_up = self.workers[number].down_until.is_none();
        let worker = &mut self.workers[number];
        if !is_up || worker.legs.is_empty() {
            return;
        }
        let place = self.random.random_range(0..worker.legs.len());
        let leg = &mut worker.legs[place];
        let news = match leg.origin.is_prefill_leg {
            true => News::HandedOver,
            false if leg.next < leg.end => News::Token(token(leg.request, leg.next)),
            false => News::Last,
        };
        leg.next += 1;
        let row = (leg.request, leg.origin, news);
        if matches!(news, News::HandedOver | News::Last) {
            worker.legs.swap_remove(place);
        }
        worker.stream.push_back(row);
    }

    fn die(&mut self, number: usize) {
        let kept = self.random.random_range(0..=self.workers[number].stream.len());
        let worker = &mut self.workers[number];
        // The end of the stream is lost with the worker, ends of requests included.
        let cut: Vec<_> = worker.stream.drain(kept..).map(|(request, origin, _)| (request, origin)).collect();
        let mut lost: Vec<_> = worker.legs.drain(..).map(|leg| (leg.request, leg.origin)).collect();
        lost.extend(cut);
        lost.sort_by_key(|(request, origin)| (*request, origin.attempt));
        lost.dedup();
        worker
            .stream
            .extend(lost.into_iter().map(|(request, origin)| (request, origin, News::Failed(FailureKind::Lost))));
        worker.down_until = Some(self.now + Duration::from_millis(self.random.random_range(10..3_000)));
    }

    /// A worker turns a leg down, or a peer is out of reach.
    fn refuse(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        let kind = match self.random.random_range(0..3) {
            0 if number >= self.num_prefills => FailureKind::PeerFailed,
            1 => FailureKind::Internal,
            _ => FailureKind::Unavailable,
        };
        let worker = &mut self.workers[number];
        let Some(leg) = worker.legs.pop() else { return };
        worker.stream.push_back((leg.request, leg.origin, News::Failed(kind)));
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

    fn deliver(&mut self) {
        let number = self.random.random_range(0..self.workers.len());
        self.deliver_from(number);
    }

    fn deliver_from(&mut self, number: usize) {
        let Some((index, origin, news)) = self.workers[number].stream.pop_front() else { return };
        let request = &mut self.requests[index];
        if request.ends > 0 || request.pair.is_none() || !request.attempts.hears(origin) {
            return;
        }
        match news {
            News::Token(id) => {
                assert_eq!(id, token(index, request.given.len()), "every token comes once, in order");
                request.given.push(id);
                request.trial = None;
            }
            News::HandedOver => self.workers[number].breaker.succeeded(),
            News::Last => {
                assert_eq!(request.given.len(), request.length, "nothing is missing");
                self.workers[number].breaker.succeeded();
                self.release(index);
                self.end(index);
            }
            News::Failed(kind) => self.fail(index, number, origin.is_prefill_leg, kind),
        }
    }

    fn fail(&mut self, index: usize, number: usize, is_prefill_leg: bool, kind: FailureKind) {
        let request = &mut self.requests[index];
        let failed = Failed {
            kind,
            in_prefill_leg: is_prefill_leg,
            num_tokens: u32::try_from(request.given.len()).unwrap(),
            can_resume: true,
            in_trial: request.trial.as_ref().is_some_and(|trial| !trial.is_spoilt()),
        };
        let verdict = request.attempts.fail(failed, self.now);
        if verdict == Verdict::GoOn {
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
        if kind != FailureKind::Unavailable {
            self.workers[blamed].breaker.failed(self.now);
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

#[test]
fn no_schedule_of_faults_loses_repeats_or_mixes_a_token() {
    let asked = std::env::var("BALEEN_SIMULATION_SEEDS").ok().and_then(|count| count.parse().ok());
    for seed in 0..asked.unwrap_or(SEEDS) {
        let outcome = std::panic::catch_unwind(|| World::new(seed).run());
        assert!(outcome.is_ok(), "seed {seed}");
    }
}

/// Both prefill workers are killed within a second, with requests on them and more to come.
fn kill_a_whole_role(seed: u64) {
    let mut world = World::of(2, 2, StdRng::seed_from_u64(seed));
    (0..NUM_REQUESTS / 2).for_each(|_| world.arrive());
    world.look_after();
    for number in [0, 1] {
        world.die(number);
        // The rows of all that died with it, then the next one dies within the second.
        for _ in 0..NUM_REQUESTS {
            world.deliver_from(number);
        }
        world.now += Duration::from_millis(world.random.random_range(1..900));
        world.look_after();
    }
    assert_eq!(world.num_accused, 0, "a request was called the cause");
    world.run();
}

#[test]
fn killing_a_whole_role_accuses_no_request() {
    for seed in 0..SEEDS / 5 {
        let outcome = std::panic::catch_unwind(|| kill_a_whole_role(seed));
        assert!(outcome.is_ok(), "seed {seed}");
    }
}
