//! Quotas: a table of limits per tenant and tier, with the blocks counted against them.
//!
//! Invariant: a quota counts exactly the tenant's blocks resident on its tier. Cost: O(log n) to
//! set a quota and per arriving or evicted block, independent of the number of tenants. A set entry
//! per block of a tenant with a quota.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, TierId};
use crate::hint::Share;

/// Limit of a tenant on a tier, with its resident blocks there.
#[derive(Clone, Debug, Default)]
struct Quota {
    most: u64,
    held: BTreeSet<BlockId>,
}

/// Quotas by tenant and tier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quotas {
    shares: BTreeMap<Vec<u8>, Share>,
    /// Free numbers of tenants that lost their last quota.
    free: Vec<Share>,
    bounds: BTreeMap<(Share, TierId), Quota>,
}

impl Quotas {
    /// Whether no tenant has a quota.
    pub(crate) fn is_empty(&self) -> bool {
        self.bounds.is_empty()
    }

    /// The number of a tenant with a quota on a tier, or 0 without a quota.
    pub(crate) fn share(&self, tenant: &[u8], tier: TierId) -> Share {
        let share = self.shares.get(tenant).copied().unwrap_or(0);
        if self.bounds.contains_key(&(share, tier)) { share } else { 0 }
    }

    /// Sets or replaces a tenant's limit on a tier. Returns its number.
    pub(crate) fn bound(&mut self, tenant: &[u8], tier: TierId, most: u64) -> Share {
        let known = self.shares.get(tenant).copied();
        let share = known.unwrap_or_else(|| {
            let free = self.free.pop();
            let next = || Share::try_from(self.shares.len() + 1).expect("fewer than 2^32 tenants");
            let share = free.unwrap_or_else(next);
            self.shares.insert(tenant.to_vec(), share);
            share
        });
        self.bounds.entry((share, tier)).or_default().most = most;
        share
    }

    /// Removes a tenant's limit on a tier. Returns its number there.
    pub(crate) fn unbound(&mut self, tenant: &[u8], tier: TierId) -> Option<Share> {
        let share = self.shares.get(tenant).copied()?;
        self.bounds.remove(&(share, tier))?;
        // A number stays in use while the tenant has a quota on any tier.
        if self.bounds.range((share, 0)..=(share, TierId::MAX)).next().is_none() {
            self.shares.remove(tenant);
            self.free.push(share);
        }
        Some(share)
    }

    /// Counts a block of a tenant as resident or not. Returns the number of blocks above the limit.
    pub(crate) fn count(
        &mut self,
        share: Share,
        tier: TierId,
        block: BlockId,
        resident: bool,
    ) -> u64 {
        let Some(quota) = self.bounds.get_mut(&(share, tier)) else { return 0 };
        if resident {
            quota.held.insert(block);
        } else {
            quota.held.remove(&block);
        }
        self.excess(share, tier)
    }

    /// Number of blocks by which a tenant exceeds its limit on a tier.
    pub(crate) fn excess(&self, share: Share, tier: TierId) -> u64 {
        let quota = self.bounds.get(&(share, tier));
        quota.map_or(0, |quota| (quota.held.len() as u64).saturating_sub(quota.most))
    }

    /// Share, tier and counted blocks of every quota.
    pub(crate) fn counted(&self) -> impl Iterator<Item = (Share, TierId, &BTreeSet<BlockId>)> {
        self.bounds.iter().map(|(&(share, tier), quota)| (share, tier, &quota.held))
    }
}
