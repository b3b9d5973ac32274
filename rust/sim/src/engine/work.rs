//! Tokens to compute in a prefill.
//!
//! Invariant: holes of the match come first, then the tokens after the match. Each span is computed
//! in order. Cost: O(spans).

use std::collections::VecDeque;

use kvtrie_core::Lease;

use crate::cost::{Cost, Span};

/// Spans of a prompt still to be computed.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Holes of all layers, a span each, then the tokens after the match (possibly empty).
    spans: VecDeque<Span>,
    /// Price of holes of some layers, in fractions of a nanosecond, due with the first chunk.
    partial: u128,
}

impl Work {
    /// Add a hole below layer `hi` of `layers`. Recomputing a layer needs all layers below it, so
    /// the hole costs their share.
    fn add_hole(&mut self, hole: Span, (hi, layers): (u16, u16), cost: &dyn Cost) {
        if hi == layers {
            self.spans.push_back(hole);
        } else {
            let whole = cost.parts(hole.0, hole.1);
            let share = whole * u128::from(hi) / u128::from(layers.max(1));
            self.partial = self.partial.saturating_add(share);
        }
    }

    /// Missing tokens of a lease in `target` real tokens, with the first `known` matched and
    /// `block` real tokens per block.
    pub(super) fn of(
        lease: &Lease,
        (known, target): (u64, u64),
        block: u64,
        layers: u16,
        cost: &dyn Cost,
    ) -> Self {
        let mut work = Self::default();
        for (at, holes) in lease.recompute() {
            let begin = u64::from(at) * block;
            let end = (begin + block).min(known);
            work.add_hole((begin, end - begin), (holes.hi, layers), cost);
        }
        work.spans.push_back((known, target - known));
        work
    }

    /// Whether all tokens are computed.
    pub(super) fn done(&self) -> bool {
        self.spans.is_empty()
    }

    /// Context of the next token after the match; `None` while holes are left or at the end.
    pub(super) fn behind_holes(&self) -> Option<u64> {
        self.spans.front().filter(|_| self.spans.len() == 1).map(|&(context, _)| context)
    }

    /// Drop all work, because it is computed elsewhere. Returns the number of dropped tokens.
    pub(super) fn drain(&mut self) -> u64 {
        self.partial = 0;
        self.spans.drain(..).map(|(_, tokens)| tokens).sum()
    }

    /// Take up to `budget` tokens and append their spans. Returns the token count and the price of
    /// partial holes, in fractions of a nanosecond.
    pub(super) fn take(&mut self, budget: u64, spans: &mut Vec<Span>) -> (u64, u128) {
        let mut left = budget;
        while let Some((context, tokens)) = self.spans.front_mut() {
            let now = left.min(*tokens);
            if now > 0 {
                spans.push((*context, now));
            }
            (*context, *tokens, left) = (*context + now, *tokens - now, left - now);
            if *tokens > 0 {
                break;
            }
            self.spans.pop_front();
        }
        (budget - left, std::mem::take(&mut self.partial))
    }
}

#[cfg(test)]
mod tests {
    use super::Work;
    use crate::cost::Affine;

    #[test]
    fn chunks_take_holes_first_and_add_up() {
        let cost = Affine { base: 10, slope: 0 };
        let mut work = Work::default();
        work.add_hole((16, 16), (4, 4), &cost);
        work.add_hole((48, 16), (1, 4), &cost);
        work.spans.push_back((64, 30));
        let mut spans = Vec::new();
        assert_eq!(work.take(10, &mut spans), (10, 40));
        assert_eq!((work.behind_holes(), work.done()), (None, false));
        assert_eq!(work.take(10, &mut spans), (10, 0));
        assert_eq!(work.behind_holes(), Some(68));
        assert_eq!(work.take(100, &mut spans), (26, 0));
        assert!(work.done());
        assert_eq!(spans, [(16, 10), (26, 6), (64, 4), (68, 26)]);
    }

    #[test]
    fn a_prompt_that_is_all_there_is_one_empty_chunk() {
        let mut work = Work::default();
        work.spans.push_back((64, 0));
        assert!(!work.done());
        assert_eq!(work.take(0, &mut Vec::new()), (0, 0));
        assert!(work.done());
    }
}
