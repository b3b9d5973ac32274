//! A run: consecutive blocks of one path, and its kin in the trie.
//!
//! Invariant: its blocks are `first..first + blocks`; only a scope's root has none. Cost: plain
//! integers and the caller's value, a line of memory.

use crate::block::{BlockId, Token};

use super::name::{content, fold};

/// A run's place in the slab.
pub type RunId = u32;

/// No run, or no block.
pub(super) const NONE: u32 = u32::MAX;

/// A chain of blocks without a branch.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Run<T> {
    pub(super) parent: RunId,
    pub(super) depth: u32,
    pub(super) first: BlockId,
    pub(super) blocks: u32,
    /// Ids behind the last block that are kept for this run.
    pub(super) room: u32,
    /// The latest child, from which `next` leads to the earlier ones.
    pub(super) child: RunId,
    pub(super) next: RunId,
    pub(super) previous: RunId,
    /// What the tables find it by, while it is in them.
    pub(super) key: SiblingKey,
    pub(super) value: T,
}

impl<T: Copy> Run<T> {
    /// An empty run behind `parent`.
    pub(super) fn new(parent: RunId, depth: u32, value: T) -> Self {
        Self {
            parent,
            depth,
            first: NONE,
            blocks: 0,
            room: 0,
            child: NONE,
            next: NONE,
            previous: NONE,
            key: 0,
            value,
        }
    }

    /// Its last block, but of a root.
    pub(super) fn last(&self) -> Option<BlockId> {
        (self.blocks > 0).then(|| self.first + self.blocks - 1)
    }

    /// What the hash of a child is seeded with: the block before it, which stays the same however
    /// runs are split and joined; of a root the run itself.
    pub(super) fn seed(&self, id: RunId) -> u64 {
        self.last().map_or(u64::MAX - u64::from(id), u64::from)
    }
}

/// What the tables of siblings find a run by.
pub(super) type SiblingKey = u32;

/// The key of a run behind the block that `seed` stands for: its first tokens'.
pub(super) fn key(seed: u64, tokens: &[Token]) -> SiblingKey {
    let hash = fold(seed, content(tokens));
    SiblingKey::try_from(hash & u64::from(SiblingKey::MAX)).expect("half of the bits")
}
