//! Expected sessions: those whose learned pause is about to end, for an engine that then prefetches.
//!
//! The manager makes no calls: the engine polls it. Invariant: only sessions that wait, without a
//! lease, are named. Cost: O(sessions of the scope · log limit) per call.

use crate::error::Result;
use crate::manager::Manager;
use crate::policy::Needs;
use crate::scope::Scope;
use crate::time::Nanos;

/// A session that waits.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedSession {
    /// Its name.
    pub session: String,
    /// Learned uses of its last block per request, from now on, over the best time to wait.
    pub rate: f64,
}

impl Manager {
    /// The sessions of a scope that wait for their next request, the likeliest to come soon first: at
    /// most `limit`, and none where no tier's policy learns. Ages are counted in requests, so `now`
    /// only says when this is asked.
    ///
    /// # Errors
    /// `Config` if the scope was first used with another structure.
    pub fn expected_sessions(
        &self,
        scope: &Scope,
        limit: usize,
        now: Nanos,
    ) -> Result<Vec<ExpectedSession>> {
        self.open()?;
        let _ = now;
        let learns = self.tiers.iter().find(|tier| tier.eviction.needs(Needs::REUSE));
        let (Some(tier), Some(id)) = (learns, self.scopes.find(scope)?) else {
            return Ok(Vec::new());
        };
        let mut expected: Vec<ExpectedSession> = self
            .sessions
            .waiting(id)
            .filter_map(|(name, tip)| {
                let last_use = self.feed.last_use(tip, self.trie().depth(tip), &self.settings);
                let session = scope.named(name)?.to_owned();
                let rate = tier.eviction.reuse_rate(&last_use)?;
                Some(ExpectedSession { session, rate })
            })
            .collect();
        let order = |a: &ExpectedSession, b: &ExpectedSession| {
            b.rate.total_cmp(&a.rate).then_with(|| a.session.cmp(&b.session))
        };
        // Few are asked for of many.
        if limit < expected.len() {
            expected.select_nth_unstable_by(limit, order);
            expected.truncate(limit);
        }
        expected.sort_unstable_by(order);
        Ok(expected)
    }
}
