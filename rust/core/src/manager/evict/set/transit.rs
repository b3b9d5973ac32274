//! Transit through host: slots for moves between non-adjacent tiers.
//!
//! Invariant: the slots reserved for stores from disk to remote are used for nothing else. Cost:
//! O(tiers).

use crate::block::TierId;
use crate::tier::Kind;

use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;

impl Manager {
    /// The transit tier of a move between two tiers, or `None` for a direct move.
    pub(crate) fn transit(&self, a: TierId, b: TierId) -> Option<TierId> {
        // Host slots without a block have no group.
        if self.blocks.arena(a).is_some() {
            return None;
        }
        let kind = |tier: TierId| self.tiers[tier].spec.kind;
        let (upper, lower) = (a.min(b), a.max(b));
        let host = (0..self.tiers.len()).find(|&tier| kind(tier) == Kind::Host)?;
        let straight = match kind(lower) {
            // Remote exchanges bytes with host only.
            Kind::Remote => upper == host,
            _ => lower - upper == 1,
        };
        (!straight).then_some(host)
    }

    /// Takes a transit slot for a block out of the spare slots.
    pub(crate) fn pass(&self, set: &mut EvictionSet, host: TierId) -> bool {
        let units = self.tiers.units(host, self.all_layers());
        let left = set.spare[host].checked_sub(units);
        if let Some(left) = left {
            set.spare[host] = left;
        }
        left.is_some()
    }

    /// Number of slots of a tier reserved for stores from disk to remote.
    pub(crate) fn transit_reserve(&self, tier: TierId) -> u64 {
        let passes = (tier + 1..self.tiers.last()).any(|at| self.transit(at, at + 1) == Some(tier));
        if !passes {
            return 0;
        }
        let blocks = u64::from(self.tiers[tier].spec.blocks);
        self.tiers.units(tier, self.all_layers()) * (blocks / 16).max(1)
    }
}
