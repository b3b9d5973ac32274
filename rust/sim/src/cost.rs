//! Cost models: computation time of an engine's steps.
//!
//! Prices are integers in fractions of a nanosecond, prepared before the run. Invariant: formulas
//! and tables price a span as the sum over its tokens, so splitting a prefill into chunks changes
//! the total only by rounding. `Passes` adds a fixed time per step. Cost: O(1) for a formula,
//! O(points) for a table.

mod affine;
mod grid;
mod passes;
mod table;

use std::fmt::Debug;

use kvtrie_core::Nanos;

pub use affine::Affine;
pub use grid::Grid;
pub use passes::Passes;
pub use table::Table;

/// Prices are in units of `2^-PART_BITS` ns.
pub const PART_BITS: u32 = 32;

/// Consecutive tokens to compute: context of the first token, and token count.
pub type Span = (u64, u64);

/// Computation time of tokens.
pub trait Cost: Debug + Send + Sync {
    /// Price of `tokens` consecutive tokens after `context` tokens, in fractions of a nanosecond.
    fn parts(&self, context: u64, tokens: u64) -> u128;

    /// The same price in nanoseconds, rounded to the nearest.
    fn span(&self, context: u64, tokens: u64) -> Nanos {
        nanos(self.parts(context, tokens))
    }

    /// Price of a decode step of `count` requests with `contexts` context tokens in total. The
    /// default prices each token at the mean context.
    fn decode(&self, count: u64, contexts: u64) -> u128 {
        let mean = contexts.checked_div(count);
        mean.map_or(0, |context| self.parts(context, 1).saturating_mul(u128::from(count)))
    }

    /// Price of `tokens` answer tokens of one request after `context` tokens, computed in separate
    /// steps.
    fn answer(&self, context: u64, tokens: u64) -> u128 {
        self.parts(context, tokens)
    }

    /// Nanoseconds of a request outside of engine steps, before its first token.
    fn request(&self) -> Nanos {
        0
    }

    /// Price of a step: decoding requests with the sum of their contexts, and prefill spans. The
    /// default is their sum.
    fn step(&self, (count, contexts): (u64, u64), prefills: &[Span]) -> u128 {
        let spans = prefills.iter().map(|&(context, tokens)| self.parts(context, tokens));
        spans.fold(self.decode(count, contexts), u128::saturating_add)
    }
}

/// Convert a price to nanoseconds. Saturates.
#[must_use]
pub fn nanos(parts: u128) -> Nanos {
    let half = 1 << (PART_BITS - 1);
    Nanos::try_from(parts.saturating_add(half) >> PART_BITS).unwrap_or(Nanos::MAX)
}
