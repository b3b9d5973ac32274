//! How often blocks that are gone were used: the ghosts behind `uses * cost / idle`.
//!
//! Blocks that follow one another are remembered by groups: a fingerprint of the group, and a count
//! and eight bits of the tokens of each of its eight blocks. A line of memory holds four groups, the
//! youngest first; a new one pushes out the oldest. Invariant: the same calls give the same answers.
//! Cost: O(1), a line per group; 8 bytes per block of capacity, which hold four ghosts of whole groups,
//! or half a one where each path is a single block. One group in 16 000 is taken for another that had
//! its fingerprint, and of its blocks one in 256. What nothing was written to yet takes no memory.

use prefetch_index::prefetch_index;

use crate::policy::MOST_USES;
use crate::trie::{GROUP, GroupSlice};

/// Bits of a count: 0 for a block that is not gone, or its uses.
const BITS: u32 = 6;

/// The bits of a group's counts; those above are its fingerprint.
const COUNTS: u64 = (1 << (BITS * GROUP)) - 1;

/// The bits of the first count.
const ONE: u64 = (1 << BITS) - 1;

/// A one in every count.
const ONES: u64 = COUNTS / ONE;

const _: () = assert!(BITS * GROUP <= 48 && MOST_USES < 1 << BITS && 8 * GROUP == u64::BITS);

/// Groups of a line.
const WAYS: usize = 4;

/// Blocks of capacity that share a line, so that there are four ghosts for each.
const BLOCKS: u64 = 8;

/// The blocks of a group that are gone.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    /// Fingerprint and counts; zero if the way is empty.
    counts: u64,
    checks: u64,
}

/// The youngest first.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct CacheLine([Group; WAYS]);

/// Lines that are made together.
const PIECE: usize = 128;

/// Uses of blocks that are gone, up to [`MOST_USES`].
#[derive(Debug)]
pub struct GhostTable {
    /// Empty until something is written to it.
    pieces: Vec<Vec<CacheLine>>,
    lines: usize,
    empty: bool,
}

impl GhostTable {
    /// Ghosts for a tier of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let lines = usize::try_from(capacity.div_ceil(BLOCKS)).unwrap_or(usize::MAX).max(1);
        Self { pieces: vec![Vec::new(); lines.div_ceil(PIECE)], lines, empty: true }
    }

    /// Whether nothing has gone yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.empty
    }

    /// Prefetches the CPU cache line of a group.
    pub fn prefetch_line(&self, slice: &GroupSlice) {
        let (line, _) = self.find(slice.group);
        prefetch_index(&self.pieces[line / PIECE], line % PIECE);
    }

    /// Remembers how often blocks were used that are gone now.
    pub fn remember(&mut self, slice: &GroupSlice, uses: u32) {
        self.empty = false;
        let (line, name) = self.find(slice.group);
        let piece = &mut self.pieces[line / PIECE];
        if piece.is_empty() {
            *piece = vec![CacheLine::default(); PIECE];
        }
        let groups = &mut piece[line % PIECE].0;
        let known = position(groups, name);
        let old = known.map_or(Group::default(), |at| groups[at]);
        groups.copy_within(..known.unwrap_or(WAYS - 1), 1);
        let uses = u64::from(uses.clamp(1, MOST_USES));
        let (counts, checks) = (mask(slice, BITS), mask(slice, 8));
        groups[0] = Group {
            counts: name | (old.counts & COUNTS & !counts) | (uses * (ONES & counts)),
            checks: (old.checks & !checks) | (slice.checks & checks),
        };
    }

    /// Tells how often the blocks of a part were used before they went, so many one after the other
    /// so often, and forgets them; 0 where it is not known.
    pub fn recall(&mut self, slice: &GroupSlice, mut tell: impl FnMut(usize, u32)) {
        let (line, name) = self.find(slice.group);
        let groups = self.pieces[line / PIECE].get_mut(line % PIECE).map(|line| &mut line.0);
        let known = groups.and_then(|groups| position(groups, name).map(|at| (groups, at)));
        let Some((groups, at)) = known else { return tell(slice.places.len(), 0) };
        let Group { counts, checks } = groups[at];
        let count = |place: u32| counts >> (BITS * place) & ONE;
        let uses = |count: u64| u32::try_from(count).expect("a few bits");
        let (first, mut forgotten) = (count(slice.places.start), mask(slice, BITS));
        let strange = (checks ^ slice.checks) & mask(slice, 8);
        let bytes = strange.to_le_bytes();
        if strange == 0 && counts & forgotten == first * (ONES & forgotten) {
            tell(slice.places.len(), uses(first));
        } else {
            for place in slice.places.clone() {
                if bytes[place as usize] == 0 {
                    tell(1, uses(count(place)));
                } else {
                    tell(1, 0);
                    forgotten &= !(ONE << (BITS * place));
                }
            }
        }
        groups[at].counts = counts & !forgotten;
        if counts & !forgotten & COUNTS == 0 {
            groups.copy_within(at + 1.., at);
            groups[WAYS - 1] = Group::default();
        }
    }

    /// The bytes that it takes at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lines * size_of::<CacheLine>()
    }

    /// Where a group belongs: its line, and its fingerprint, never 0, above the counts.
    fn find(&self, group: u64) -> (usize, u64) {
        let wide = u128::from(group) * (self.lines as u128);
        let line = usize::try_from(wide >> 64).expect("below the number of lines");
        let names = (1 << (u64::BITS - BITS * GROUP)) - 1;
        (line, (1 + group % names) << (BITS * GROUP))
    }
}

fn position(groups: &[Group; WAYS], name: u64) -> Option<usize> {
    groups.iter().position(|way| way.counts & !COUNTS == name)
}

/// The bits of a part, of which each of its blocks has so many.
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

    /// What is known of single places of a part.
    fn uses(gone: &mut GhostTable, slice: &GroupSlice) -> Vec<u32> {
        let mut known = Vec::new();
        gone.recall(slice, |blocks, uses| known.extend(vec![uses; blocks]));
        assert_eq!(known.len(), slice.places.len());
        known
    }

    fn recall(gone: &mut GhostTable, group: u64, places: Range<u32>) -> Vec<u32> {
        uses(gone, &slice(group, places))
    }

    /// Groups of paths that begin with different blocks.
    fn groups(paths: Range<u32>) -> Vec<GroupSlice> {
        let trie = Trie::<()>::new(1);
        let of = |path| trie.slices(0, None, &[path; 2 * GROUP as usize]).collect::<Vec<_>>();
        paths.flat_map(of).collect()
    }

    proptest! {
        /// As long as nothing is pushed out, it is a map.
        #[test]
        fn it_knows_the_uses_of_every_place(
            ops in prop::collection::vec(
                (0..4_u64, 0..8_u32, 1..9_u32, 0..40_u32, any::<u64>()), 1..80,
            ),
        ) {
            let (mut gone, mut model) = (GhostTable::new(1), BTreeMap::new());
            for (group, start, blocks, uses, tokens) in ops {
                let places = start..GROUP.min(start + blocks);
                // Each block is one of two.
                let checks = tokens & 0x0101_0101_0101_0101;
                let slice = GroupSlice { group, places: places.clone(), checks };
                let check = |place: u32| checks >> (8 * place) & 1;
                if uses > 0 {
                    gone.remember(&slice, uses);
                    model.extend(places.map(|place| ((group, place), (check(place), uses.min(32)))));
                } else {
                    for (place, known) in places.zip(super::tests::uses(&mut gone, &slice)) {
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
        let mut gone = GhostTable::new(100);
        assert!(gone.is_empty());
        for (group, uses) in [(1, 1), (2, 7), (3, 99)] {
            gone.remember(&slice(group, 2..5), uses);
        }
        assert_eq!(recall(&mut gone, 3, 1..8), [0, 32, 32, 32, 0, 0, 0]);
        assert_eq!(recall(&mut gone, 2, 4..5), [7]);
        assert_eq!(recall(&mut gone, 2, 0..8), [0, 0, 7, 7, 0, 0, 0, 0]);
        assert_eq!(recall(&mut gone, 2, 0..8), [0; 8]);
        assert_eq!((gone.bytes(), gone.is_empty()), (13 * 64, false));
    }

    #[test]
    fn the_oldest_of_a_line_is_forgotten() {
        let mut gone = GhostTable::new(1);
        for group in 1..=5 {
            gone.remember(&slice(group, 0..1), 5);
        }
        gone.remember(&slice(2, 1..2), 6);
        gone.remember(&slice(6, 0..1), 7);
        let known: Vec<u32> = (1..=6).flat_map(|group| recall(&mut gone, group, 0..1)).collect();
        assert_eq!(known, [0, 5, 0, 5, 5, 7]);
    }

    /// Strangers are rarely taken for somebody; most of the last half of what fits is known.
    #[test]
    fn what_it_forgets_and_what_it_mistakes() {
        let all = groups(0..50_000);
        let mut gone = GhostTable::new(40_000);
        for slice in &all {
            gone.remember(slice, 2);
        }
        let mut told = |slices: &[GroupSlice]| {
            slices
                .iter()
                .filter(|slice| uses(&mut gone, slice) != vec![0; slice.places.len()])
                .count()
        };
        let mistaken = told(&groups(1_000_000..1_020_000));
        let known = told(&all[90_000..]);
        assert!(known > 9_500, "{known}");
        // 4 of 65 535 names are in a line.
        assert!(mistaken < 15, "{mistaken}");
    }
}
