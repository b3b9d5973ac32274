//! Run: consecutive blocks of a path, a node of the trie.
//!
//! Invariant: its blocks are `first..first + blocks`. Only roots of scopes have none. Cost: plain
//! integers and the caller's value, a cache line.

use crate::block::{BlockId, Token};

use super::tags::{content, fold};

/// Index of a run.
pub(crate) type RunId = u32;

/// No run, or no block.
pub(super) const NONE: u32 = u32::MAX;

/// Node of the trie: a chain of blocks without a branch.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Run<T> {
    pub(super) parent: RunId,
    pub(super) depth: u32,
    pub(super) first: BlockId,
    pub(super) blocks: u32,
    /// Ids reserved for this run after its last block.
    pub(super) reserved: u32,
    /// Head of the list of children, the newest first, linked by `next` and `previous`.
    pub(super) child: RunId,
    pub(super) next: RunId,
    pub(super) previous: RunId,
    /// Key in the table of siblings, while contained.
    pub(super) key: SiblingKey,
    pub(super) value: T,
}

impl<T: Copy> Run<T> {
    /// An empty run after `parent`.
    pub(super) fn new(parent: RunId, depth: u32, value: T) -> Self {
        Self {
            parent,
            depth,
            first: NONE,
            blocks: 0,
            reserved: 0,
            child: NONE,
            next: NONE,
            previous: NONE,
            key: 0,
            value,
        }
    }

    /// The last block, or `None` for a root.
    pub(super) fn last(&self) -> Option<BlockId> {
        (self.blocks > 0).then(|| self.first + self.blocks - 1)
    }

    /// Seed of its children's hashes: the last block, unchanged by splits and merges, or the run
    /// itself for a root.
    pub(super) fn seed(&self, id: RunId) -> u64 {
        self.last().map_or(u64::MAX - u64::from(id), u64::from)
    }
}

/// Key of a run in the table of siblings.
pub(super) type SiblingKey = u32;

/// The key of a run by its parent's seed and its first block's tokens.
pub(super) fn key(seed: u64, tokens: &[Token]) -> SiblingKey {
    let hash = fold(seed, content(tokens));
    SiblingKey::try_from(hash & u64::from(SiblingKey::MAX)).expect("half of the bits")
}
