//! What a store keeps about a block for its manager, and never looks at.
//!
//! Invariant: ages grow and times to live shrink with the clock, by saturating sums.
//! Cost: 32 bytes in a frame.

/// What a store keeps about a block for its manager.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meta {
    /// Nanoseconds since the last use.
    pub age: u64,
    /// How often it was used.
    pub uses: u32,
    /// Blocks of the session it belongs to.
    pub session_blocks: u32,
    /// Its cost; NaN leaves it to the policy.
    pub cost: f64,
    /// Nanoseconds that it still has to live; `u64::MAX` for no end.
    pub ttl: u64,
    /// Its priority, plus one; 0 if nothing was said.
    pub priority: u8,
}

impl Default for Meta {
    fn default() -> Self {
        Self { age: 0, uses: 0, session_blocks: 0, cost: f64::NAN, ttl: u64::MAX, priority: 0 }
    }
}

impl Meta {
    /// The same, `elapsed` nanoseconds later.
    #[must_use]
    pub fn later(self, elapsed: u64) -> Self {
        let ttl = if self.ttl == u64::MAX { u64::MAX } else { self.ttl.saturating_sub(elapsed) };
        Self { age: self.age.saturating_add(elapsed), ttl, ..self }
    }
}
