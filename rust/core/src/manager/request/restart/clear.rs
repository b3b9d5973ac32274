//! Clearing: ends residencies of blocks on a tier without a request.
//!
//! Points that need a cleared part end too. Invariant: all errors are found before the first
//! change. Cost: O(blocks · log n), and O(points) per block.

use std::ops::Range;

use crate::block::{BlockId, GroupId, Handle, Part, Place, Structure, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::tier::ResidencyState;

impl Manager {
    /// Clears consecutive blocks of a path on a tier, in a single group or all groups. Returns the
    /// formerly resident blocks.
    pub(super) fn clear(
        &mut self,
        tier: TierId,
        group: Option<GroupId>,
        blocks: &[BlockId],
    ) -> Result<Vec<Handle>> {
        let groups = group.map_or(0..self.points.groups.len(), |group| group..group + 1);
        // Each block is checked together with its cleared children.
        for (at, &block) in blocks.iter().enumerate() {
            self.check_clear(tier, &groups, block, &blocks[at..])?;
        }
        let first = Place::new(tier, groups.start);
        let absent =
            |&block: &BlockId| self.residency(first, block).state == ResidencyState::Absent;
        let present: Vec<BlockId> = blocks.iter().copied().filter(|block| !absent(block)).collect();
        let handles = self.trie().handles(&present);
        for &block in blocks.iter().rev() {
            if groups.start == 0 {
                self.drop_point_on(tier, block);
            }
            for group in groups.clone().skip_while(|&group| group == 0) {
                let place = Place::new(tier, group);
                if self.residency(place, block).state != ResidencyState::Absent {
                    self.drop_points_of(tier, Part { group, block });
                    self.blocks.discard(place, block);
                }
            }
            if groups.start == 0 && self.residency(tier, block).state != ResidencyState::Absent {
                self.drop_copy(tier, block, Cause::Cleared);
                self.prune(block);
            }
        }
        Ok(handles)
    }

    /// Fails if a block cannot be cleared on a tier.
    fn check_clear(
        &self,
        tier: TierId,
        groups: &Range<GroupId>,
        block: BlockId,
        cleared: &[BlockId],
    ) -> Result<()> {
        let handle = self.trie().handle(block).0;
        let present =
            groups.start == 0 && self.residency(tier, block).state != ResidencyState::Absent;
        let refs = if present { self.node(block).refs } else { 0 };
        for group in groups.clone() {
            let place = Place::new(tier, group);
            let busy = self.residency(place, block).busy;
            let moving = self.arrival(place, block).is_some_and(|a| !a.moves.is_empty());
            if busy > 0 || moving || refs > 0 {
                let of = if group > 0 { format!(" of group {group}") } else { String::new() };
                return Err(Error::config(format!(
                    "block {handle:#x} cannot be cleared: {refs} leases, {busy} moves{of}"
                )));
            }
        }
        // Only its windows and states are cleared.
        if !present {
            return Ok(());
        }
        let elsewhere = |block: BlockId| {
            (0..self.tiers.len())
                .filter(|&other| other != tier)
                .try_fold(self.all_layers(), |left, other| {
                    left.without(self.expected(other, block))
                })
        };
        let last = elsewhere(block).is_none_or(|left| !left.is_empty());
        let leaf_only = self.structure(block) == Structure::LeafOnly;
        let stays = |child: &BlockId| {
            !cleared.contains(child) || elsewhere(*child) != Some(self.all_layers())
        };
        let below = self.trie().children(block).filter(stays).count();
        // The last copy of a parent would leave its children unreachable.
        if last && leaf_only && below > 0 {
            return Err(Error::config(format!(
                "block {handle:#x} cannot be cleared: {below} children need it in a leaf-only scope"
            )));
        }
        Ok(())
    }
}
