//! Victims on request: an engine that stores the bytes asks for the blocks to evict.
//!
//! Invariant: all or nothing. Cost: the cost of the eviction set, and O(log n) per block in `stay`.

use crate::block::{Handle, TierId};
use crate::error::Result;
use crate::time::Nanos;

use crate::manager::Manager;

impl Manager {
    /// Evicts `count` blocks from a tier, in the order of its policy, in addition to free slots.
    ///
    /// The blocks of `stay` remain, and in a leaf-only scope all their ancestors. Returns the
    /// blocks that left the tier. These may be more than `count` in a leaf-only scope: a victim
    /// that is a last copy takes its descendants on all tiers with it.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::error::Error::NoSpace) if fewer blocks can leave.
    /// [`Error::Config`](crate::error::Error::Config) for a nonexistent tier or an engine's tier.
    /// Nothing has changed then.
    pub fn evict_blocks(
        &mut self,
        tier: TierId,
        count: u64,
        stay: &[Handle],
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        self.open()?;
        self.check_tier(tier)?;
        let now = self.tick(now);
        if count == 0 {
            return Ok(Vec::new());
        }
        let known = stay.iter().filter_map(|&handle| self.trie().resolve(handle));
        // The points of a path leave before its blocks, so all of it stays.
        let stay: Vec<_> = match self.blocks.arena(tier) {
            None => known.map(|block| block..block + 1).collect(),
            Some(_) => known.flat_map(|block| self.runs(&self.path_to(Some(block)))).collect(),
        };
        let stay: Vec<_> = stay.into_iter().map(|run| (tier, run)).collect();
        let units = self.tiers.units(tier, self.all_layers()).saturating_mul(count);
        let set = self.decide_room(&stay, |manager, set| {
            if manager.slots_leave(set, tier, units, now) {
                return Ok(());
            }
            Err(manager.no_space(tier, &[units], set))
        })?;
        let victims = set.victims.iter().filter(|victim| victim.tier == tier);
        let left = victims.flat_map(|victim| victim.run().rev());
        let left = left.map(|block| self.trie().handle(block)).collect();
        self.apply(&set, now);
        self.keep(set);
        // A remaining block may be a leaf now.
        self.refresh_stay(stay);
        Ok(left)
    }
}
