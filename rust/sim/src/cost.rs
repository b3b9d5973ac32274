//! Step time: how long an engine computes.
//!
//! Prices are integers in parts of a nanosecond, made before the run. Invariant: of a
//! formula and a table the time of a span is the sum over its tokens, so cutting a prefill into
//! chunks changes no sum but for rounding; `Passes` add a fixed time per step.
//! Cost: O(1) of a formula, O(points) of a table.

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

/// Consecutive tokens to compute: the context of the first one, and their number.
pub type Span = (u64, u64);

/// How long tokens take to compute.
pub trait Cost: Debug + Send + Sync {
    /// Parts of a nanosecond that `tokens` consecutive tokens take after `context` tokens.
    fn parts(&self, context: u64, tokens: u64) -> u128;

    /// Nanoseconds for the same, rounded to the nearest.
    fn span(&self, context: u64, tokens: u64) -> Nanos {
        nanos(self.parts(context, tokens))
    }

    /// Parts of a nanosecond of one token each for `count` requests whose contexts add up to
    /// `contexts`. By default each is priced at the mean context.
    fn decode(&self, count: u64, contexts: u64) -> u128 {
        let mean = contexts.checked_div(count);
        mean.map_or(0, |context| self.parts(context, 1).saturating_mul(u128::from(count)))
    }

    /// Parts of a nanosecond that a request alone takes for `tokens` tokens of its answer, one per
    /// step, after `context` tokens.
    fn answer(&self, context: u64, tokens: u64) -> u128 {
        self.parts(context, tokens)
    }

    /// Nanoseconds that a request takes outside of the engine's steps, before its first token.
    fn request(&self) -> Nanos {
        0
    }

    /// Parts of a nanosecond of a step: requests that decode, with the sum of their contexts, and
    /// spans of prefills. By default the sum over them.
    fn step(&self, (count, contexts): (u64, u64), prefills: &[Span]) -> u128 {
        let spans = prefills.iter().map(|&(context, tokens)| self.parts(context, tokens));
        spans.fold(self.decode(count, contexts), u128::saturating_add)
    }
}

/// Parts of a nanosecond as nanoseconds; saturates.
#[must_use]
pub fn nanos(parts: u128) -> Nanos {
    let half = 1 << (PART_BITS - 1);
    Nanos::try_from(parts.saturating_add(half) >> PART_BITS).unwrap_or(Nanos::MAX)
}
