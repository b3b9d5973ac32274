//! What owners say about blocks: the side table of hinted blocks.
//!
//! An owner belongs to a scope, as blocks do, and has at most one claim on a block; the strongest claim counts. A block that was released
//! carries a mark of no owner, which any claim outweighs. Invariant: every claim is listed under its
//! owner and, if it ends, under its end. Cost: O(log hinted blocks) each; about 200 bytes per claim,
//! and nothing for blocks without one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::BlockId;
use crate::hint::{NORMAL, Priority};
use crate::scope::ScopeId;
use crate::time::Nanos;

/// The priority of a block that was released.
pub(in crate::manager) const RELEASED: Priority = 0;

/// What one owner says about one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::manager) struct Claim {
    owner: Arc<str>,
    pub(in crate::manager) priority: Priority,
    /// When it ends.
    pub(in crate::manager) until: Option<Nanos>,
}

#[derive(Clone, Debug, Default)]
struct Said {
    /// Whose block it is, and whose owners these are.
    scope: ScopeId,
    claims: Vec<Claim>,
    released: bool,
}

/// All claims.
#[derive(Clone, Debug, Default)]
pub(in crate::manager) struct Claims {
    said: BTreeMap<BlockId, Said>,
    owners: BTreeMap<ScopeId, BTreeMap<Arc<str>, BTreeSet<BlockId>>>,
    ends: BTreeSet<(Nanos, BlockId, Arc<str>)>,
}

impl Claims {
    /// Whether nothing was said about any block.
    pub(in crate::manager) fn is_empty(&self) -> bool {
        self.said.is_empty()
    }

    /// How much a block is wanted.
    pub(in crate::manager) fn priority(&self, block: BlockId) -> Priority {
        self.strongest(block).map_or(NORMAL, |(priority, _)| priority)
    }

    /// The strongest thing said about a block, and when that ends; of equals what lasts longest.
    pub(in crate::manager) fn strongest(
        &self,
        block: BlockId,
    ) -> Option<(Priority, Option<Nanos>)> {
        let said = self.said.get(&block)?;
        let rank = |claim: &&Claim| (claim.priority, claim.until.unwrap_or(Nanos::MAX));
        match said.claims.iter().max_by_key(rank) {
            Some(claim) => Some((claim.priority, claim.until)),
            None => said.released.then_some((RELEASED, None)),
        }
    }

    /// Whether an owner has a claim on a block.
    pub(in crate::manager) fn claimed(&self, block: BlockId) -> bool {
        self.said.get(&block).is_some_and(|said| !said.claims.is_empty())
    }

    /// An owner says how much a block is wanted, instead of what it said before.
    pub(in crate::manager) fn claim(
        &mut self,
        (scope, block): (ScopeId, BlockId),
        owner: &Arc<str>,
        priority: Priority,
        until: Option<Nanos>,
    ) {
        self.withdraw(block, owner);
        let claim = Claim { owner: owner.clone(), priority, until };
        let said = self.said.entry(block).or_default();
        said.scope = scope;
        said.claims.push(claim);
        let owners = self.owners.entry(scope).or_default();
        owners.entry(owner.clone()).or_default().insert(block);
        if let Some(until) = until {
            self.ends.insert((until, block, owner.clone()));
        }
    }

    /// An owner says nothing about a block any more. Returns whether it had.
    pub(in crate::manager) fn withdraw(&mut self, block: BlockId, owner: &str) -> bool {
        let Some(said) = self.said.get_mut(&block) else { return false };
        let Some(at) = said.claims.iter().position(|claim| &*claim.owner == owner) else {
            return false;
        };
        let claim = said.claims.swap_remove(at);
        let scope = said.scope;
        if said.claims.is_empty() && !said.released {
            self.said.remove(&block);
        }
        self.unlist((scope, block), &claim);
        true
    }

    /// Nobody wants a block any more, until it is used again.
    pub(in crate::manager) fn release(&mut self, block: BlockId) {
        self.said.entry(block).or_default().released = true;
    }

    /// A block is used, so that it was not released for good. Returns whether it had been.
    pub(in crate::manager) fn used(&mut self, block: BlockId) -> bool {
        let Some(said) = self.said.get_mut(&block) else { return false };
        let released = std::mem::take(&mut said.released);
        if said.claims.is_empty() {
            self.said.remove(&block);
        }
        released
    }

    /// The blocks of an owner of a scope.
    pub(in crate::manager) fn of(&self, scope: ScopeId, owner: &str) -> Vec<BlockId> {
        let blocks = self.owners.get(&scope).and_then(|owners| owners.get(owner));
        blocks.map_or_else(Vec::new, |blocks| blocks.iter().copied().collect())
    }

    /// A block is gone, and what was said about it.
    pub(in crate::manager) fn forget(&mut self, block: BlockId) {
        let Some(said) = self.said.remove(&block) else { return };
        for claim in &said.claims {
            self.unlist((said.scope, block), claim);
        }
    }

    /// Ends one claim whose time has come, and names its block.
    pub(in crate::manager) fn expire(&mut self, now: Nanos) -> Option<BlockId> {
        let (until, block, owner) = self.ends.first()?.clone();
        if until > now {
            return None;
        }
        self.withdraw(block, &owner);
        Some(block)
    }

    /// All blocks about which something was said.
    pub(in crate::manager) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.said.keys().copied()
    }

    fn unlist(&mut self, (scope, block): (ScopeId, BlockId), claim: &Claim) {
        if let Some(until) = claim.until {
            self.ends.remove(&(until, block, claim.owner.clone()));
        }
        let Some(owners) = self.owners.get_mut(&scope) else { return };
        if let Some(blocks) = owners.get_mut(&claim.owner) {
            blocks.remove(&block);
            if blocks.is_empty() {
                owners.remove(&claim.owner);
            }
        }
        if owners.is_empty() {
            self.owners.remove(&scope);
        }
    }

    /// What is broken in the table itself.
    pub(in crate::manager) fn audit(&self, now: Nanos) -> Vec<String> {
        let mut broken = Vec::new();
        let mut owned = 0;
        let mut ends = 0;
        for (block, said) in &self.said {
            if said.claims.is_empty() && !said.released {
                broken.push(format!("block {block} is hinted by nobody"));
            }
            for claim in &said.claims {
                let owners = self.owners.get(&said.scope);
                let mine = owners.and_then(|owners| owners.get(&claim.owner));
                let listed = mine.is_some_and(|all| all.contains(block));
                let ended = claim
                    .until
                    .is_none_or(|until| self.ends.contains(&(until, *block, claim.owner.clone())));
                if !listed || !ended || claim.until.is_some_and(|until| until <= now) {
                    broken.push(format!("block {block} has a claim out of order: {claim:?}"));
                }
                owned += 1;
                ends += usize::from(claim.until.is_some());
            }
        }
        let listed: usize =
            self.owners.values().flat_map(BTreeMap::values).map(BTreeSet::len).sum();
        if (listed, self.ends.len()) != (owned, ends) {
            broken.push(format!(
                "{owned} claims, {ends} with an end, are listed as {listed} and {}",
                self.ends.len()
            ));
        }
        broken
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::{Claims, RELEASED};
    use crate::hint::NORMAL;

    proptest! {
        /// Any list of calls, against a list of all that was ever said.
        #[test]
        fn the_strongest_living_claim_counts(
            ops in prop::collection::vec((0..5u8, 0..4u32, 0..3usize, 0..=100u8, 0..9u64), 1..80),
        ) {
            let owners: Vec<Arc<str>> = ["", "a", "b"].map(Arc::from).to_vec();
            let mut claims = Claims::default();
            let mut said: Vec<(u32, usize, u8, Option<u64>)> = Vec::new();
            let mut released = [false; 4];
            for (now, (kind, block, owner, priority, ttl)) in (0..).zip(ops) {
                while claims.expire(now).is_some() {}
                said.retain(|claim| claim.3.is_none_or(|until| until > now));
                match kind {
                    0 | 1 => {
                        let until = (ttl > 0).then_some(now + ttl);
                        claims.claim((block % 2, block), &owners[owner], priority, until);
                        said.retain(|claim| (claim.0, claim.1) != (block, owner));
                        said.push((block, owner, priority, until));
                    }
                    2 => {
                        let known = said.iter().any(|claim| (claim.0, claim.1) == (block, owner));
                        prop_assert_eq!(claims.withdraw(block, &owners[owner]), known);
                        said.retain(|claim| (claim.0, claim.1) != (block, owner));
                    }
                    3 => {
                        claims.release(block);
                        released[block as usize] = true;
                    }
                    _ if ttl == 0 => {
                        claims.forget(block);
                        said.retain(|claim| claim.0 != block);
                        released[block as usize] = false;
                    }
                    _ => {
                        let was = std::mem::take(&mut released[block as usize]);
                        prop_assert_eq!(claims.used(block), was);
                    }
                }
                prop_assert_eq!(claims.audit(now), Vec::<String>::new());
                for block in 0..4 {
                    let mine = said.iter().filter(|claim| claim.0 == block);
                    let strongest = mine.map(|claim| claim.2).max();
                    let rest = if released[block as usize] { RELEASED } else { NORMAL };
                    prop_assert_eq!(claims.priority(block), strongest.unwrap_or(rest));
                }
                for (at, owner) in owners.iter().enumerate() {
                    for scope in 0..2 {
                        let mine = said.iter().filter(|claim| (claim.0 % 2, claim.1) == (scope, at));
                        let mut mine: Vec<u32> = mine.map(|claim| claim.0).collect();
                        mine.sort_unstable();
                        prop_assert_eq!(claims.of(scope, owner), mine);
                    }
                }
            }
        }
    }
}
