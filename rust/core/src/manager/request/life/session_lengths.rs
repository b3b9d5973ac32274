//! Lengths of the sessions through each block, for policies that rank by the shortest session.
//!
//! The sessions through a block are the sessions through the next block and the sessions that end
//! there. Long stretches of a path therefore share a multiset of lengths:
//!
//! ```text
//! words[block]   0: no session    n: lists[n - 1], with a reference count
//! ```
//!
//! Invariant: a list is sorted by length, has no length twice and is not empty. Cost: 4 bytes per
//! block and a list per stretch. A change costs O(blocks), and O(lengths) per stretch.

use smallvec::SmallVec;

use crate::block::BlockId;
use crate::paged_slab::PagedSlab;
use crate::paged_vec::PagedVec;
use crate::visits;

/// Multiset of lengths shared by a number of blocks.
#[derive(Clone, Debug, Default)]
struct Shared {
    /// Each length and the number of its sessions, the shortest first.
    lengths: SmallVec<[(u32, u32); 2]>,
    /// Reference count.
    blocks: u32,
}

/// Multisets of session lengths by block.
#[derive(Clone, Debug)]
pub(in crate::manager::request) struct SessionLengths {
    words: PagedVec<u32>,
    lists: PagedSlab<Shared>,
    /// Number of blocks with a session.
    blocks: usize,
}

impl Default for SessionLengths {
    fn default() -> Self {
        let lists = PagedSlab::new(Shared::default());
        Self { words: PagedVec::new(0), lists, blocks: 0 }
    }
}

impl SessionLengths {
    /// Whether no block has a session.
    pub(in crate::manager::request) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Length of the shortest session through a block.
    pub(in crate::manager::request) fn shortest(&self, block: BlockId) -> Option<u32> {
        self.first(self.words.get(block).copied().unwrap_or(0))
    }

    /// Removes a session of length `less` from consecutive blocks of a path and adds a session of
    /// length `more`. Appends the blocks with a changed shortest session to `changed`.
    pub(in crate::manager::request) fn change(
        &mut self,
        blocks: &[BlockId],
        less: Option<u32>,
        more: Option<u32>,
        changed: &mut Vec<BlockId>,
    ) {
        // The latest list and its changed copy. A list is never changed twice in a call, so the
        // index of a freed list may be reused.
        let (mut old, mut new, mut differs) = (u32::MAX, 0, false);
        for &block in blocks {
            let word = self.words.get(block).copied().unwrap_or(0);
            if word != old {
                (old, new) = (word, self.add_changed(word, less, more));
                differs = self.first(old) != self.first(new);
            }
            self.assign(block, new);
            if differs {
                changed.push(block);
            }
        }
    }

    /// Removes all sessions from a block.
    pub(in crate::manager::request) fn forget(&mut self, block: BlockId) {
        if self.words.get(block).is_some() {
            self.assign(block, 0);
        }
    }

    fn first(&self, word: u32) -> Option<u32> {
        (word > 0).then(|| self.lists[word - 1].lengths[0].0)
    }

    /// Adds a changed copy of a word's list, without blocks yet. Returns its word.
    fn add_changed(&mut self, word: u32, less: Option<u32>, more: Option<u32>) -> u32 {
        let mut lengths = SmallVec::new();
        if word > 0 {
            lengths.clone_from(&self.lists[word - 1].lengths);
        }
        visits::note(lengths.len());
        if let Some(length) = more {
            match lengths.binary_search_by_key(&length, |known: &(u32, u32)| known.0) {
                Ok(at) => lengths[at].1 += 1,
                Err(at) => lengths.insert(at, (length, 1)),
            }
        }
        let less = less.map(|less| lengths.binary_search_by_key(&less, |known| known.0));
        if let Some(Ok(at)) = less {
            lengths[at].1 -= 1;
            if lengths[at].1 == 0 {
                lengths.remove(at);
            }
        }
        if lengths.is_empty() { 0 } else { self.lists.insert(Shared { lengths, blocks: 0 }) + 1 }
    }

    /// Sets a block's word, and frees its old list with the last reference.
    fn assign(&mut self, block: BlockId, word: u32) {
        self.words.reach(block + 1);
        let old = std::mem::replace(&mut self.words[block], word);
        if word > 0 {
            self.lists[word - 1].blocks += 1;
            self.blocks += 1;
        }
        if old > 0 {
            self.blocks -= 1;
            let list = &mut self.lists[old - 1];
            list.blocks -= 1;
            if list.blocks == 0 {
                *list = Shared::default();
                self.lists.remove(old - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::SessionLengths;

    proptest! {
        /// Compares with sorted lists of all lengths. Sessions come, grow and end on paths with
        /// shared first blocks.
        #[test]
        fn it_is_a_multiset_by_block(
            ops in prop::collection::vec((0..3_u32, 0..6_u32, 0..4_usize, any::<bool>()), 0..120),
        ) {
            let sizes = [0, 1, 7, u32::MAX];
            let mut lengths = SessionLengths::default();
            let mut model: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
            for (path, end, size, add) in ops {
                let blocks: Vec<u32> =
                    (0..end).map(|at| if at < 3 { at } else { 10 * path + at }).collect();
                let least = |model: &BTreeMap<u32, Vec<u32>>, block: &u32| {
                    model.get(block).and_then(|all| all.iter().min()).copied()
                };
                let before: Vec<_> = blocks.iter().map(|block| least(&model, block)).collect();
                let (less, more) = (Some(sizes[size]), add.then_some(sizes[3 - size]));
                for block in &blocks {
                    let all = model.entry(*block).or_default();
                    all.extend(more);
                    if let Some(at) = all.iter().position(|&known| Some(known) == less) {
                        all.remove(at);
                    }
                }
                let mut changed = Vec::new();
                lengths.change(&blocks, less, more, &mut changed);
                let differ = blocks.iter().zip(before);
                let differ = differ.filter(|(block, before)| least(&model, block) != *before);
                prop_assert_eq!(changed, differ.map(|(block, _)| *block).collect::<Vec<_>>());
                if size == 0 && !add {
                    lengths.forget(end);
                    model.remove(&end);
                }
                model.retain(|_, all| !all.is_empty());
                for block in 0..30 {
                    prop_assert_eq!(lengths.shortest(block), least(&model, &block));
                }
                let words: BTreeSet<u32> =
                    (0..30).filter_map(|block| lengths.words.get(block).copied()).collect();
                let used: u32 = words.iter().filter(|&&word| word > 0).map(|&word| {
                    lengths.lists[word - 1].blocks
                }).sum();
                prop_assert_eq!((lengths.blocks, used as usize), (model.len(), model.len()));
                prop_assert_eq!(lengths.is_empty(), model.is_empty());
            }
        }
    }

    #[test]
    fn a_stretch_shares_one_list() {
        let mut lengths = SessionLengths::default();
        let path: Vec<u32> = (0..100).collect();
        for (end, length) in [(40, 40), (100, 100)] {
            lengths.change(&path[..end], None, Some(length), &mut Vec::new());
        }
        // At most the two lists of the latest change in addition to the two in use.
        assert!(lengths.lists.bound() <= 4, "{}", lengths.lists.bound());
        assert_eq!((lengths.shortest(39), lengths.shortest(40)), (Some(40), Some(100)));
    }
}
