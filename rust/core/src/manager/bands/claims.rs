//! Claims: a table of block priorities by owner.
//!
//! An owner belongs to a scope, as blocks do, and has at most one claim on a block. The strongest
//! claim counts. A released block has a mark without owner, weaker than any claim. Invariant: every
//! claim is listed under its owner, by its strength and, if it ends, under its end. Cost: O(log
//! claims) each, independent of a block's number of owners. About 300 bytes per claim, none for
//! blocks without a claim. The claims of a removed block are removed individually.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::BlockId;
use crate::hint::{NORMAL, Priority};
use crate::scope::ScopeId;
use crate::time::Nanos;
use crate::visits;

/// Priority of a released block.
pub(crate) const RELEASED: Priority = 0;

/// Claim of an owner on a block: a priority, and its end.
type Claim = (Priority, Option<Nanos>);

/// Sort key of claims: the greatest is the strongest. Of equal priorities, the later end is
/// stronger.
fn strength((priority, until): Claim) -> (Priority, Nanos) {
    (priority, until.unwrap_or(Nanos::MAX))
}

/// Sort key with the strongest claim first.
type Rank = Reverse<(Priority, Nanos)>;

/// Lower bound of all ranks of a block.
const STRONGEST: Rank = Reverse((Priority::MAX, Nanos::MAX));

/// Hinted block.
#[derive(Clone, Debug, Default)]
struct HintedBlock {
    /// Scope of the block and of its owners.
    scope: ScopeId,
    /// The strongest claim.
    first: Option<Claim>,
    released: bool,
    /// Whether the block counts as released regardless of claims.
    retired: bool,
}

impl HintedBlock {
    fn is_unhinted(&self) -> bool {
        self.first.is_none() && !self.released && !self.retired
    }
}

/// Claims by block and owner, with their indexes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    hinted: BTreeMap<BlockId, HintedBlock>,
    all: BTreeMap<(BlockId, Arc<str>), Claim>,
    /// Index of a block's claims by strength.
    ranks: BTreeSet<(BlockId, Rank, Arc<str>)>,
    owners: BTreeMap<ScopeId, BTreeMap<Arc<str>, BTreeSet<BlockId>>>,
    ends: BTreeSet<(Nanos, BlockId, Arc<str>)>,
}

impl Claims {
    /// Whether no block is hinted.
    pub(crate) fn is_empty(&self) -> bool {
        self.hinted.is_empty()
    }

    /// The priority of a block.
    pub(crate) fn priority(&self, block: BlockId) -> Priority {
        self.strongest(block).map_or(NORMAL, |(priority, _)| priority)
    }

    /// The strongest claim on a block. Of equal priorities, the claim with the later end.
    pub(crate) fn strongest(&self, block: BlockId) -> Option<(Priority, Option<Nanos>)> {
        let hinted = self.hinted.get(&block)?;
        let released = hinted.released || hinted.retired;
        let first = hinted.first.filter(|_| !hinted.retired);
        first.or_else(|| released.then_some((RELEASED, None)))
    }

    /// The priority of a block at a time, possibly later than the last expiry.
    pub(crate) fn priority_at(&self, block: BlockId, now: Nanos) -> Priority {
        if self.hinted.get(&block).is_some_and(|hinted| hinted.retired) {
            return RELEASED;
        }
        let from = (block, STRONGEST, Arc::from(""));
        let mine = self.ranks.range(from..).take_while(|rank| rank.0 == block);
        let mut alive = mine.map(|rank| rank.1.0).filter(|&(_, until)| until > now);
        let released = || self.hinted.get(&block).is_some_and(|hinted| hinted.released);
        let rest = || if released() { RELEASED } else { NORMAL };
        alive.next().map_or_else(rest, |(priority, _)| priority)
    }

    /// The blocks with an expired claim that was not removed yet.
    pub(crate) fn expired(&self, now: Nanos) -> BTreeSet<BlockId> {
        self.ends.iter().take_while(|end| end.0 <= now).map(|end| end.1).collect()
    }

    /// Whether any owner has a claim on a block.
    pub(crate) fn claimed(&self, block: BlockId) -> bool {
        self.hinted.get(&block).is_some_and(|hinted| hinted.first.is_some())
    }

    /// Sets an owner's claim on a block, and replaces its earlier claim.
    pub(crate) fn claim(
        &mut self,
        scope: ScopeId,
        block: BlockId,
        owner: &Arc<str>,
        priority: Priority,
        until: Option<Nanos>,
    ) {
        self.withdraw(block, owner);
        let claim = (priority, until);
        let hinted = self.hinted.entry(block).or_default();
        hinted.scope = scope;
        if hinted.first.is_none_or(|first| strength(first) < strength(claim)) {
            hinted.first = Some(claim);
        }
        self.all.insert((block, owner.clone()), claim);
        self.ranks.insert((block, Reverse(strength(claim)), owner.clone()));
        let owners = self.owners.entry(scope).or_default();
        owners.entry(owner.clone()).or_default().insert(block);
        if let Some(until) = until {
            self.ends.insert((until, block, owner.clone()));
        }
    }

    /// Removes an owner's claim on a block. Returns whether it existed.
    pub(crate) fn withdraw(&mut self, block: BlockId, owner: &Arc<str>) -> bool {
        let key = (block, owner.clone());
        let Some(claim) = self.all.remove(&key) else { return false };
        let (block, owner) = key;
        visits::note(1);
        if let Some(until) = claim.1 {
            self.ends.remove(&(until, block, owner.clone()));
        }
        let rank = (block, Reverse(strength(claim)), owner);
        self.ranks.remove(&rank);
        let owner = rank.2;
        let hinted = self.hinted.get_mut(&block).expect("it has a claim");
        if let Some(owners) = self.owners.get_mut(&hinted.scope) {
            if let Some(blocks) = owners.get_mut(&owner) {
                blocks.remove(&block);
                if blocks.is_empty() {
                    owners.remove(&owner);
                }
            }
            // Remove empty maps at once, so that memory follows the claims.
            if owners.is_empty() {
                self.owners.remove(&hinted.scope);
            }
        }
        // The next claim by strength takes its place.
        if hinted.first.map(strength) == Some(strength(claim)) {
            let rest = self.ranks.range((block, STRONGEST, owner)..).next();
            hinted.first = rest.filter(|rest| rest.0 == block).map(|rest| {
                let Reverse((priority, until)) = rest.1;
                (priority, (until < Nanos::MAX).then_some(until))
            });
        }
        if hinted.is_unhinted() {
            self.hinted.remove(&block);
        }
        true
    }

    /// Marks a block as released regardless of claims, or clears this mark. Returns whether the
    /// mark changed.
    pub(crate) fn retire(&mut self, block: BlockId, retired: bool) -> bool {
        if !retired && !self.hinted.contains_key(&block) {
            return false;
        }
        let hinted = self.hinted.entry(block).or_default();
        let before = std::mem::replace(&mut hinted.retired, retired);
        if hinted.is_unhinted() {
            self.hinted.remove(&block);
        }
        before != retired
    }

    /// Marks a block as released until its next use.
    pub(crate) fn release(&mut self, block: BlockId) {
        self.hinted.entry(block).or_default().released = true;
    }

    /// Removes the mark of a used block. Returns whether it had a mark.
    pub(crate) fn used(&mut self, block: BlockId) -> bool {
        let Some(hinted) = self.hinted.get_mut(&block) else { return false };
        let released = std::mem::take(&mut hinted.released) | std::mem::take(&mut hinted.retired);
        if hinted.first.is_none() {
            self.hinted.remove(&block);
        }
        released
    }

    /// The blocks of an owner of a scope.
    pub(crate) fn of(&self, scope: ScopeId, owner: &str) -> Vec<BlockId> {
        let blocks = self.owners.get(&scope).and_then(|owners| owners.get(owner));
        blocks.map_or_else(Vec::new, |blocks| blocks.iter().copied().collect())
    }

    /// Removes the claims and the mark of a block that leaves the trie.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let Some(hinted) = self.hinted.get_mut(&block) else { return };
        (hinted.released, hinted.retired) = (false, false);
        let none = hinted.first.is_none();
        // The next owner of the block follows its predecessor in the table's order.
        let mut owner: Arc<str> = Arc::from("");
        while let Some((key, _)) = self.all.range((block, owner)..).next()
            && key.0 == block
        {
            owner = key.1.clone();
            self.withdraw(block, &owner);
        }
        if none {
            self.hinted.remove(&block);
        }
    }

    /// Removes an expired claim, and returns its block.
    pub(crate) fn expire(&mut self, now: Nanos) -> Option<BlockId> {
        let (until, block, owner) = self.ends.first()?.clone();
        if until > now {
            return None;
        }
        self.withdraw(block, &owner);
        Some(block)
    }

    /// All hinted blocks.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.hinted.keys().copied()
    }

    /// Checks the indexes.
    pub(crate) fn audit(&self, now: Nanos) -> Vec<String> {
        let mut broken = Vec::new();
        let mut first: BTreeMap<BlockId, (Priority, Nanos)> = BTreeMap::new();
        for ((block, owner), &claim) in &self.all {
            let most = first.entry(*block).or_insert_with(|| strength(claim));
            *most = strength(claim).max(*most);
            let scope = self.hinted.get(block).map(|hinted| hinted.scope);
            let mine = scope.and_then(|scope| self.owners.get(&scope)?.get(owner));
            let listed = mine.is_some_and(|all| all.contains(block))
                && self.ranks.contains(&(*block, Reverse(strength(claim)), owner.clone()));
            let ends = |until| self.ends.contains(&(until, *block, owner.clone()));
            if !listed || claim.1.is_some_and(|until| until <= now || !ends(until)) {
                broken.push(format!("'{owner}' has a claim on {block} out of order: {claim:?}"));
            }
        }
        for (block, hinted) in &self.hinted {
            if hinted.is_unhinted() {
                broken.push(format!("block {block} is hinted without a claim"));
            }
            if hinted.first.map(strength) != first.remove(block) {
                broken.push(format!("block {block} lacks {:?} as strongest claim", hinted.first));
            }
        }
        broken.extend(first.keys().map(|block| format!("block {block} is claimed and not listed")));
        let listed: usize =
            self.owners.values().flat_map(BTreeMap::values).map(BTreeSet::len).sum();
        let ends = self.all.values().filter(|claim| claim.1.is_some()).count();
        let counts = (listed, self.ranks.len(), self.ends.len());
        if counts != (self.all.len(), self.all.len(), ends) {
            broken.push(format!(
                "{} claims, {ends} with an end, are listed as {counts:?}",
                self.all.len()
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
        /// Compares any list of calls with a list of all claims.
        #[test]
        fn the_strongest_living_claim_counts(
            ops in prop::collection::vec((0..5u8, 0..4u32, 0..3usize, 0..=100u8, 0..9u64), 1..80),
        ) {
            let owners: Vec<Arc<str>> = ["", "a", "b"].map(Arc::from).to_vec();
            let mut claims = Claims::default();
            let mut list: Vec<(u32, usize, u8, Option<u64>)> = Vec::new();
            let mut released = [false; 4];
            for (now, (kind, block, owner, priority, ttl)) in (0..).zip(ops) {
                while claims.expire(now).is_some() {}
                list.retain(|claim| claim.3.is_none_or(|until| until > now));
                match kind {
                    0 | 1 => {
                        let until = (ttl > 0).then_some(now + ttl);
                        claims.claim(block % 2, block, &owners[owner], priority, until);
                        list.retain(|claim| (claim.0, claim.1) != (block, owner));
                        list.push((block, owner, priority, until));
                    }
                    2 => {
                        let known = list.iter().any(|claim| (claim.0, claim.1) == (block, owner));
                        prop_assert_eq!(claims.withdraw(block, &owners[owner]), known);
                        list.retain(|claim| (claim.0, claim.1) != (block, owner));
                    }
                    3 => {
                        claims.release(block);
                        released[block as usize] = true;
                    }
                    _ if ttl == 0 => {
                        claims.forget(block);
                        list.retain(|claim| claim.0 != block);
                        released[block as usize] = false;
                    }
                    _ => {
                        let was = std::mem::take(&mut released[block as usize]);
                        prop_assert_eq!(claims.used(block), was);
                    }
                }
                prop_assert_eq!(claims.audit(now), Vec::<String>::new());
                for block in 0..4 {
                    let mine = list.iter().filter(|claim| claim.0 == block);
                    let strongest = mine.map(|claim| claim.2).max();
                    let rest = if released[block as usize] { RELEASED } else { NORMAL };
                    prop_assert_eq!(claims.priority(block), strongest.unwrap_or(rest));
                }
                for (at, owner) in owners.iter().enumerate() {
                    for scope in 0..2 {
                        let mine = list.iter().filter(|claim| (claim.0 % 2, claim.1) == (scope, at));
                        let mut mine: Vec<u32> = mine.map(|claim| claim.0).collect();
                        mine.sort_unstable();
                        prop_assert_eq!(claims.of(scope, owner), mine);
                    }
                }
            }
        }
    }
}
