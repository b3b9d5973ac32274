//! Versions: blocks computed with old model weights leave first, or at once.
//!
//! A version is the part of an adapter's name before its first space. A call covers the blocks of
//! all tenants and adapters. A retired block has the priority of a released block, regardless of
//! claims, until its version is wanted again or the block is used. Invariant: a block in use stays.
//! Cost: O(log n) per visited block. An argument limits the visits of a call, independent of the
//! number of blocks, requests, tenants and versions.

use std::collections::BTreeMap;

use crate::block::{BlockId, Place};
use crate::error::Result;
use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::visits;

/// Fate of the blocks of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionFate {
    /// They leave in the order of their hints and policy.
    Keep,
    /// They leave before all blocks of kept versions.
    Retire,
    /// They leave now.
    Drop,
}

/// Progress of a pass over all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SortedVersions {
    /// Start of the next call of the pass, or `None` after the last call.
    pub next: Option<BlockId>,
    /// Number of blocks retired or dropped by this call.
    pub changed: u64,
    /// Number of blocks that could not be dropped because they are in use or have children. A later
    /// pass may drop them.
    pub kept: u64,
}

impl Manager {
    /// Visits the `most` blocks below the position `from`, and applies the fate of their version.
    /// `others` is the fate of versions missing in `fates`. A pass starts with `None`.
    ///
    /// # Errors
    /// [`crate::Error::Closed`] or [`crate::Error::Invariant`] of the manager itself.
    pub fn sort_versions(
        &mut self,
        fates: &BTreeMap<String, VersionFate>,
        others: VersionFate,
        (from, most): (Option<BlockId>, u32),
        now: Nanos,
    ) -> Result<SortedVersions> {
        self.open()?;
        let now = self.tick(now);
        let bound = self.trie().bound();
        let from = from.map_or(bound, |from| from.min(bound));
        let last = from.saturating_sub(most);
        let mut sorted =
            SortedVersions { next: (last > 0).then_some(last), ..SortedVersions::default() };
        visits::note((from - last) as usize);
        // Children mostly have greater ids than their parents.
        for block in (last..from).rev() {
            if !self.trie().alive(block) {
                continue;
            }
            let lora = self.scopes.get(self.node(block).scope).whose.lora();
            let version = lora.split(' ').next().unwrap_or_default();
            match fates.get(version).copied().unwrap_or(others) {
                VersionFate::Drop if self.drop_block(block) => sorted.changed += 1,
                VersionFate::Drop => sorted.kept += 1,
                fate => {
                    if self.hints.claims.retire(block, fate == VersionFate::Retire) {
                        self.reband(block);
                        sorted.changed += 1;
                    }
                }
            }
        }
        self.write_ahead(now);
        Ok(sorted)
    }

    /// Drops all copies of a block not needed by a lease, move, pin or child. Returns whether it
    /// was dropped.
    fn drop_block(&mut self, block: BlockId) -> bool {
        if self.node(block).refs > 0 || self.trie().children(block).next().is_some() {
            return false;
        }
        let tiers = 0..self.tiers.len();
        for place in tiers.clone().flat_map(|tier| self.groups_of(tier)) {
            let moving = self.arrival(place, block).is_some_and(|a| !a.moves.is_empty());
            if self.residency(place, block).busy > 0 || moving {
                return false;
            }
        }
        // Drop its own point first, because it may hold the parts.
        self.drop_point(block);
        let mut others = tiers.clone().flat_map(|tier| self.groups_of(tier));
        if others.any(|place| place.group > 0 && self.blocks.holds(place, block) > 0) {
            return false;
        }
        for tier in tiers {
            if self.residency(tier, block).state != ResidencyState::Absent {
                self.drop_copy(tier, block, Cause::Cleared);
            }
        }
        self.prune(block);
        true
    }

    fn groups_of(&self, tier: usize) -> impl Iterator<Item = Place> + use<> {
        (0..self.points.groups.len()).map(move |group| Place::new(tier, group))
    }
}
