//! Progress hints: when the tool that a session waits for will have ended, as far as it knows.
//!
//! Each hint replaces the one before, so a tool that takes longer moves the session's blocks down
//! and one that is nearly done moves them up: a policy that learns ranks them by the time that is
//! left, and they are loaded so that they are there in time. Invariant: a session whose next request
//! has begun is no longer expected. Cost: O(path) per hint.

use crate::block::{BlockId, TierId};
use crate::hint::{Answer, HintCode, HintReply};
use crate::manager::Manager;
use crate::manager::request::life::session::Expected;
use crate::scope::Scope;
use crate::time::Nanos;

use super::{accepted, rejected};

/// Loads begin early by the pause divided by this, because estimates are wrong.
const EARLY: Nanos = 8;

impl Manager {
    /// Expects the next request of a session after `eta`.
    pub(super) fn expect_session(
        &mut self,
        (name, scope): (&str, &Scope),
        tier: TierId,
        eta: Nanos,
        now: Nanos,
    ) -> HintReply {
        let Some(id) = self.session(name, scope) else {
            return rejected(format!("session '{name}' has no block in its scope"));
        };
        let path = self.path_to(self.sessions.tip(id));
        if path.is_empty() {
            return rejected("no block of the path is cached");
        }
        let before = self.sessions.expected(id).map(|expected| expected.request);
        let request = self.feed.request_after(eta);
        let kept = self.feed.expect(&path, request, before);
        // A reply says nothing of the sessions of other tenants.
        let left = if scope.shares() { 0 } else { kept };
        self.refresh_path(&path);
        // The last tier has none below to load from.
        let loads = tier < self.tiers.last();
        let bring = loads.then(|| (self.load_from(&path, tier, eta, now), tier));
        self.sessions.expect(id, Expected { request, bring });
        let blocks = path.len() as u64 - left;
        if scope.shares() {
            return accepted(path.len() as u64);
        }
        let (answer, code, reason) = match (left, blocks) {
            (0, _) => (Answer::Accepted, HintCode::Accepted, String::new()),
            _ => (
                Answer::Clipped,
                HintCode::InUse,
                format!("{left} blocks are wanted by other sessions before"),
            ),
        };
        HintReply { answer, blocks, left, code, reason }
    }

    /// When to begin to load a path so that it is on a tier after `eta`.
    fn load_from(&self, path: &[BlockId], tier: TierId, eta: Nanos, now: Nanos) -> Nanos {
        let all = self.all_layers();
        let missing =
            path.iter().filter(|&&block| self.expected(tier, block) != all).count() as u64;
        let bytes = self.settings.layer_bytes * u64::from(all.len()) * missing;
        // Other loads may be on the lane then.
        let takes = 2 * self.lanes.takes(self.tiers[tier + 1].read, bytes);
        now.saturating_add(eta.saturating_sub(takes.saturating_add(eta / EARLY)))
    }

    /// Loads the blocks of sessions that are about to come back.
    pub(super) fn bring_expected(&mut self, now: Nanos) {
        while let Some((id, tier)) = self.sessions.next_due(now) {
            let path = self.path_to(self.sessions.tip(id));
            self.fetch_path(&path, tier, None, now);
        }
    }
}
