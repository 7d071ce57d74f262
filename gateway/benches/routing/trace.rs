//! Requests of made-up users, the same at every run: conversations over shared system prompts, or prompts that share
//! nothing. Arrivals are a Poisson process.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// One request of a trace.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub at_s: f64,
    pub prompt: Vec<u32>,
    pub output_tokens: usize,
}

const SEED: u64 = 20_261_121;
const VOCABULARY: u32 = 129_280;

/// Conversations of 1 to 8 turns, 1,000 of them at `requests_per_s` in all, each beginning with one of 100 system
/// prompts of 2K to 8K tokens, chosen by Zipf's law with exponent 1.1. A turn adds 20 to 400 tokens of the user's and
/// repeats the answer before it; its user thinks for 5 to 60 s.
pub fn conversations(requests_per_s: f64) -> Vec<Arrival> {
    let mut random = StdRng::seed_from_u64(SEED);
    let prefixes: Vec<Vec<u32>> = (0..100).map(|_| tokens(&mut random, 2_048, 8_192)).collect();
    let weights: Vec<f64> = (1..=prefixes.len()).map(|rank| (rank as f64).powf(-1.1)).collect();
    let mut arrivals = Vec::new();
    let mut start_s = 0.0;
    // 4.5 turns on average.
    let starts_per_s = requests_per_s / 4.5;
    for _ in 0..1_000 {
        start_s += exponential(&mut random, starts_per_s);
        let mut prompt = prefixes[weighted(&mut random, &weights)].clone();
        let mut at_s = start_s;
        for _ in 0..random.random_range(1..=8) {
            prompt.extend(tokens(&mut random, 20, 400));
            let output_tokens = random.random_range(50..=500);
            arrivals.push(Arrival { at_s, prompt: prompt.clone(), output_tokens });
            prompt.extend(tokens(&mut random, output_tokens, output_tokens));
            at_s += random.random_range(5.0..60.0);
        }
    }
    arrivals.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    arrivals
}

/// Prompts of 500 to 12,000 tokens that share nothing.
pub fn strangers(count: usize, requests_per_s: f64) -> Vec<Arrival> {
    let mut random = StdRng::seed_from_u64(SEED);
    let mut at_s = 0.0;
    let arrival = |_| {
        at_s += exponential(&mut random, requests_per_s);
        let prompt = tokens(&mut random, 500, 12_000);
        Arrival { at_s, prompt, output_tokens: random.random_range(50..=500) }
    };
    (0..count).map(arrival).collect()
}

/// Short prompts over few system prompts, as many as a large fleet sees.
pub fn crowd(count: usize, requests_per_s: f64, num_prefixes: usize) -> Vec<Arrival> {
    let mut random = StdRng::seed_from_u64(SEED);
    let prefixes: Vec<Vec<u32>> = (0..num_prefixes).map(|_| tokens(&mut random, 1_024, 2_048)).collect();
    let mut at_s = 0.0;
    let arrival = |_| {
        at_s += exponential(&mut random, requests_per_s);
        let mut prompt = prefixes[random.random_range(0..num_prefixes)].clone();
        prompt.extend(tokens(&mut random, 20, 200));
        Arrival { at_s, prompt, output_tokens: random.random_range(20..=100) }
    };
    (0..count).map(arrival).collect()
}

fn tokens(random: &mut StdRng, least: usize, most: usize) -> Vec<u32> {
    let count = random.random_range(least..=most);
    (0..count).map(|_| random.random_range(0..VOCABULARY)).collect()
}

fn exponential(random: &mut StdRng, per_s: f64) -> f64 {
    -(1.0 - random.random::<f64>()).ln() / per_s
}

fn weighted(random: &mut StdRng, weights: &[f64]) -> usize {
    let mut drawn = random.random::<f64>() * weights.iter().sum::<f64>();
    weights
        .iter()
        .position(|weight| {
            drawn -= weight;
            drawn < 0.0
        })
        .unwrap_or(weights.len() - 1)
}
