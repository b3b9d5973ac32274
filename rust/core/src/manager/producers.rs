//! Producers: the tenants that have computed a block of a scope whose blocks become shared.
//!
//! Tenants of one adapter that share after `k` producers have one scope, thus one trie and one copy of each
//! block. A block has an entry here from its insertion until `k` tenants have produced it; a tenant
//! matches blocks up to the first that has an entry without it. A tenant is a keyed hash: BLAKE3's keyed
//! mode (section 2.3 of its specification), of which 8 bytes are kept.
//!
//! ```text
//!              commit of a tenant            commit of the k-th
//! new block -> entry: no producer -> entry: 1..k-1 producers -> no entry: all tenants match it
//! ```
//!
//! A shared store gets a block once it has no entry, so that a value there has no producers to read before a
//! match.
//!
//! Invariant: an entry is of a living block, has fewer than `k` different producers, and `k` is the largest
//! number that any scope has named so far. Blocks of other scopes have no entry. Cost: one lookup in a
//! hash table per block of a match of such a scope, nothing for others; about 50 bytes per entry.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::block::{BlockId, TierId, Token};
use crate::manager::Manager;
use crate::record::Producer;
use crate::scope::{Scope, ScopeId};
use crate::trie::Query;

/// Producers of blocks that are not shared yet.
#[derive(Debug)]
pub(super) struct Producers {
    of: FxHashMap<BlockId, SmallVec<[Producer; 2]>>,
    /// Number of producers of a shared block.
    after: usize,
    /// Keys the hash of a tenant.
    key: [u8; 32],
}

impl Producers {
    pub(super) fn new(key: [u8; 32]) -> Self {
        Self { of: FxHashMap::default(), after: 0, key }
    }

    /// Whether no block has an entry.
    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Whether no scope has shared its blocks so far.
    pub(super) fn unused(&self) -> bool {
        self.after == 0
    }

    /// The producer that a tenant is.
    pub(super) fn producer(&self, tenant: &[u8]) -> Producer {
        let hash = blake3::keyed_hash(&self.key, tenant);
        Producer::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
    }

    /// The producers of a block; none of a shared one.
    pub(super) fn of(&self, block: BlockId) -> Option<&[Producer]> {
        self.of.get(&block).map(SmallVec::as_slice)
    }

    /// Number of leading blocks of a path that a tenant may match.
    fn visible(&self, path: &[BlockId], tenant: &[u8]) -> usize {
        let me = self.producer(tenant);
        let mine = |&&block: &&BlockId| self.of(block).is_none_or(|known| known.contains(&me));
        path.iter().take_while(mine).count()
    }

    /// Adds blocks that no tenant may match yet.
    fn begin(&mut self, blocks: &[BlockId]) {
        self.of.extend(blocks.iter().map(|&block| (block, SmallVec::new())));
    }

    /// Makes a tenant a producer of a block. Returns whether it is shared by that.
    pub(super) fn add(&mut self, block: BlockId, me: Producer) -> bool {
        let Some(known) = self.of.get_mut(&block) else { return false };
        if !known.contains(&me) {
            known.push(me);
        }
        known.len() >= self.after && self.of.remove(&block).is_some()
    }

    /// Sets the producers that a store has kept with a block; `None` makes it shared.
    fn restore(&mut self, block: BlockId, kept: Option<&[Producer]>) {
        match kept {
            None => drop(self.of.remove(&block)),
            Some(kept) => drop(self.of.insert(block, kept.into())),
        }
    }

    /// Drops the entry of a block that leaves the trie.
    pub(super) fn forget(&mut self, block: BlockId) {
        self.of.remove(&block);
    }
}

impl Manager {
    /// Counts the producers that a scope wants: the largest number holds for all.
    #[inline]
    pub(super) fn count_producers(&mut self, scope: &Scope) {
        if scope.shares() {
            self.producers.after = self.producers.after.max(scope.share_after as usize);
        }
    }

    /// Cuts a path at the first block that a scope's tenant may not match.
    #[inline]
    pub(super) fn cut_to_visible(&self, scope: &Scope, path: &mut Vec<BlockId>) {
        if scope.shares() {
            path.truncate(self.producers.visible(path, &scope.tenant));
        }
    }

    /// The known blocks of a sequence, with digests replaced, that a scope's tenant may match.
    pub(super) fn visible_path(&self, scope: &Scope, content: &[Token]) -> Vec<BlockId> {
        let mut path = Vec::new();
        if let Some(id) = self.scopes.known(scope) {
            self.trie().walk(self.scopes.get(id).root, Query::Tokens(content), &mut path);
            self.cut_to_visible(scope, &mut path);
        }
        path
    }

    /// Whether a scope's tenant may match a block whose parent it matches.
    pub(super) fn visible(&self, scope: &Scope, block: BlockId) -> bool {
        !scope.shares() || self.producers.visible(&[block], &scope.tenant) == 1
    }

    /// Whether no other tenant may match a block that a scope's tenant matches.
    pub(super) fn own(&self, scope: &Scope, block: BlockId) -> bool {
        !scope.shares() || self.producers.of(block).is_some_and(|known| known.len() == 1)
    }

    /// Adds blocks that are new in a scope.
    #[inline]
    pub(super) fn begin_producers(&mut self, scope: ScopeId, blocks: &[BlockId]) {
        if !self.producers.unused() && self.scopes.get(scope).shared {
            self.producers.begin(blocks);
        }
    }

    /// Whether a block may be written to the tier below: a shared one gets no block that has an entry.
    pub(super) fn may_leave(&self, tier: TierId, block: BlockId) -> bool {
        self.producers.is_empty()
            || !self.tiers.above_shared(tier)
            || self.producers.of(block).is_none()
    }

    /// An entry is of a living block of a scope that shares, and names each producer once.
    pub(super) fn audit_producers(&self, broken: &mut Vec<String>) {
        for (&block, known) in &self.producers.of {
            let mut each = known.clone();
            each.sort_unstable();
            each.dedup();
            let shared = || self.scopes.get(self.node(block).scope).shared;
            if !self.trie().alive(block) || !shared() || each.len() < known.len() {
                broken.push(format!("block {block} has producers {known:x?}"));
            }
        }
    }

    /// Sets the producers that a store has kept with a block of a scope that shares.
    pub(super) fn restore_producers(&mut self, block: BlockId, kept: Option<&[Producer]>) {
        if self.scopes.get(self.node(block).scope).shared {
            self.producers.restore(block, kept);
        }
    }
}
