//! Link of an entry in its class's list. Cost: 24 bytes.

use crate::block::BlockId;
use crate::policy::Key;

use super::tournament::Leaf;

/// No neighbour: the end of a chain.
pub(super) const NONE: BlockId = BlockId::MAX;

/// Entry in its list: its key without the id, and its neighbours in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) place: u64,
    pub(super) tie: u32,
    /// Its class.
    pub(super) leaf: Leaf,
    pub(super) before: BlockId,
    pub(super) after: BlockId,
}

impl Link {
    /// The entry of an unlinked id.
    pub(super) const VACANT: Self =
        Self { place: 0, tie: 0, leaf: Leaf::MAX, before: NONE, after: NONE };

    /// An entry without neighbours.
    pub(super) fn new(key: Key, leaf: Leaf) -> Self {
        Self { place: key.place, tie: key.tie, leaf, before: NONE, after: NONE }
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.leaf == Leaf::MAX
    }

    /// Key of the entry of block `id`.
    pub(super) fn key(&self, id: BlockId) -> Key {
        Key { place: self.place, tie: self.tie, id }
    }
}
