//! Token price from a table: piecewise linear in the context.
//!
//! Invariant: contexts ascend and prices never decrease. Before the first point the price is
//! constant. After the last point the slope continues. Cost: O(points) per span.

use super::Cost;

/// Pairs of a context and the token price there, in fractions of a nanosecond.
#[derive(Clone, Debug)]
pub struct Table(pub Vec<(u64, u64)>);

impl Table {
    /// Price of a token after `context` tokens.
    fn price(&self, context: u64) -> u128 {
        let points = &self.0;
        let after = points.partition_point(|&(at, _)| at <= context);
        if after == 0 || points.len() == 1 {
            return u128::from(points[0].1);
        }
        let (low, high) =
            (points[(after - 1).min(points.len() - 2)], points[after.min(points.len() - 1)]);
        let (rise, run) = (u128::from(high.1 - low.1), u128::from((high.0 - low.0).max(1)));
        u128::from(low.1) + rise * u128::from(context - low.0) / run
    }
}

impl Cost for Table {
    fn parts(&self, context: u64, tokens: u64) -> u128 {
        let end = context.saturating_add(tokens);
        let (mut at, mut sum) = (context, 0_u128);
        while at < end {
            // Each piece is linear: token count times the mean of the two end prices.
            let next = self.0.iter().map(|&(point, _)| point).find(|&point| point > at);
            let stop = next.map_or(end, |point| point.min(end));
            let ends = self.price(at) + self.price(stop - 1);
            sum = sum.saturating_add(ends.saturating_mul(u128::from(stop - at)) / 2);
            at = stop;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::Table;
    use crate::cost::Cost;

    #[test]
    fn a_span_is_the_sum_over_its_tokens() {
        let table = Table(vec![(4, 100), (10, 400), (20, 400), (30, 1400)]);
        let alone = |context| table.parts(context, 1);
        let prices = [0, 4, 7, 10, 15, 25, 30, 40].map(alone);
        assert_eq!(prices, [100, 100, 250, 400, 400, 900, 1400, 2400]);
        for context in 0..45 {
            for tokens in 0..45 {
                let sum: u128 = (context..context + tokens).map(alone).sum();
                assert_eq!(table.parts(context, tokens), sum, "{tokens} behind {context}");
            }
        }
        assert_eq!(Table(vec![(9, 7)]).parts(3, 50), 350);
    }
}
