//! Step price: a fixed time plus table prices of the prefills and decodes.
//!
//! The fixed time is the weight read, paid once per step. Invariant: a prefill larger than the
//! table is priced as consecutive passes of the largest size. Cost: O(log points) per pass.

use kvtrie_core::Nanos;

use super::{Cost, Grid, PART_BITS, Span, Table};

/// Fixed step time, with grids for prefills and decodes.
#[derive(Clone, Debug)]
pub struct Passes {
    /// Price of a step without tokens.
    base: u128,
    /// Additional price by context and tokens of the pass.
    prefill: Grid,
    /// Additional price by mean context and number of decoding requests.
    decode: Grid,
    /// First column of `decode`: price for a single request.
    single: Table,
    request: Nanos,
}

impl Passes {
    /// Create the model. `base` is the fixed time of a step and `request` the time of a request
    /// outside of steps, both in nanoseconds. `single` has the decode prices of a single request by
    /// context, in fractions of a nanosecond.
    #[must_use]
    pub fn new(base: u64, prefill: Grid, decode: Grid, single: Table, request: Nanos) -> Self {
        Self { base: u128::from(base) << PART_BITS, prefill, decode, single, request }
    }
}

impl Cost for Passes {
    fn parts(&self, context: u64, tokens: u64) -> u128 {
        let (mut at, mut left, mut sum) = (context, tokens, 0_u128);
        while left > 0 {
            let pass = left.min(self.prefill.last());
            sum = sum.saturating_add(self.prefill.at(at, pass));
            (at, left) = (at.saturating_add(pass), left - pass);
        }
        sum
    }

    fn decode(&self, count: u64, contexts: u64) -> u128 {
        contexts.checked_div(count).map_or(0, |context| self.decode.at(context, count))
    }

    fn request(&self) -> Nanos {
        self.request
    }

    fn step(&self, (count, contexts): (u64, u64), prefills: &[Span]) -> u128 {
        let spans = prefills.iter().filter(|&&(_, tokens)| tokens > 0);
        if count == 0 && spans.clone().next().is_none() {
            return 0;
        }
        let begun = self.base.saturating_add(self.decode(count, contexts));
        spans
            .map(|&(context, tokens)| self.parts(context, tokens))
            .fold(begun, u128::saturating_add)
    }

    fn answer(&self, context: u64, tokens: u64) -> u128 {
        let steps = self.base.saturating_mul(u128::from(tokens));
        steps.saturating_add(self.single.parts(context, tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::Passes;
    use crate::cost::{Cost, Grid, PART_BITS, Table};

    fn passes() -> Passes {
        let grid = |rows| Grid::new(vec![0, 100], vec![1, 10], rows).unwrap();
        let decode = grid(vec![vec![0, 90], vec![50, 590]]);
        let single = Table(vec![(0, 0), (100, 50 << PART_BITS)]);
        Passes::new(1000, grid(vec![vec![0, 500], vec![20, 700]]), decode, single, 0)
    }

    #[test]
    fn the_weights_are_read_once_a_step() {
        let cost = passes();
        let step = |decodes, prefills: &[_]| cost.step(decodes, prefills) >> PART_BITS;
        assert_eq!(step((0, 0), &[]), 0);
        assert_eq!(step((0, 0), &[(5, 0)]), 0);
        assert_eq!(step((0, 0), &[(0, 10)]), 1500);
        assert_eq!(step((1, 100), &[]), 1050);
        assert_eq!(step((10, 1000), &[(0, 10), (100, 10)]), 1000 + 590 + 500 + 700);
    }

    #[test]
    fn a_long_prefill_is_passes_of_the_largest_size() {
        let cost = passes();
        let parts = |context, tokens| cost.parts(context, tokens) >> PART_BITS;
        assert_eq!(parts(0, 20), parts(0, 10) + parts(10, 10));
        assert_eq!(parts(90, 25), parts(90, 10) + parts(100, 10) + parts(110, 5));
        assert_eq!(parts(0, 0), 0);
    }

    #[test]
    fn an_answer_alone_is_the_sum_of_its_steps() {
        let cost = passes();
        let steps: u128 = (40..70).map(|context| cost.step((1, context), &[])).sum();
        assert_eq!(cost.answer(40, 30) >> PART_BITS, steps >> PART_BITS);
    }
}
