//! Metadata of a block, stored for the manager and opaque to the store.
//!
//! Invariant: with the clock, ages grow and times to live shrink, saturating. Cost: 32 bytes per
//! frame.

/// Metadata of a block for the manager.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meta {
    /// Nanoseconds since the last use.
    pub age: u64,
    /// Number of uses.
    pub uses: u32,
    /// Blocks of the session.
    pub session_blocks: u32,
    /// Cost, or NaN to let the policy decide.
    pub cost: f64,
    /// Remaining nanoseconds of its priority. `u64::MAX` for no end.
    pub ttl: u64,
    /// Priority plus one, or 0 for none.
    pub priority: u8,
}

impl Default for Meta {
    fn default() -> Self {
        Self { age: 0, uses: 0, session_blocks: 0, cost: f64::NAN, ttl: u64::MAX, priority: 0 }
    }
}

impl Meta {
    /// Metadata after `elapsed` nanoseconds.
    #[must_use]
    pub fn later(self, elapsed: u64) -> Self {
        let ttl = if self.ttl == u64::MAX { u64::MAX } else { self.ttl.saturating_sub(elapsed) };
        Self { age: self.age.saturating_add(elapsed), ttl, ..self }
    }
}
