//! Chooses the two workers of a disaggregated request together.
//!
//! Under the default policies the pair of least cost wins: what the prompt costs the prefill worker beyond what it has
//! cached, plus what the request costs the decode worker. Only workers whose pages have one layout make a pair.

use super::{Candidate, RouteRequest, Router, choose_by};

/// A prompt that costs this much is long: some 40K tokens that nobody has cached. Long prompts keep to half of the prefill
/// workers, so that short ones never wait behind nothing but long ones.
const LONG_PREFILL_US: f64 = 4_000_000.0;

/// A chosen pair, and what the choice rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairChoice {
    /// Place among the prefill candidates.
    pub prefill: usize,
    /// Place among the decode candidates.
    pub decode: usize,
    /// Tokens of the prompt that the prefill worker is known to hold.
    pub cached_tokens: usize,
    /// What the rest of the prompt costs it.
    pub prefill_us: f64,
}

impl Router {
    /// The pair for this request; `None` where no prefill candidate fits a decode candidate.
    #[must_use]
    pub fn choose_pair(
        &self,
        request: &RouteRequest<'_>,
        prefills: &[Candidate],
        decodes: &[Candidate],
    ) -> Option<PairChoice> {
        let turn = self.next_turn();
        let prefill_places = fitting(prefills, |prefill| decodes.iter().any(|decode| decode.layout == prefill.layout));
        let paired: Vec<Candidate> = prefill_places.iter().map(|&place| prefills[place]).collect();
        let found = self.found(self.policies.prefill, request, &paired);
        let prefill_us = |place: usize| request.cost.prefill_us(found[place], request.prompt.len());
        let open = open_to(&paired, |place| prefill_us(place) >= LONG_PREFILL_US);
        let held = self.found(self.policies.decode, request, decodes);
        let decode_us = |place: usize| {
            let (load, total) = (&decodes[place].load, request.prompt.len());
            load.decode_us(&request.cost, held[place], total, request.page_size_tokens)
        };
        let best_decode_us = |layout: u64| {
            let fits = decodes.iter().enumerate().filter(|(_, decode)| decode.layout == layout);
            fits.map(|(place, _)| decode_us(place)).fold(f64::INFINITY, f64::min)
        };
        let layouts: Vec<(u64, f64)> = distinct(&paired).map(|layout| (layout, best_decode_us(layout))).collect();
        let decode_share = |layout: u64| layouts.iter().find(|entry| entry.0 == layout).map_or(0.0, |entry| entry.1);
        let candidates: Vec<Candidate> = open.iter().map(|&place| paired[place]).collect();
        let chosen = choose_by(self.policies.prefill, turn, request, &candidates, |index| {
            let worker = &candidates[index];
            worker.load.busy_us(&request.cost) + prefill_us(open[index]) + decode_share(worker.layout)
        })?;
        let prefill = open[chosen];
        let partners = fitting(decodes, |decode| decode.layout == paired[prefill].layout);
        let candidates: Vec<Candidate> = partners.iter().map(|&place| decodes[place]).collect();
        let chosen = choose_by(self.policies.decode, turn, request, &candidates, |index| decode_us(partners[index]))?;
        Some(PairChoice {
            prefill: prefill_places[prefill],
            decode: partners[chosen],
            cached_tokens: found[prefill],
            prefill_us: prefill_us(prefill),
        })
    }
}

fn fitting(workers: &[Candidate], fits: impl Fn(&Candidate) -> bool) -> Vec<usize> {
    workers.iter().enumerate().filter(|(_, worker)| fits(worker)).map(|(place, _)| place).collect()
}

fn distinct(workers: &[Candidate]) -> impl Iterator<Item = u64> {
    let is_first = |place: usize| workers[..place].iter().all(|other| other.layout != workers[place].layout);
    (0..workers.len()).filter(move |&place| is_first(place)).map(|place| workers[place].layout)
}

/// Places of the prefill workers that may take the prompt. Where it is long for a worker, that worker must belong to the
/// half of its fleet that takes long ones, which every gateway draws alike.
fn open_to(workers: &[Candidate], is_long_for: impl Fn(usize) -> bool) -> Vec<usize> {
    let places = || 0..workers.len();
    if workers.len() < 2 || !places().any(&is_long_for) {
        return places().collect();
    }
    let rank = |place: usize| places().filter(|&other| workers[other].name_hash < workers[place].name_hash).count();
    places().filter(|&place| !is_long_for(place) || rank(place) < workers.len().div_ceil(2)).collect()
}

#[cfg(test)]
mod tests;
