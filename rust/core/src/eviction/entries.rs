//! Entry table: the linked entries of a tier by block id, in pages of eight ids.
//!
//! In a leaf-only structure few blocks are linked, only the last blocks of paths. With holes all
//! idle blocks are linked. Pages serve both: eight neighbours share a word of the directory.
//!
//! ```text
//! directory[id / 8]   31..4 page                 3..0 linked ids of the page
//! links[8 * page + id % 8]                     a word of 0 is no page
//! ```
//!
//! Invariant: a page exists exactly while at least one of its ids is linked. Cost: O(1), two CPU
//! cache lines. 24 bytes per id of a page, and half a byte per id.

use std::ops::{Index, IndexMut};

use crate::block::BlockId;
use crate::paged_vec::PagedVec;

use super::link::Link;

/// Ids per page.
const IDS: u32 = 8;

/// Bits of the number of linked ids, 0 to [`IDS`].
const COUNT_BITS: u32 = 4;

/// The linked entries of a tier.
#[derive(Clone, Debug)]
pub(super) struct Entries {
    directory: PagedVec<u32>,
    links: PagedVec<Link>,
    /// The highest page ever used, plus 1.
    bound: u32,
    free: Vec<u32>,
    len: usize,
}

impl Entries {
    pub(super) fn new() -> Self {
        Self {
            directory: PagedVec::new(0),
            links: PagedVec::new(Link::VACANT),
            bound: 0,
            free: Vec::new(),
            len: 0,
        }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The entry of a block, or `None` if it is not linked.
    pub(super) fn get(&self, id: BlockId) -> Option<&Link> {
        let word = *self.directory.get(id / IDS)?;
        let link = (word > 0).then(|| &self.links[at(word, id)])?;
        (!link.is_vacant()).then_some(link)
    }

    /// Adds the entry of an unlinked block.
    pub(super) fn insert(&mut self, id: BlockId, link: Link) {
        self.directory.reach(id / IDS + 1);
        let word = &mut self.directory[id / IDS];
        if *word == 0 {
            let page = self.free.pop().unwrap_or_else(|| {
                self.bound += 1;
                self.links.reach(self.bound * IDS);
                self.bound - 1
            });
            debug_assert!(page < 1 << (u32::BITS - COUNT_BITS), "page {page} fits into a word");
            *word = page << COUNT_BITS;
        }
        *word += 1;
        self.links[at(*word, id)] = link;
        self.len += 1;
    }

    /// Removes the entry of a block, or returns `None` if it is not linked.
    pub(super) fn remove(&mut self, id: BlockId) -> Option<Link> {
        let link = *self.get(id)?;
        let word = &mut self.directory[id / IDS];
        self.links[at(*word, id)] = Link::VACANT;
        *word -= 1;
        // All entries of a page without linked ids are vacant, so it can be reused as it is.
        if word.is_multiple_of(1 << COUNT_BITS) {
            self.free.push(*word >> COUNT_BITS);
            *word = 0;
        }
        self.len -= 1;
        Some(link)
    }

    /// Prefetches the CPU cache line of a block's word in the directory.
    pub(super) fn prefetch_line(&self, id: BlockId) {
        self.directory.prefetch_line(id / IDS);
    }
}

/// The entry of a linked block.
impl Index<BlockId> for Entries {
    type Output = Link;

    fn index(&self, id: BlockId) -> &Link {
        &self.links[at(self.directory[id / IDS], id)]
    }
}

impl IndexMut<BlockId> for Entries {
    fn index_mut(&mut self, id: BlockId) -> &mut Link {
        &mut self.links[at(self.directory[id / IDS], id)]
    }
}

/// Index of an id's entry, on the page of a directory's word.
fn at(word: u32, id: BlockId) -> u32 {
    (word >> COUNT_BITS) * IDS + id % IDS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{Entries, IDS};
    use crate::eviction::link::Link;
    use crate::policy::Key;

    proptest! {
        #[test]
        fn it_is_a_map_whose_empty_pages_are_reused(
            ids in prop::collection::vec(0..200_u32, 0..400),
        ) {
            let (mut entries, mut model) = (Entries::new(), BTreeMap::new());
            let mut most = 0;
            for (place, id) in (0..).zip(ids) {
                if model.remove(&id).is_some() {
                    prop_assert!(entries.remove(id).is_some());
                } else {
                    let key = Key { place, tie: 3, id };
                    entries.insert(id, Link::new(key, 7));
                    model.insert(id, key);
                }
                let pages: std::collections::BTreeSet<u32> =
                    model.keys().map(|id| id / IDS).collect();
                most = most.max(pages.len());
                prop_assert_eq!((entries.len(), entries.bound as usize), (model.len(), most));
                for id in 0..220 {
                    let known = entries.get(id).map(|link| link.key(id));
                    prop_assert_eq!(known, model.get(&id).copied());
                }
                prop_assert_eq!(entries.remove(200 + id), None);
            }
        }
    }
}
