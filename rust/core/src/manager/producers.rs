//! Producers: the tenants that have computed a block of a scope with shared blocks.
//!
//! All tenants of an adapter with sharing after `k` producers use the same scope, thus the same
//! trie and the same copy of each block. A new block has an entry here until `k` tenants have
//! produced it. A tenant matches blocks up to the first entry without this tenant. A tenant is
//! stored as the first 8 bytes of BLAKE3's keyed hash (section 2.3 of its specification).
//!
//! ```text
//!              commit of a tenant            commit of the k-th
//! new block -> entry: no producer -> entry: 1..k-1 producers -> no entry: all tenants match it
//! ```
//!
//! A shared store gets a block after its entry is removed, so no producers are read from the store
//! before a match.
//!
//! Invariant: an entry belongs to a living block and has fewer than `k` different producers. `k` is
//! the largest number of any scope so far. Blocks of scopes without sharing have no entry. Cost:
//! for scopes with sharing, a hash table lookup per block of a match, and about 50 bytes per entry.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::block::{BlockId, TierId, Token};
use crate::manager::Manager;
use crate::record::Producer;
use crate::scope::{Scope, ScopeId};
use crate::trie::Query;

/// Producers of blocks before they become shared.
#[derive(Debug)]
pub(super) struct Producers {
    of: FxHashMap<BlockId, SmallVec<[Producer; 2]>>,
    /// Number of producers of a shared block.
    after: usize,
    /// Key of the tenant hash.
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

    /// Hashes a tenant.
    pub(super) fn producer(&self, tenant: &[u8]) -> Producer {
        let hash = blake3::keyed_hash(&self.key, tenant);
        Producer::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
    }

    /// The producers of a block, or `None` if it is shared.
    pub(super) fn of(&self, block: BlockId) -> Option<&[Producer]> {
        self.of.get(&block).map(SmallVec::as_slice)
    }

    /// Number of leading blocks of a path that a tenant may match.
    fn visible(&self, path: &[BlockId], tenant: &[u8]) -> usize {
        let me = self.producer(tenant);
        let mine = |&&block: &&BlockId| self.of(block).is_none_or(|known| known.contains(&me));
        path.iter().take_while(mine).count()
    }

    /// Adds blocks without producers: no tenant may match them yet.
    fn begin(&mut self, blocks: &[BlockId]) {
        self.of.extend(blocks.iter().map(|&block| (block, SmallVec::new())));
    }

    /// Adds a tenant to the producers of a block. Returns whether this makes the block shared.
    pub(super) fn add(&mut self, block: BlockId, me: Producer) -> bool {
        let Some(known) = self.of.get_mut(&block) else { return false };
        if !known.contains(&me) {
            known.push(me);
        }
        known.len() >= self.after && self.of.remove(&block).is_some()
    }

    /// Sets the producers read from a store with a block. `None` makes the block shared.
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
    /// Applies a scope's number of producers: the largest number holds for all scopes.
    #[inline]
    pub(super) fn count_producers(&mut self, scope: &Scope) {
        if scope.shares() {
            self.producers.after = self.producers.after.max(scope.share_after as usize);
        }
    }

    /// Cuts a path at the first block hidden from a scope's tenant.
    #[inline]
    pub(super) fn cut_to_visible(&self, scope: &Scope, path: &mut Vec<BlockId>) {
        if scope.shares() {
            path.truncate(self.producers.visible(path, &scope.tenant));
        }
    }

    /// The known blocks of a sequence with digests replaced, up to the first block hidden from the
    /// scope's tenant.
    pub(super) fn visible_path(&self, scope: &Scope, content: &[Token]) -> Vec<BlockId> {
        let mut path = Vec::new();
        if let Some(id) = self.scopes.known(scope) {
            self.trie().walk(self.scopes.get(id).root, Query::Tokens(content), &mut path);
            self.cut_to_visible(scope, &mut path);
        }
        path
    }

    /// Whether a scope's tenant may match a block, given a match of its parent.
    pub(super) fn visible(&self, scope: &Scope, block: BlockId) -> bool {
        !scope.shares() || self.producers.visible(&[block], &scope.tenant) == 1
    }

    /// Whether only this tenant may match a block it matches.
    pub(super) fn own(&self, scope: &Scope, block: BlockId) -> bool {
        !scope.shares() || self.producers.of(block).is_some_and(|known| known.len() == 1)
    }

    /// Adds new blocks of a scope.
    #[inline]
    pub(super) fn begin_producers(&mut self, scope: ScopeId, blocks: &[BlockId]) {
        if !self.producers.unused() && self.scopes.get(scope).shared {
            self.producers.begin(blocks);
        }
    }

    /// Whether a block may be written to the tier below. A shared tier gets only blocks without an
    /// entry.
    pub(super) fn may_leave(&self, tier: TierId, block: BlockId) -> bool {
        self.producers.is_empty()
            || !self.tiers.above_shared(tier)
            || self.producers.of(block).is_none()
    }

    /// Checks the entries: each belongs to a living block of a scope with sharing, and has no
    /// duplicate producers.
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

    /// Sets the producers read from a store with a block, in a scope with sharing.
    pub(super) fn restore_producers(&mut self, block: BlockId, kept: Option<&[Producer]>) {
        if self.scopes.get(self.node(block).scope).shared {
            self.producers.restore(block, kept);
        }
    }
}
