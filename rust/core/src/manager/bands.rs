//! Bands: the rank of blocks on a tier by hints and tenant quotas, and the tier's retained blocks.
//!
//! Invariant: a tier retains only resident blocks and at most its share, and a quota counts exactly
//! its tenant's resident blocks. Cost: O(log n) per block and tier. O(blocks of the tenant) to set
//! a quota.

pub(super) mod claims;
pub(super) mod quotas;

use std::collections::BTreeMap;

use crate::block::{BlockId, TierId};
use crate::hint::{Band, NORMAL, Priority, Share};
use crate::record::Wanted;
use crate::tier::ResidencyState;
use crate::time::Nanos;

use crate::manager::Manager;

impl Manager {
    /// The band of a block on a tier.
    pub(crate) fn band(&self, tier: TierId, block: BlockId) -> Band {
        // Without hints no table is read: this runs for every link.
        if self.hints.all_normal() {
            return self.point_band(tier, block, Band::NORMAL);
        }
        self.band_of(tier, block, self.hints.claims.priority(block))
    }

    fn band_of(&self, tier: TierId, block: BlockId, priority: Priority) -> Band {
        // A claim beyond the tier's share waits in the normal band.
        let clipped = priority > NORMAL && !self.hints.retained[tier].0.contains(&block);
        let priority = if clipped { NORMAL } else { priority };
        self.point_band(tier, block, Band { priority, share: self.tenant_share(tier, block) })
    }

    /// The future bands on a tier of the blocks with claims that expire by `now`. For read-only
    /// calls: the next changing call updates the tables.
    pub(crate) fn bands_at(&self, tier: TierId, now: Nanos) -> BTreeMap<BlockId, Band> {
        let claims = &self.hints.claims;
        let band = |block| (block, self.band_of(tier, block, claims.priority_at(block, now)));
        claims.expired(now).into_iter().map(band).collect()
    }

    /// The quota number of a block's tenant on a tier, or 0 without a quota.
    pub(super) fn tenant_share(&self, tier: TierId, block: BlockId) -> Share {
        // A removed block has no scope any more.
        if self.hints.quotas.is_empty() || !self.trie().alive(block) {
            return 0;
        }
        let tenant = self.scopes.get(self.node(block).scope).whose.tenant();
        self.hints.quotas.share(tenant, tier)
    }

    /// Calls `attend` for many blocks.
    pub(crate) fn attend_all(&mut self, tier: TierId, blocks: impl IntoIterator<Item = BlockId>) {
        if !self.hints.all_normal() {
            for block in blocks {
                self.attend(tier, block);
            }
        }
    }

    /// Updates the retained set and the quota's count of a tier for a block.
    ///
    /// Call it after a change of the block's residency there or of its claims, and then refresh its
    /// entry. Returns whether the tier's retained share is too full for this block.
    pub(crate) fn attend(&mut self, tier: TierId, block: BlockId) -> bool {
        if self.hints.all_normal() {
            return false;
        }
        let resident =
            self.trie().alive(block) && self.residency(tier, block).state != ResidencyState::Absent;
        let wanted = resident && self.hints.claims.priority(block) > NORMAL;
        let (retained, most) = &mut self.hints.retained[tier];
        let full = retained.len() as u64 >= *most && !retained.contains(&block);
        // A block that leaves the tier or loses its claim makes room.
        if !wanted {
            retained.remove(&block);
        } else if !full {
            retained.insert(block);
        }
        let share = self.tenant_share(tier, block);
        if share > 0 {
            let excess = self.hints.quotas.count(share, tier, block, resident);
            self.tiers[tier].eviction.exceed(share, excess);
        }
        wanted && full
    }

    /// Updates a block on all tiers after a change of its claims. Returns whether a tier's retained
    /// share is full.
    pub(super) fn reband(&mut self, block: BlockId) -> bool {
        let mut clipped = false;
        for tier in 0..self.tiers.len() {
            clipped |= self.attend(tier, block);
            self.refresh_on(tier, block);
        }
        clipped
    }

    /// Withdraws the release of blocks used by a request, and retains blocks that had no room
    /// before. The caller refreshes their entries.
    pub(crate) fn used_again(&mut self, path: &[BlockId]) {
        if self.hints.claims.is_empty() && self.hints.demoting.is_empty() {
            return;
        }
        for &block in path {
            // A block in use must not be demoted further.
            self.hints.demoting.remove(&block);
            self.hints.claims.used(block);
            for tier in 0..self.tiers.len() {
                self.attend(tier, block);
            }
        }
    }

    /// Drops the hints of a block that leaves the trie.
    pub(super) fn forget_hints(&mut self, block: BlockId, parent: Option<BlockId>) {
        self.hints.claims.forget(block);
        self.hints.demoting.remove(&block);
        // Pending hints that waited for blocks after this block wait after its parent again.
        if self.hints.pending.awaited() {
            let scope = self.node(block).scope;
            self.hints.pending.removed(scope, block, parent);
        }
    }

    /// The hint stored with a block: its strongest claim.
    pub(super) fn stored_hint(&self, block: BlockId, now: Nanos) -> Option<Wanted> {
        let (priority, until) = self.hints.claims.strongest(block)?;
        // An expired claim is not worth a record.
        let ttl = until.map_or(Nanos::MAX, |until| until.saturating_sub(now));
        (ttl > 0).then_some(Wanted { priority, ttl })
    }
}
