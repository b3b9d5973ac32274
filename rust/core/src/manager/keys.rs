//! Content keys: a cache of block names, for every sixteenth block of a path and for the 1024 most
//! recently requested blocks. With block events enabled, the cache has the names of all blocks.
//!
//! Invariant: a cached key belongs to its block. A missing key is hashed from a cached key at most
//! fifteen blocks above. Cost: O(log n). Memory: about three bytes per block with a requested key,
//! and 36 KB for the recent keys.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockId;
use crate::record::BlockKey;

/// Name of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockName {
    /// Content key.
    pub(crate) key: BlockKey,
    /// Whether the block belongs to a tenant, or the path up to it has a digest. An index that
    /// matches by tokens would find it for different content.
    pub(crate) private: bool,
}

/// Distance in blocks between two cached keys of a path.
const EVERY: u32 = 16;

/// Capacity of the direct-mapped cache of recent keys.
const RECENT: usize = 1024;

/// Keys by block.
#[derive(Clone, Debug, Default)]
pub(super) struct ContentKeys {
    kept: BTreeMap<BlockId, BlockKey>,
    /// Direct-mapped by `id % RECENT`. Empty before the first key.
    recent: Vec<Option<(BlockId, BlockKey)>>,
    /// All keys by block id, in place of `kept` and `recent`. Used when each change of a block
    /// needs its name.
    all: Option<Vec<Option<BlockKey>>>,
    /// Private blocks with a cached name so far.
    private: BTreeSet<BlockId>,
}

impl ContentKeys {
    /// An empty cache. With `all`, it keeps the name of every block, at 33 bytes each.
    pub(super) fn new(all: bool) -> Self {
        Self { all: all.then(Vec::new), ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.recent.is_empty() && self.all.is_none()
    }

    /// A block's name, if it is cached.
    pub(super) fn get(&self, block: BlockId) -> Option<BlockName> {
        let key = if let Some(all) = &self.all {
            all.get(block as usize).copied().flatten()
        } else {
            let recent = self.recent.get(block as usize % RECENT).copied().flatten();
            let recent = recent.filter(|&(whose, _)| whose == block).map(|(_, key)| key);
            recent.or_else(|| self.kept.get(&block).copied())
        };
        key.map(|key| BlockName { key, private: self.private.contains(&block) })
    }

    /// Caches the name of a block at a depth.
    pub(super) fn put(&mut self, block: BlockId, depth: u32, name: BlockName) {
        let BlockName { key, private } = name;
        if private {
            self.private.insert(block);
        }
        if let Some(all) = &mut self.all {
            let at = block as usize;
            if at >= all.len() {
                all.resize((at + 1).next_power_of_two(), None);
            }
            all[at] = Some(key);
            return;
        }
        if depth.is_multiple_of(EVERY) {
            self.kept.insert(block, key);
        }
        self.recent.resize(RECENT, None);
        self.recent[block as usize % RECENT] = Some((block, key));
    }

    /// Drops the key of a removed block, because its id may be reused.
    pub(super) fn forget(&mut self, block: BlockId) {
        self.private.remove(&block);
        if let Some(all) = &mut self.all {
            if let Some(place) = all.get_mut(block as usize) {
                *place = None;
            }
            return;
        }
        self.kept.remove(&block);
        // A different block may have taken the place since.
        if let Some(place) = self.recent.get_mut(block as usize % RECENT)
            && place.is_some_and(|(whose, _)| whose == block)
        {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::collections::btree_map::Entry;

    use proptest::prelude::*;

    use super::{BlockName, ContentKeys, EVERY};

    proptest! {
        /// Compares with a map of all keys: no wrong key is returned, and every sixteenth key, or
        /// each key, is cached.
        #[test]
        fn a_cached_key_is_its_blocks(
            steps in prop::collection::vec((0_u32..5000, 0_u32..40, 0_u8..4), 1..200),
            dense in any::<bool>(),
        ) {
            let (mut keys, mut all) = (ContentKeys::new(dense), BTreeMap::new());
            for (at, (block, depth, what)) in steps.into_iter().enumerate() {
                let key = [u8::try_from(at).unwrap(); 32];
                let key = BlockName { key, private: at.is_multiple_of(3) };
                if what == 0 {
                    keys.forget(block);
                    all.remove(&block);
                } else if let Entry::Vacant(unknown) = all.entry(block) {
                    keys.put(block, depth, key);
                    unknown.insert((depth, key));
                    prop_assert_eq!(keys.get(block), Some(key));
                }
                for block in 0..5000 {
                    let known = all.get(&block);
                    prop_assert!(keys.get(block).is_none_or(|key| known.unwrap().1 == key));
                    let must =
                        known.is_some_and(|(depth, _)| dense || depth.is_multiple_of(EVERY));
                    prop_assert!(!must || keys.get(block).is_some());
                }
            }
        }
    }
}
