//! Transit: slots of the host that moves between tiers which do not touch pass through.
//!
//! Invariant: what is reserved for stores from disk to remote is taken by nothing else. Cost: O(tiers).

use crate::block::TierId;
use crate::tier::Kind;

use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;

impl Manager {
    /// The tier whose slot a move between two tiers passes through, if it cannot go straight.
    pub(in crate::manager) fn transit(&self, a: TierId, b: TierId) -> Option<TierId> {
        let kind = |tier: TierId| self.tiers[tier].spec.kind;
        let (upper, lower) = (a.min(b), a.max(b));
        let host = (0..self.tiers.len()).find(|&tier| kind(tier) == Kind::Host)?;
        let straight = match kind(lower) {
            Kind::Remote => upper == host,
            _ => lower - upper == 1,
        };
        (!straight).then_some(host)
    }

    /// Takes a transit slot for a block out of what is spare.
    pub(in crate::manager) fn pass(&self, set: &mut EvictionSet, host: TierId) -> bool {
        let units = self.units(host, self.all_layers());
        let spare = match set.looked_at {
            Some((tier, spare)) if tier == host => spare,
            _ => set.spare[host],
        };
        if spare < units {
            return false;
        }
        set.spare[host] = set.spare[host].saturating_sub(units);
        if let Some((tier, spare)) = &mut set.looked_at
            && *tier == host
        {
            *spare -= units;
        }
        true
    }

    /// Slots of a tier that only stores on their way from disk to remote may take.
    pub(in crate::manager) fn transit_reserve(&self, tier: TierId) -> u64 {
        let passes = (tier + 1..self.last()).any(|at| self.transit(at, at + 1) == Some(tier));
        if !passes {
            return 0;
        }
        let blocks = u64::from(self.tiers[tier].spec.blocks);
        self.units(tier, self.all_layers()) * (blocks / 16).max(1)
    }
}
