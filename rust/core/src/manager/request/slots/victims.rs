//! Victims on request: an engine that stores the bytes asks which blocks leave its memory.
//!
//! Invariant: all or nothing. Cost: that of the eviction set, and O(log n) per block that stays.

use crate::block::{Handle, TierId};
use crate::error::Result;
use crate::time::Nanos;

use crate::manager::Manager;

impl Manager {
    /// Evicts `count` blocks from a tier, in the order of its policy, beyond those that are free.
    /// The blocks of `stay`, and in a leaf-only scope all before them, remain. Returns the blocks
    /// that left the tier: more than `count` if a victim was the last copy of a block that others
    /// follow on other tiers, since in a leaf-only scope those leave with it.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::error::Error::NoSpace) if fewer may leave;
    /// [`Error::Config`](crate::error::Error::Config) if there is no such tier or the engine owns
    /// its slots. Nothing has changed then.
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
        // A block that stays may be a leaf now.
        self.refresh_stay(stay);
        Ok(left)
    }
}
