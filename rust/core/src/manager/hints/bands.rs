//! Which band a block is in on a tier: by what is said of it, by what the tier retains already, by
//! what its tenant holds.
//!
//! Invariant: a tier retains no block that does not stand there and at most its share, and a quota
//! counts exactly what stands there of its tenant. Cost: O(log n) per block and tier; O(blocks of
//! the tenant) to set a quota.

use crate::block::{BlockId, TierId};
use crate::hint::{Answer, Band, HintReply, NORMAL, Share};
use crate::tier::State;
use crate::time::Nanos;
use crate::visits;

use super::rejected;
use crate::manager::Manager;

impl Manager {
    /// Where a block stands among the others of a tier.
    pub(in crate::manager) fn band(&self, tier: TierId, block: BlockId) -> Band {
        if self.hints.all_normal() {
            return Band::NORMAL;
        }
        let mut priority = self.hints.claims.priority(block);
        if priority > NORMAL && !self.hints.kept[tier].0.contains(&block) {
            priority = NORMAL;
        }
        Band { priority, share: self.tenant_share(tier, block) }
    }

    pub(super) fn tenant_share(&self, tier: TierId, block: BlockId) -> Share {
        if self.hints.quotas.is_empty() || !self.blocks.trie().alive(block) {
            return 0;
        }
        let tenant = self.scopes.get(self.node(block).scope).whose.tenant();
        self.hints.quotas.share(tenant, tier)
    }

    /// As `attend`, for many blocks.
    pub(in crate::manager) fn attend_all(
        &mut self,
        tier: TierId,
        blocks: impl IntoIterator<Item = BlockId>,
    ) {
        if !self.hints.all_normal() {
            for block in blocks {
                self.attend(tier, block);
            }
        }
    }

    /// A block's presence on a tier or what is said of it has changed: whether it is retained there,
    /// and what its tenant holds. Its entry is to be refreshed. Returns whether the tier retains as
    /// many blocks as it may, and so not this one.
    pub(in crate::manager) fn attend(&mut self, tier: TierId, block: BlockId) -> bool {
        if self.hints.all_normal() {
            return false;
        }
        let stands =
            self.blocks.trie().alive(block) && self.residency(tier, block).state != State::Absent;
        let wanted = stands && self.hints.claims.priority(block) > NORMAL;
        let (kept, most) = &mut self.hints.kept[tier];
        let full = kept.len() as u64 >= *most && !kept.contains(&block);
        if !wanted {
            kept.remove(&block);
        } else if !full {
            kept.insert(block);
        }
        let share = self.tenant_share(tier, block);
        if share > 0 {
            let excess = self.hints.quotas.count(share, tier, block, stands);
            self.tiers[tier].eviction.exceed(share, excess);
        }
        wanted && full
    }

    /// What is said of a block has changed. Returns whether some tier may retain no more blocks.
    pub(super) fn reband(&mut self, block: BlockId) -> bool {
        let mut clipped = false;
        for tier in 0..self.tiers.len() {
            clipped |= self.attend(tier, block);
            self.refresh_on(tier, block);
        }
        clipped
    }

    /// A request uses blocks: they are not over, and may be retained where there was no room for them.
    /// Their entries are to be refreshed.
    pub(in crate::manager) fn used_again(&mut self, path: &[BlockId]) {
        if self.hints.claims.is_empty() && self.hints.demoting.is_empty() {
            return;
        }
        for &block in path {
            self.hints.demoting.remove(&block);
            self.hints.claims.used(block);
            for tier in 0..self.tiers.len() {
                self.attend(tier, block);
            }
        }
    }

    /// Time has passed: what was said for so long is over.
    pub(in crate::manager) fn expire_hints(&mut self, now: Nanos) {
        while let Some(block) = self.hints.claims.expire(now) {
            self.reband(block);
        }
        self.hints.pending.expire(now);
        self.leave_ended();
    }

    /// The blocks of all scopes of a tenant.
    fn blocks_of(&self, tenant: &[u8]) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = self
            .scopes
            .of(tenant)
            .flat_map(|scope| self.blocks.trie().first_blocks(scope.root))
            .collect();
        let mut at = 0;
        while let Some(&block) = blocks.get(at) {
            blocks.extend(self.blocks.trie().children(block));
            at += 1;
        }
        visits::note(at);
        blocks
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of at most one of a capacity below 2^32"
    )]
    pub(super) fn set_quota(
        &mut self,
        tenant: &[u8],
        tier: TierId,
        blocks: Option<u64>,
        share: Option<f64>,
    ) -> HintReply {
        let room = self.tiers[tier].spec.blocks;
        let shared = share.map(|share| (f64::from(room) * share) as u64);
        let most = [blocks, shared].into_iter().flatten().min();
        let mut mine = self.blocks_of(tenant);
        mine.retain(|&block| self.residency(tier, block).state != State::Absent);
        let number = match most {
            Some(most) => Some(self.hints.quotas.bound(tenant, tier, most)),
            None => self.hints.quotas.unbound(tenant, tier),
        };
        let Some(number) = number else { return rejected("the tenant has no quota there") };
        for &block in &mine {
            self.attend(tier, block);
            self.refresh_on(tier, block);
        }
        let excess = self.hints.quotas.excess(number, tier);
        self.tiers[tier].eviction.exceed(number, excess);
        HintReply {
            answer: Answer::Accepted,
            blocks: mine.len() as u64,
            left: 0,
            reason: String::new(),
        }
    }
}
