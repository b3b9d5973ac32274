//! Ghost table: a 4-way set-associative cache of the uses of evicted blocks, for
//! `uses * cost / idle`.
//!
//! Eight consecutive blocks of a path are a group of two words:
//!
//! ```text
//!        63..48        47..42  ..  11..6   5..0
//! uses   fingerprint   uses 7  ..  uses 1  uses 0     0: not evicted, or unknown
//!        63..56   ..   15..8   7..0
//! checks check 7  ..   check 1 check 0                eight bits of a hash of the block's tokens
//! ```
//!
//! A CPU cache line holds four groups, youngest first. New groups replace the oldest. Invariant:
//! the same calls give the same answers. Cost: O(1), a line per group. 8 bytes per block of
//! capacity hold four ghosts of whole groups, or half a ghost if each path is a single block. 1 in
//! 16 000 groups is mistaken for a group with the same fingerprint, and then 1 in 256 of its
//! blocks. Pages never written to take no memory.

use prefetch_index::prefetch_index;

use crate::trie::{GROUP, GroupSlice};

/// Bits of a use count.
const BITS: u32 = 6;

/// Mask of a group's use counts. The bits above are its fingerprint.
const USES: u64 = (1 << (BITS * GROUP)) - 1;

/// Mask of the first use count.
const ONE: u64 = (1 << BITS) - 1;

/// 1 in every use count.
const ONES: u64 = USES / ONE;

const _: () = assert!(BITS * GROUP <= 48 && 8 * GROUP == u64::BITS);

/// Groups per line.
const WAYS: usize = 4;

/// Blocks of capacity per line, for four ghosts per block.
const BLOCKS: u64 = 8;

/// Evicted blocks of a group.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    /// Fingerprint and use counts. 0 if the way is empty.
    uses: u64,
    checks: u64,
}

/// Four groups, the youngest first.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct CacheLine([Group; WAYS]);

/// Lines per page.
const PAGE: usize = 128;

/// Uses of evicted blocks, or any six bits per block, never 0.
#[derive(Debug)]
pub(crate) struct GhostTable {
    /// Pages are empty until the first write.
    pages: Vec<Vec<CacheLine>>,
    lines: usize,
    empty: bool,
}

impl GhostTable {
    /// An empty table for `capacity` blocks.
    #[must_use]
    pub(crate) fn new(capacity: u64) -> Self {
        let lines = usize::try_from(capacity.div_ceil(BLOCKS)).unwrap_or(usize::MAX).max(1);
        Self { pages: vec![Vec::new(); lines.div_ceil(PAGE)], lines, empty: true }
    }

    /// Whether nothing was written yet.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.empty
    }

    /// Prefetches the CPU cache line of a group.
    pub(crate) fn prefetch_line(&self, slice: &GroupSlice) {
        let (line, _) = self.locate(slice.group);
        prefetch_index(&self.pages[line / PAGE], line % PAGE);
    }

    /// Stores the uses of evicted blocks. Their group becomes the youngest of its line.
    #[inline(never)]
    pub(crate) fn put(&mut self, slice: &GroupSlice, uses: u32) {
        self.empty = false;
        let (line, fingerprint) = self.locate(slice.group);
        let page = &mut self.pages[line / PAGE];
        // The first write to a page allocates it.
        if page.is_empty() {
            *page = vec![CacheLine::default(); PAGE];
        }
        let groups = &mut page[line % PAGE].0;
        let known = position(groups, fingerprint);
        let old = known.map_or(Group::default(), |at| groups[at]);
        // Younger groups move back by one way. An unknown group pushes the oldest out.
        groups.copy_within(..known.unwrap_or(WAYS - 1), 1);
        let uses = u64::from(uses).clamp(1, ONE);
        let (counts, checks) = (mask(slice, BITS), mask(slice, 8));
        groups[0] = Group {
            uses: fingerprint | (old.uses & USES & !counts) | (uses * (ONES & counts)),
            checks: (old.checks & !checks) | (slice.checks & checks),
        };
    }

    /// Removes the uses of a slice's blocks. Calls `each` with numbers of consecutive blocks and
    /// their uses, 0 if unknown.
    pub(crate) fn take(&mut self, slice: &GroupSlice, mut each: impl FnMut(usize, u32)) {
        let (line, fingerprint) = self.locate(slice.group);
        let groups = self.pages[line / PAGE].get_mut(line % PAGE).map(|line| &mut line.0);
        let known = groups.and_then(|groups| position(groups, fingerprint).map(|at| (groups, at)));
        let Some((groups, at)) = known else { return each(slice.places.len(), 0) };
        let Group { uses, checks } = groups[at];
        let count = |place: u32| u32::try_from(uses >> (BITS * place) & ONE).expect("six bits");
        let (first, mut taken) = (count(slice.places.start), mask(slice, BITS));
        let differing = (checks ^ slice.checks) & mask(slice, 8);
        // Usually all blocks are present with equal uses: a single comparison for all.
        if differing == 0 && uses & taken == u64::from(first) * (ONES & taken) {
            each(slice.places.len(), first);
        } else {
            for place in slice.places.clone() {
                if differing.to_le_bytes()[place as usize] == 0 {
                    each(1, count(place));
                } else {
                    // The ghost here belongs to a different path of the same group, and stays.
                    each(1, 0);
                    taken &= !(ONE << (BITS * place));
                }
            }
        }
        groups[at].uses = uses & !taken;
        // An empty group frees its way.
        if uses & !taken & USES == 0 {
            groups.copy_within(at + 1.., at);
            groups[WAYS - 1] = Group::default();
        }
    }

    /// Place and uses of the last known block of a slice.
    #[must_use]
    pub(crate) fn last(&self, slice: &GroupSlice) -> Option<(u32, u32)> {
        let (line, fingerprint) = self.locate(slice.group);
        let groups = &self.pages[line / PAGE].get(line % PAGE)?.0;
        let Group { uses, checks } = groups[position(groups, fingerprint)?];
        let differing = (checks ^ slice.checks).to_le_bytes();
        let known = |place: u32| {
            let count = u32::try_from(uses >> (BITS * place) & ONE).expect("six bits");
            (count > 0 && differing[place as usize] == 0).then_some((place, count))
        };
        slice.places.clone().rev().find_map(known)
    }

    /// Number of known leading blocks of a slice.
    #[must_use]
    pub(crate) fn leading(&self, slice: &GroupSlice) -> usize {
        let (line, fingerprint) = self.locate(slice.group);
        let groups = self.pages[line / PAGE].get(line % PAGE).map(|line| &line.0);
        let known = groups.and_then(|groups| Some(groups[position(groups, fingerprint)?]));
        let Some(Group { uses, checks }) = known else { return 0 };
        let differing = (checks ^ slice.checks).to_le_bytes();
        let has = |&place: &u32| uses >> (BITS * place) & ONE > 0 && differing[place as usize] == 0;
        slice.places.clone().take_while(has).count()
    }

    /// Maximum size in bytes.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.lines * size_of::<CacheLine>()
    }

    /// Line of a group, and its fingerprint, never 0, above the use counts.
    fn locate(&self, group: u64) -> (usize, u64) {
        // The high half of the product spreads groups evenly over any number of lines.
        let wide = u128::from(group) * (self.lines as u128);
        let line = usize::try_from(wide >> 64).expect("below the number of lines");
        let most = (1 << (u64::BITS - BITS * GROUP)) - 1;
        (line, (1 + group % most) << (BITS * GROUP))
    }
}

fn position(groups: &[Group; WAYS], fingerprint: u64) -> Option<usize> {
    groups.iter().position(|way| way.uses & !USES == fingerprint)
}

/// Mask of a slice's blocks, of `bits` bits each.
fn mask(slice: &GroupSlice, bits: u32) -> u64 {
    let below = |place: u32| 1_u64.checked_shl(bits * place).map_or(u64::MAX, |bit| bit - 1);
    below(slice.places.end) & !below(slice.places.start)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;

    use proptest::prelude::*;

    use super::GhostTable;
    use crate::trie::{GROUP, GroupSlice, Trie};

    fn slice(group: u64, places: Range<u32>) -> GroupSlice {
        GroupSlice { group, places, checks: 0 }
    }

    /// Known uses, place by place.
    fn uses(table: &mut GhostTable, slice: &GroupSlice) -> Vec<u32> {
        let mut known = Vec::new();
        table.take(slice, |blocks, uses| known.extend(vec![uses; blocks]));
        assert_eq!(known.len(), slice.places.len());
        known
    }

    fn take(table: &mut GhostTable, group: u64, places: Range<u32>) -> Vec<u32> {
        uses(table, &slice(group, places))
    }

    /// Groups of paths with different first blocks.
    fn groups(paths: Range<u32>) -> Vec<GroupSlice> {
        let trie = Trie::<()>::new(1);
        let of = |path| trie.slices(0, None, &[path; 2 * GROUP as usize]).collect::<Vec<_>>();
        paths.flat_map(of).collect()
    }

    proptest! {
        /// Without replacement the table is a map.
        #[test]
        fn it_knows_the_uses_of_every_place(
            ops in prop::collection::vec(
                (0..4_u64, 0..8_u32, 1..9_u32, 0..40_u32, any::<u64>()), 1..80,
            ),
        ) {
            let (mut table, mut model) = (GhostTable::new(1), BTreeMap::new());
            for (group, start, blocks, uses, tokens) in ops {
                let places = start..GROUP.min(start + blocks);
                // Each block has two possible values.
                let checks = tokens & 0x0101_0101_0101_0101;
                let slice = GroupSlice { group, places: places.clone(), checks };
                let check = |place: u32| checks >> (8 * place) & 1;
                if uses > 0 {
                    table.put(&slice, uses);
                    model.extend(places.map(|place| ((group, place), (check(place), uses.min(63)))));
                } else {
                    for (place, known) in places.zip(super::tests::uses(&mut table, &slice)) {
                        let mut uses = 0;
                        if let Some(&(own, count)) = model.get(&(group, place))
                            && own == check(place)
                        {
                            uses = count;
                            model.remove(&(group, place));
                        }
                        prop_assert_eq!(known, uses);
                    }
                }
            }
        }
    }

    #[test]
    fn uses_come_back_once_and_are_capped() {
        let mut table = GhostTable::new(100);
        assert!(table.is_empty());
        for (group, uses) in [(1, 1), (2, 7), (3, 99)] {
            table.put(&slice(group, 2..5), uses);
        }
        assert_eq!(take(&mut table, 3, 1..8), [0, 63, 63, 63, 0, 0, 0]);
        assert_eq!(take(&mut table, 2, 4..5), [7]);
        assert_eq!(take(&mut table, 2, 0..8), [0, 0, 7, 7, 0, 0, 0, 0]);
        assert_eq!(take(&mut table, 2, 0..8), [0; 8]);
        assert_eq!((table.bytes(), table.is_empty()), (13 * 64, false));
    }

    #[test]
    fn the_oldest_of_a_line_is_replaced() {
        let mut table = GhostTable::new(1);
        for group in 1..=5 {
            table.put(&slice(group, 0..1), 5);
        }
        table.put(&slice(2, 1..2), 6);
        table.put(&slice(6, 0..1), 7);
        let known: Vec<u32> = (1..=6).flat_map(|group| take(&mut table, group, 0..1)).collect();
        assert_eq!(known, [0, 5, 0, 5, 5, 7]);
    }

    /// Unknown groups are rarely mistaken for known groups. Most of the last half of capacity is
    /// known.
    #[test]
    fn how_many_it_replaces_and_mistakes() {
        let all = groups(0..50_000);
        let mut table = GhostTable::new(40_000);
        for slice in &all {
            table.put(slice, 2);
        }
        let mut known = |slices: &[GroupSlice]| {
            slices
                .iter()
                .filter(|slice| uses(&mut table, slice) != vec![0; slice.places.len()])
                .count()
        };
        let mistaken = known(&groups(1_000_000..1_020_000));
        let late = known(&all[90_000..]);
        assert!(late > 9_500, "{late}");
        // 4 of 65 535 fingerprints are in a line.
        assert!(mistaken < 15, "{mistaken}");
    }
}
