//! What a request costs a worker, in microseconds of one GPU: enough to compare workers, no promise about a clock.
//!
//! The law is that of sparse attention: every token pays for projections, experts and communication; it attends to at
//! most `index_topk` keys; and its indexer scores every key before it, which makes long prompts quadratic after all.
//! The numbers are published and measured ones of V3.2 on H200-class GPUs; only their ratios matter here.

/// Prices of one model's work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// A prompt token's share that its position does not change.
    pub token_us: f64,
    /// A token's attention to one key, of which there are at most `attended_keys`.
    pub key_us: f64,
    pub attended_keys: f64,
    /// Scoring one key for one token.
    pub score_us: f64,
    /// What each request in progress costs another one over its life, since they share every step.
    pub neighbour_us: f64,
    /// Copying a token's latent and index key to another worker: 80 KB over a link of 50 GB/s.
    pub transfer_us: f64,
}

impl CostModel {
    /// V3.2: 72 us a token, 51 us for 2,048 attended keys, 88 us for scoring 128K keys.
    pub const SPARSE: Self = Self {
        token_us: 72.0,
        key_us: 51.0 / 2048.0,
        attended_keys: 2048.0,
        score_us: 88.0 / 131_072.0,
        neighbour_us: 30_000.0,
        transfer_us: 1.6,
    };
    /// V3 and R1: every key is attended to, 29 us for each 1,024 of them, and none is scored.
    pub const DENSE: Self = Self { key_us: 29.0 / 1024.0, attended_keys: f64::INFINITY, score_us: 0.0, ..Self::SPARSE };

    /// Prices of the models of one `model_type`.
    #[must_use]
    pub fn of(model_type: &str) -> Self {
        if model_type == "deepseek_v3" { Self::DENSE } else { Self::SPARSE }
    }

    /// Computing a prompt of `total` tokens whose first `cached` are cached.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "prompts are far shorter than 2^52 tokens")]
    pub fn prefill_us(&self, cached: usize, total: usize) -> f64 {
        let (from, to) = (cached.min(total) as f64, total as f64);
        let attended = self.attended_before(to) - self.attended_before(from);
        let scored = (to * to - from * from) / 2.0;
        self.token_us * (to - from) + self.key_us * attended + self.score_us * scored
    }

    /// Keys that the first `length` tokens of a prompt attend to, all together.
    fn attended_before(&self, length: f64) -> f64 {
        let full = self.attended_keys.min(length);
        full * full / 2.0 + (length - full) * full
    }
}

#[cfg(test)]
mod tests {
    use super::CostModel;

    #[test]
    fn parts_of_a_prompt_add_up() {
        for model in [CostModel::SPARSE, CostModel::DENSE] {
            let whole = model.prefill_us(0, 50_000);
            let parts = model.prefill_us(0, 1_000) + model.prefill_us(1_000, 3_000) + model.prefill_us(3_000, 50_000);
            assert!((whole - parts).abs() < 1e-6 * whole, "{whole} {parts}");
            assert_eq!(model.prefill_us(640, 640), 0.0);
            assert_eq!(model.prefill_us(9_999, 640), 0.0);
        }
    }

    #[test]
    fn each_token_pays_what_the_law_says() {
        let model = CostModel { token_us: 7.0, key_us: 3.0, attended_keys: 4.0, score_us: 0.5, ..CostModel::SPARSE };
        let step = |position: f64| 7.0 + 3.0 * position.min(4.0) + 0.5 * position;
        // The integral over positions 0 to 10 of what one token pays there.
        let law: f64 = (0..1_000_000).map(|slice| step(f64::from(slice) * 1e-5 + 5e-6) * 1e-5).sum();
        assert!((model.prefill_us(0, 10) - law).abs() < 1e-3, "{law}");
    }

    #[test]
    fn a_long_prompts_end_costs_more_than_its_beginning() {
        let model = CostModel::SPARSE;
        let (beginning, end) = (model.prefill_us(2_048, 10_048), model.prefill_us(120_000, 128_000));
        assert!(end > 1.5 * beginning && end < 2.0 * beginning, "{beginning} {end}");
    }
}
