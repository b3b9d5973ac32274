//! How often blocks that are gone were used: the ghosts behind `uses * cost / idle`.
//!
//! A bucket holds eight blocks, the youngest first, each as a short fingerprint with its uses; a
//! new one pushes out the bucket's oldest. Invariant: the same calls give the same answers. Cost:
//! O(1), one line of memory per call; 8 bytes per block of capacity, which hold four ghosts. One
//! new block in 130 is taken for another that had its fingerprint. What nothing was written to yet
//! takes no memory.

use crate::policy::MOST_USES;

const WAYS: usize = 8;

/// Blocks of capacity that share a bucket, so that there are four ghosts for each.
const BLOCKS: u64 = 2;

/// Bits of a ghost that say how often it was used, less one.
const COUNT_BITS: u32 = 5;

/// Uses of blocks that are gone, up to [`MOST_USES`].
#[derive(Debug)]
pub struct Gone {
    /// Empty until something is written to it.
    pieces: Vec<Vec<Bucket>>,
    buckets: usize,
}

/// Zero is an empty way.
type Bucket = [u16; WAYS];

/// Buckets that are made together.
const PIECE: usize = 512;

impl Gone {
    /// Ghosts for a tier of `capacity` blocks.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let buckets = usize::try_from(capacity.div_ceil(BLOCKS)).unwrap_or(usize::MAX);
        let buckets = buckets.max(1);
        Self { pieces: vec![Vec::new(); buckets.div_ceil(PIECE)], buckets }
    }

    /// Remembers how often a block was used that is gone now.
    pub fn remember(&mut self, print: u64, uses: u32) {
        let (bucket, name) = self.find(print);
        let piece = &mut self.pieces[bucket / PIECE];
        if piece.is_empty() {
            *piece = vec![[0; WAYS]; PIECE];
        }
        let bucket = &mut piece[bucket % PIECE];
        let old = bucket.iter().position(|&way| way >> COUNT_BITS == name).unwrap_or(WAYS - 1);
        bucket[..=old].rotate_right(1);
        let count = u16::try_from(uses.clamp(1, MOST_USES) - 1).expect("five bits");
        bucket[0] = name << COUNT_BITS | count;
    }

    /// How often a block was used before it went; 0 if that is not known.
    #[must_use]
    pub fn uses(&self, print: u64) -> u32 {
        let (bucket, name) = self.find(print);
        let Some(bucket) = self.pieces[bucket / PIECE].get(bucket % PIECE) else { return 0 };
        let known = bucket.iter().find(|&&way| way >> COUNT_BITS == name);
        known.map_or(0, |way| u32::from(way & ((1 << COUNT_BITS) - 1)) + 1)
    }

    /// Remembers a block no longer.
    pub fn forget(&mut self, print: u64) {
        let (bucket, name) = self.find(print);
        let Some(bucket) = self.pieces[bucket / PIECE].get_mut(bucket % PIECE) else { return };
        if let Some(at) = bucket.iter().position(|&way| way >> COUNT_BITS == name) {
            bucket[at] = 0;
            bucket[at..].rotate_left(1);
        }
    }

    /// How often a block was used before it went, which is forgotten then.
    #[cfg(test)]
    fn recall(&mut self, print: u64) -> u32 {
        let uses = self.uses(print);
        self.forget(print);
        uses
    }

    /// The bytes that it takes at most.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>()
    }

    /// Where a print belongs: its bucket from the high bits, its name, never 0, from the low ones.
    fn find(&self, print: u64) -> (usize, u16) {
        let wide = u128::from(print) * (self.buckets as u128);
        let bucket = usize::try_from(wide >> 64).expect("below the number of buckets");
        let names = (1 << (u16::BITS - COUNT_BITS)) - 1;
        (bucket, 1 + u16::try_from(print % names).expect("eleven bits"))
    }
}

#[cfg(test)]
mod tests {
    use super::Gone;
    use crate::trie::print;

    #[test]
    fn uses_come_back_once_and_are_capped() {
        let mut gone = Gone::new(100);
        for (at, uses) in [(1, 1), (2, 7), (3, 99)] {
            gone.remember(print(at, 0, 0), uses);
        }
        let recalled = [1, 2, 3, 4].map(|at| gone.recall(print(at, 0, 0)));
        assert_eq!(recalled, [1, 7, 32, 0]);
        assert_eq!(gone.recall(print(2, 0, 0)), 0);
        assert_eq!(gone.bytes(), 800);
    }

    #[test]
    fn the_oldest_of_a_bucket_is_forgotten() {
        let mut gone = Gone::new(1);
        for at in 1..=9 {
            gone.remember(print(at, 0, 0), 5);
        }
        gone.remember(print(3, 0, 0), 6);
        let recalled: Vec<u32> = (1..=10).map(|at| gone.recall(print(at, 0, 0))).collect();
        assert_eq!(recalled, [0, 5, 6, 5, 5, 5, 5, 5, 5, 0]);
        assert_eq!(gone.bytes(), 16);
    }

    /// Strangers are rarely taken for somebody; most of the last 4 x capacity are known.
    #[test]
    fn what_it_forgets_and_what_it_mistakes() {
        let (capacity, mut known, mut mistaken) = (10_000, 0_u64, 0_u64);
        let mut gone = Gone::new(capacity);
        for at in 0..100_000 {
            gone.remember(print(at, 0, 0), 2);
        }
        for at in 200_000..202_000 {
            mistaken += u64::from(gone.recall(print(at, 0, 0)) > 0);
        }
        for at in 60_000..100_000 {
            known += u64::from(gone.recall(print(at, 0, 0)) > 0);
        }
        assert!(known > 32_000, "{known}");
        // 8 of 2047 names are in a bucket.
        assert!(mistaken < 20, "{mistaken}");
    }
}
