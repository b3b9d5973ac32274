//! Stores of resume points waiting for a shared tier: the events that end them.
//!
//! `moves::shared_stores` starts them. Invariant: the parts held for a store are released with it.
//! Cost: O(path) per call on a tier above a shared tier, and a comparison elsewhere.

use crate::block::{BlockId, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::manager::moves::shared_stores::SharedStore;
use crate::manager::request::matching::path::path_border;

impl Manager {
    /// Ends the waiting store of a resume point, if any, and releases its held parts.
    pub(in crate::manager) fn end_point_store(&mut self, tier: TierId, block: BlockId) {
        if self.shared_stores.is_empty() {
            return;
        }
        for Part { group, block } in self.shared_stores.remove_point(tier, block) {
            self.blocks.unhold(Place::new(tier + 1, group), [block]);
        }
    }

    /// Ends the store that holds a lost part of a block on a tier.
    pub(in crate::manager) fn end_store_of(&mut self, tier: TierId, part: Part) {
        if let Some(SharedStore { tier: from, block, .. }) = self.shared_stores.first()
            && from + 1 == tier
            && self.shared_stores.held().contains(&part)
        {
            self.end_point_store(from, block);
        }
    }

    /// Drops the store of a point leaving a tier above a shared tier, and counts the parts still
    /// missing on the shared tier.
    pub(in crate::manager) fn drop_point_store(
        &mut self,
        tier: TierId,
        block: BlockId,
        cause: Cause,
    ) {
        let below = tier + 1;
        let counts = matches!(cause, Cause::Demand | Cause::Ahead | Cause::Hinted);
        if counts && self.tiers.writes_shared(tier) && !self.points.has_on(below, block) {
            let path = self.path_to(Some(block));
            let absent =
                |part: &Part| !self.blocks.expects(Place::new(below, part.group), part.block);
            let needs = self.points.needs(&path, path_border(&path));
            self.meter.tier(below).stores_dropped +=
                needs.iter().filter(|p| absent(p)).count() as u64;
        }
        self.end_point_store(tier, block);
    }

    /// Whether a store to a shared tier reads a part of a tier's resume point. The point cannot
    /// leave then.
    pub(in crate::manager) fn read_for_shared(&self, tier: TierId, block: BlockId) -> bool {
        if !self.tiers.above_shared(tier) {
            return false;
        }
        let path = self.path_to(Some(block));
        let needs = self.points.needs(&path, path_border(&path));
        let stored = |&Part { group, block }: &Part| {
            let arrival = self.arrival(Place::new(tier + 1, group), block);
            arrival.is_some_and(|arrival| !arrival.moves.is_empty())
        };
        needs.iter().any(stored)
    }
}
