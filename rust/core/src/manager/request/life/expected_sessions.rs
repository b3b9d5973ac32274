//! Expected sessions: sessions most likely to resume, for an engine to prefetch.
//!
//! The manager makes no calls, so the engine polls it. Invariant: only waiting sessions without a
//! lease are named. Cost: O(sessions of the scope · log limit) per call.

use crate::error::Result;
use crate::manager::Manager;
use crate::policy::Needs;
use crate::scope::Scope;
use crate::time::Nanos;

/// A waiting session.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedSession {
    /// Its name.
    pub session: String,
    /// Learned rate of uses of its last block per request from now on, over the best waiting time.
    pub rate: f64,
}

impl Manager {
    /// Waiting sessions of a scope, most likely to resume first: at most `limit`, and none without
    /// a learning policy. Ages are counted in requests, so `now` is unused.
    ///
    /// # Errors
    /// `Config` if the scope was first used with a different structure.
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
        // Usually a few of many sessions are requested.
        if limit < expected.len() {
            expected.select_nth_unstable_by(limit, order);
            expected.truncate(limit);
        }
        expected.sort_unstable_by(order);
        Ok(expected)
    }
}
