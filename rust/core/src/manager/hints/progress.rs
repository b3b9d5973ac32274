//! Progress hints: the expected end of the tool call a session waits for.
//!
//! Each hint replaces the previous hint, so a slow tool moves the session's blocks down, and a
//! nearly finished tool moves them up: a learning policy ranks the blocks by the remaining time,
//! and they are loaded in time. Invariant: a session is no longer expected once its next request
//! has started. Cost: O(path) per hint.

use crate::block::TierId;
use crate::hint::{Answer, HintCode, HintReply};
use crate::manager::Manager;
use crate::scope::Scope;
use crate::time::Nanos;

use super::coming::{Load, LoadKey};
use super::{accepted, rejected};

/// Divisor of the pause for the margin of loads, because estimates are wrong.
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
        let before = self.sessions.expected(id);
        let request = self.feed.request_after(eta);
        let kept = self.feed.expect(&path, request, before);
        // A reply must not reveal the sessions of different tenants.
        let left = if scope.shares() { 0 } else { kept };
        self.refresh_path(&path);
        self.sessions.expect(id, request);
        // The last tier has no tier below to load from.
        if tier < self.tiers.last() {
            // Unrelated loads may then occupy the lane for an equal time.
            let load = Load::unmeasured(tier, now.saturating_add(eta), eta / EARLY, 1);
            self.queue_load(LoadKey::Session(id), load, &path, now);
        } else {
            self.sessions.coming.remove(&LoadKey::Session(id));
        }
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
        HintReply { answer, blocks, not_applied: left, code, reason }
    }
}
