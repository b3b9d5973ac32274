//! Clean copies first: in host memory above a remote tier, copies that the remote tier has too leave
//! before dirty ones, because a write to a shared store may take any time.
//!
//! Invariant: victims of one kind leave in order of value. Cost: at most `MOST_PASSED` links and
//! unlinks per call more than in order of value.

use crate::block::TierId;
use crate::tier::Kind;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;

/// Dirty copies that are passed over per call; after them victims leave in order of value.
const MOST_PASSED: usize = 64;

impl Manager {
    /// Adds clean victims until `wanted` slots of a tier are spare, and passes over dirty ones.
    pub(super) fn clean_first(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        wanted: u64,
        now: Nanos,
    ) {
        // A preview of the tier is for its dirty copies, which it writes.
        let previewed = set.preview.is_some_and(|(at, _)| at == tier);
        if previewed || !self.above_remote(tier) {
            return;
        }
        let mut passed = Vec::new();
        while set.spare[tier] < wanted && passed.len() < MOST_PASSED {
            let Some(entry) = self.tiers[tier].eviction.victim(stamp(now)) else { break };
            // A block leaves after its resume point, which is no victim of a set.
            if self.has_point_on(tier, entry.id) {
                break;
            }
            self.tiers[tier].eviction.unlink(entry.id);
            if !self.blocks.is_clean(tier, entry.id) {
                passed.push(entry);
            } else if self.evict_tail(set, tier, entry, wanted, now) {
                set.settled.push((tier, entry.id));
                // Without room wanted the parent is linked, and compared with the others.
                self.expose(set, tier, 0, now);
            } else {
                set.touched.push((tier, entry.id));
                self.decide(set, tier, entry, now);
            }
        }
        for entry in passed {
            self.put_in(set, tier, entry);
        }
    }

    fn above_remote(&self, tier: TierId) -> bool {
        let kind = |tier: TierId| self.tiers[tier].spec.kind;
        kind(tier) == Kind::Host && tier < self.tiers.last() && kind(tier + 1) == Kind::Remote
    }
}
