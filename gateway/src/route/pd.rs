//! Chooses the two workers of a disaggregated request together.
//!
//! Under the default policies the pair of least cost wins: what the prompt costs the prefill worker beyond what it has
//! cached, plus what the request costs the decode worker. Only workers whose pages have one layout make a pair, and of
//! these only the ones that are open.

use std::collections::HashSet;

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
    /// The pair for this request, none of `closed`, which names pairs by their workers' numbers. `None` where no prefill
    /// candidate fits a decode candidate.
    #[must_use]
    pub fn choose_pair(
        &self,
        request: &RouteRequest<'_>,
        prefills: &[Candidate],
        decodes: &[Candidate],
        closed: &HashSet<(u16, u16)>,
    ) -> Option<PairChoice> {
        let turn = self.next_turn();
        let fits = |prefill: &Candidate, decode: &Candidate| {
            decode.layout == prefill.layout && (closed.is_empty() || !closed.contains(&(prefill.worker, decode.worker)))
        };
        let prefill_places = fitting(prefills, |prefill| decodes.iter().any(|decode| fits(prefill, decode)));
        let paired: Vec<Candidate> = prefill_places.iter().map(|&place| prefills[place]).collect();
        let found = self.found(self.policies.prefill, request, &paired);
        let prefill_us = |place: usize| request.cost.prefill_us(found[place], request.prompt.len());
        let open = open_to(&paired, |place| prefill_us(place) >= LONG_PREFILL_US);
        let held = self.found(self.policies.decode, request, decodes);
        let decode_us = |place: usize| {
            let (load, total) = (&decodes[place].load, request.prompt.len());
            load.decode_us(&request.cost, held[place], total, request.page_size_tokens)
        };
        // Cheapest first, so that a prefill worker's best partner is the first that fits it.
        let mut by_cost: Vec<(f64, usize)> = (0..decodes.len()).map(|place| (decode_us(place), place)).collect();
        by_cost.sort_by(|a, b| a.0.total_cmp(&b.0));
        let decode_share = |prefill: &Candidate| {
            by_cost.iter().find(|(_, place)| fits(prefill, &decodes[*place])).map_or(f64::INFINITY, |entry| entry.0)
        };
        let candidates: Vec<Candidate> = open.iter().map(|&place| paired[place]).collect();
        let chosen = choose_by(self.policies.prefill, turn, request, &candidates, |index| {
            let worker = &candidates[index];
            worker.load.busy_us(&request.cost) + prefill_us(open[index]) + decode_share(worker)
        })?;
        let prefill = open[chosen];
        let partners = fitting(decodes, |decode| fits(&paired[prefill], decode));
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
