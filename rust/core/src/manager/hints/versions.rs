//! Versions: of weights that an engine has computed with, older ones leave first, or at once.
//!
//! A version is the part of an adapter's name before its first space; blocks of all tenants and
//! adapters of a version are sorted out together. A retired block has the priority of a released one,
//! whatever its owners claim, until its version is wanted again or the block is used. Invariant: a
//! block that is in use stays. Cost: O(log n) per block visited; its argument
//! bounds the visits of a call, whatever the number of blocks, requests, tenants and versions.

use std::collections::BTreeMap;

use crate::block::{BlockId, Place};
use crate::error::Result;
use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::visits;

/// What becomes of the blocks of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionFate {
    /// They leave as their hints and their policy say.
    Keep,
    /// They leave before all others.
    Retire,
    /// They leave now.
    Drop,
}

/// Progress of a pass over all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SortedVersions {
    /// Where the next call of the pass begins; `None` after the last one.
    pub next: Option<BlockId>,
    /// Blocks that this call has retired or dropped.
    pub changed: u64,
    /// Blocks to be dropped that are in use or have children: another pass may drop them.
    pub kept: u64,
}

impl Manager {
    /// Visits the `most` blocks below the place `from`, and gives each the fate of its version; one
    /// that is not in `fates` has the fate `others`. A pass begins with `None`.
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

    /// Drops all copies of a block that no lease, move, pin or child needs; whether that was so.
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
        // Its parts are held by its own point, if by any.
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
