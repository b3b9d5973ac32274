//! Quota hints: limits for a tenant's blocks on a tier.
//!
//! Invariant: a tenant beyond its quota loses blocks first. Cost: O(blocks of the tenant) to set or
//! end a quota.

use crate::block::{BlockId, TierId};
use crate::hint::{Answer, HintCode, HintReply};
use crate::tier::ResidencyState;
use crate::visits;

use super::rejected;
use crate::manager::Manager;

impl Manager {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of at most one of a capacity below 2^32"
    )]
    /// Sets or ends a tenant's quota on a tier.
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
        mine.retain(|&block| self.residency(tier, block).state != ResidencyState::Absent);
        let number = match most {
            Some(most) => Some(self.hints.quotas.bound(tenant, tier, most)),
            None => self.hints.quotas.unbound(tenant, tier),
        };
        // Only ending a quota can fail: there may be none.
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
            not_applied: 0,
            code: HintCode::Accepted,
            reason: String::new(),
        }
    }

    /// The blocks of all scopes of a tenant.
    pub(super) fn blocks_of(&self, tenant: &[u8]) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> =
            self.scopes.of(tenant).flat_map(|scope| self.trie().first_blocks(scope.root)).collect();
        let mut at = 0;
        while let Some(&block) = blocks.get(at) {
            blocks.extend(self.trie().children(block));
            at += 1;
        }
        visits::note(at);
        blocks
    }
}
