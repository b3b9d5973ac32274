//! How often blocks that are gone were used: the ghosts behind `uses * cost / idle`.
//!
//! A bucket holds eight blocks, the youngest first, each as a short fingerprint with its uses; a
//! new one pushes out the bucket's oldest. The buckets of a group of blocks that follow one another
//! are one line of memory. Invariant: the same calls give the same answers. Cost: O(1), a line per
//! group; 8 bytes per block of capacity, which hold four ghosts. One new block in 130 is taken for
//! another that had its fingerprint. What nothing was written to yet takes no memory.

use crate::policy::MOST_USES;
use crate::trie::{GROUP, Name};

const WAYS: usize = 8;

/// Buckets of a line.
const LINE: u32 = 4;

/// Blocks of capacity that share a line, so that there are four ghosts for each.
const BLOCKS: u64 = 8;

/// Bits of a ghost that say how often it was used, less one.
const COUNT_BITS: u32 = 5;

/// Uses of blocks that are gone, up to [`MOST_USES`].
#[derive(Debug)]
pub struct Gone {
    /// Empty until something is written to it.
    pieces: Vec<Vec<Line>>,
    lines: usize,
    empty: bool,
}

/// Zero is an empty way.
type Bucket = [u16; WAYS];

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([Bucket; LINE as usize]);

/// Lines that are made together.
const PIECE: usize = 128;

impl Gone {
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

    /// Remembers how often a block was used that is gone now.
    pub fn remember(&mut self, name: Name, uses: u32) {
        self.empty = false;
        let (line, at, ghost) = self.find(name);
        let piece = &mut self.pieces[line / PIECE];
        if piece.is_empty() {
            *piece = vec![Line([[0; WAYS]; LINE as usize]); PIECE];
        }
        let bucket = &mut piece[line % PIECE].0[at];
        let old = bucket.iter().position(|&way| way >> COUNT_BITS == ghost).unwrap_or(WAYS - 1);
        bucket[..=old].rotate_right(1);
        let count = u16::try_from(uses.clamp(1, MOST_USES) - 1).expect("five bits");
        bucket[0] = ghost << COUNT_BITS | count;
    }

    /// How often a block was used before it went, which is forgotten then; 0 if it is not known.
    pub fn recall(&mut self, name: Name) -> u32 {
        let (line, at, ghost) = self.find(name);
        let Some(line) = self.pieces[line / PIECE].get_mut(line % PIECE) else { return 0 };
        let bucket = &mut line.0[at];
        let Some(at) = bucket.iter().position(|&way| way >> COUNT_BITS == ghost) else { return 0 };
        let way = std::mem::take(&mut bucket[at]);
        bucket[at..].rotate_left(1);
        u32::from(way & ((1 << COUNT_BITS) - 1)) + 1
    }

    /// The bytes that it takes at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lines * size_of::<Line>()
    }

    /// Where a block belongs: the line of its group, the bucket of its place there, and its
    /// fingerprint, never 0. Groups begin at different buckets, for short paths fill but the first.
    fn find(&self, name: Name) -> (usize, usize, u16) {
        let wide = u128::from(name.group) * (self.lines as u128);
        let line = usize::try_from(wide >> 64).expect("below the number of lines");
        let place = u64::from(name.place / (GROUP / LINE)) + name.group;
        let ghosts = (1 << (u16::BITS - COUNT_BITS)) - 1;
        let ghost = 1 + u16::try_from(name.print % ghosts).expect("eleven bits");
        (line, usize::try_from(place % u64::from(LINE)).expect("small"), ghost)
    }
}

#[cfg(test)]
mod tests {
    use super::Gone;
    use crate::trie::{GROUP, Name, Names};

    /// The first block of a path that nobody else begins with.
    fn first(token: u32) -> Name {
        Names::of(0).next(&[token])
    }

    /// Paths of two groups that begin with different blocks.
    fn paths(count: u32) -> impl Iterator<Item = Name> {
        (0..count).flat_map(|path| {
            let mut names = Names::of(0);
            (0..2 * GROUP).map(move |at| names.next(&[path << 8 | at]))
        })
    }

    #[test]
    fn uses_come_back_once_and_are_capped() {
        let mut gone = Gone::new(100);
        assert!(gone.is_empty());
        for (at, uses) in [(1, 1), (2, 7), (3, 99)] {
            gone.remember(first(at), uses);
        }
        let recalled = [1, 2, 3, 4].map(|at| gone.recall(first(at)));
        assert_eq!(recalled, [1, 7, 32, 0]);
        assert!(gone.recall(first(2)) == 0 && !gone.is_empty());
        assert_eq!(gone.bytes(), 13 * 64);
    }

    #[test]
    fn the_oldest_of_a_bucket_is_forgotten() {
        let mut gone = Gone::new(1);
        let alike = |print| Name { print, ..first(7) };
        for at in 1..=9 {
            gone.remember(alike(at), 5);
        }
        gone.remember(alike(3), 6);
        let recalled: Vec<u32> = (1..=10).map(|at| gone.recall(alike(at))).collect();
        assert_eq!(recalled, [0, 5, 6, 5, 5, 5, 5, 5, 5, 0]);
        assert_eq!(gone.bytes(), 64);
    }

    /// Strangers are rarely taken for somebody; most of the last 4 x capacity are known.
    #[test]
    fn what_it_forgets_and_what_it_mistakes() {
        let (capacity, count) = (10_000, 100_000);
        let names: Vec<Name> = paths(count / (2 * GROUP)).collect();
        let strangers: Vec<Name> = (200_000..202_000).map(first).collect();
        for all in [names, (0..count).map(first).collect()] {
            let mut gone = Gone::new(capacity);
            for &name in &all {
                gone.remember(name, 2);
            }
            let mut told =
                |names: &[Name]| names.iter().filter(|&&name| gone.recall(name) > 0).count();
            let mistaken = told(&strangers);
            let known = told(&all[60_000..]);
            assert!(known > 29_000, "{known}");
            // 8 of 2047 names are in a bucket.
            assert!(mistaken < 20, "{mistaken}");
        }
    }
}
