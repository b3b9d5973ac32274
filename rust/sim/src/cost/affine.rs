//! Affine token price: a fixed time plus a time per token of context.
//!
//! Invariant: linear in the context. Cost: O(1).

use super::Cost;

/// `base + slope * context` per token.
#[derive(Clone, Copy, Debug)]
pub struct Affine {
    /// Price of a token without context, in fractions of a nanosecond.
    pub base: u64,
    /// Price per token of context, in fractions of a nanosecond.
    pub slope: u64,
}

impl Cost for Affine {
    fn parts(&self, context: u64, tokens: u64) -> u128 {
        let (base, slope) = (u128::from(self.base), u128::from(self.slope));
        let tokens = u128::from(tokens);
        // Contexts of the tokens: context, context + 1, ...
        let before = tokens * tokens.saturating_sub(1) / 2;
        let contexts = (tokens * u128::from(context)).saturating_add(before);
        base.saturating_mul(tokens).saturating_add(slope.saturating_mul(contexts))
    }

    fn decode(&self, count: u64, contexts: u64) -> u128 {
        u128::from(self.base) * u128::from(count) + u128::from(self.slope) * u128::from(contexts)
    }
}

#[cfg(test)]
mod tests {
    use super::Affine;
    use crate::cost::{Cost, PART_BITS};

    #[test]
    fn a_span_is_the_sum_over_its_tokens_however_it_is_cut() {
        let cost = Affine { base: 1000 << PART_BITS, slope: 3 << PART_BITS };
        assert_eq!(cost.span(0, 64), 64_000 + 3 * (63 * 64 / 2));
        assert_eq!(cost.parts(0, 64), cost.parts(0, 17) + cost.parts(17, 47));
        assert_eq!(cost.span(10, 1), 1030);
        assert_eq!(cost.span(5, 0), 0);
        assert_eq!(cost.span(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn a_step_is_the_sum_over_its_tokens() {
        let cost = Affine { base: 1000 << PART_BITS, slope: 3 << PART_BITS };
        let alone = [7, 12, 100].map(|context| cost.parts(context, 1)).iter().sum::<u128>();
        assert_eq!(cost.step((3, 119), &[]), alone);
        let spans = [(0, 64), (5, 9)];
        assert_eq!(cost.step((0, 0), &spans), cost.parts(0, 64) + cost.parts(5, 9));
        assert_eq!(cost.step((3, 119), &spans), alone + cost.step((0, 0), &spans));
    }
}
