//! How much of a tier tenants hold, where that is bounded.
//!
//! Invariant: a quota counts exactly the blocks of its tenant that stand on its tier. Cost: O(log)
//! per quota that is set and per block that comes or goes, whatever the number of tenants; an entry of
//! a set for each block of a tenant with a quota.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, TierId};
use crate::hint::Share;

/// A bound and what is held against it.
#[derive(Clone, Debug, Default)]
struct Quota {
    most: u64,
    held: BTreeSet<BlockId>,
}

/// All quotas.
#[derive(Clone, Debug, Default)]
pub(in crate::manager) struct Quotas {
    shares: BTreeMap<Vec<u8>, Share>,
    /// Numbers that a tenant had.
    free: Vec<Share>,
    bounds: BTreeMap<(Share, TierId), Quota>,
}

impl Quotas {
    /// Whether no tenant has a quota.
    pub(in crate::manager) fn is_empty(&self) -> bool {
        self.bounds.is_empty()
    }

    /// The number of a tenant that has a quota on a tier; 0 if it has none there.
    pub(in crate::manager) fn share(&self, tenant: &[u8], tier: TierId) -> Share {
        let share = self.shares.get(tenant).copied().unwrap_or(0);
        if self.bounds.contains_key(&(share, tier)) { share } else { 0 }
    }

    /// Bounds a tenant on a tier, instead of how it was bounded before. Returns its number.
    pub(in crate::manager) fn bound(&mut self, tenant: &[u8], tier: TierId, most: u64) -> Share {
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

    /// Bounds a tenant on a tier no more. Returns the number it had there.
    pub(in crate::manager) fn unbound(&mut self, tenant: &[u8], tier: TierId) -> Option<Share> {
        let share = self.shares.get(tenant).copied()?;
        self.bounds.remove(&(share, tier))?;
        if self.bounds.range((share, 0)..=(share, TierId::MAX)).next().is_none() {
            self.shares.remove(tenant);
            self.free.push(share);
        }
        Some(share)
    }

    /// A block of a tenant stands on a tier, or not. Returns by how many blocks it holds too much.
    pub(in crate::manager) fn count(
        &mut self,
        share: Share,
        tier: TierId,
        block: BlockId,
        stands: bool,
    ) -> u64 {
        let Some(quota) = self.bounds.get_mut(&(share, tier)) else { return 0 };
        if stands {
            quota.held.insert(block);
        } else {
            quota.held.remove(&block);
        }
        self.excess(share, tier)
    }

    /// By how many blocks a tenant holds too much of a tier.
    pub(in crate::manager) fn excess(&self, share: Share, tier: TierId) -> u64 {
        let quota = self.bounds.get(&(share, tier));
        quota.map_or(0, |quota| (quota.held.len() as u64).saturating_sub(quota.most))
    }

    /// What is counted: share, tier and blocks of every quota.
    pub(in crate::manager) fn held(
        &self,
    ) -> impl Iterator<Item = (Share, TierId, &BTreeSet<BlockId>)> {
        self.bounds.iter().map(|(&(share, tier), quota)| (share, tier, &quota.held))
    }
}
