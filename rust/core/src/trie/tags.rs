//! Tags: 64-bit hashes of evicted blocks, the keys of the ghost tables.
//!
//! A block's tag hashes its tokens, the previous block's tokens, its depth and (first block) its
//! scope, at the same cost for every length of path. A group is 8 consecutive blocks of a path,
//! keyed by the tag of its first block. An 8-bit check per block distinguishes paths branching
//! within a group. Invariant: a returning path gets the same tags. No lookup of KV depends on tags.
//! Cost: a multiplication per four tokens.

use std::ops::Range;

use crate::block::{BlockId, Token};

use super::{Trie, count};

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;
const STEP: u64 = 0xA076_1D64_78BD_642F;

/// Hash of a block's tokens, for its tag, the next block's tag and the table of siblings.
///
/// Groups of four tokens are multiplied independently (instruction-level parallelism), each with
/// its own seed.
pub(crate) fn content(tokens: &[Token]) -> u64 {
    let pair = |low: Token, high: Token| u64::from(low) | u64::from(high) << 32;
    let (mut sum, mut seed) = (SEED, SEED);
    let mut fours = tokens.chunks_exact(4);
    // Independent products, without waits between them.
    for four in fours.by_ref() {
        sum ^= fold(seed ^ pair(four[0], four[1]), pair(four[2], four[3]));
        seed = seed.wrapping_add(STEP);
    }
    let rest = fours.remainder();
    if rest.is_empty() {
        return sum;
    }
    // The length distinguishes padding from real tokens.
    let at = |at: usize| rest.get(at).copied().unwrap_or(Token::MAX);
    let length = u64::try_from(rest.len()).expect("below four");
    sum ^ fold(seed ^ pair(at(0), at(1)), pair(at(2), 0) ^ length << 32)
}

/// Blocks per group. Groups start at multiples of it.
pub(crate) const GROUP: u32 = 8;

/// Consecutive blocks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupSlice {
    /// The group's key: the tag of its first block.
    pub group: u64,
    /// Positions of the blocks within the group.
    pub places: Range<u32>,
    /// 8-bit checks of the blocks' own tokens, by position.
    pub checks: u64,
}

/// Hash for sampling, from three of a block's tokens and its depth. A returning block has the same
/// hash.
#[inline]
#[must_use]
pub(crate) fn sample_hash(tokens: &[Token], depth: u32) -> u64 {
    fold(SEED ^ u64::from(depth), word(tokens))
}

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// Hash of a block's tokens, three tokens of the previous block (for a first block, the scope's
    /// seed), and its depth. A returning block has the same hash.
    #[must_use]
    pub(crate) fn print(&self, seed: u64, block: BlockId) -> u32 {
        let before = self.parent(block).map_or(seed, |parent| word(self.tokens(parent)));
        let tag = tag(before, content(self.tokens(block)), self.depth(block));
        u32::try_from(tag >> 32).expect("half of the bits")
    }

    /// The group slices of blocks with these tokens after `parent` (first blocks if none), in
    /// order.
    pub(crate) fn slices<'a>(
        &'a self,
        seed: u64,
        parent: Option<BlockId>,
        tokens: &'a [Token],
    ) -> impl DoubleEndedIterator<Item = GroupSlice> + 'a {
        let size = self.block_tokens;
        let first = parent.map_or(0, |block| self.depth(block) + 1);
        let end = first + count(tokens.len() / size);
        // After a parent in the middle of a group, the key comes from the group's first block.
        let above: &[Token] = match (parent, first % GROUP) {
            (Some(parent), within @ 1..) => self.tokens(self.above(parent, within - 1)),
            _ => &[],
        };
        let groups = first / GROUP..if first == end { first / GROUP } else { end.div_ceil(GROUP) };
        groups.map(move |number| {
            let start = number * GROUP;
            let places = first.max(start) - start..end.min(start + GROUP) - start;
            let at = (start + places.start - first) as usize * size;
            let mut own = tokens[at..].chunks_exact(size);
            let head = if places.start == 0 { &tokens[at..at + size] } else { above };
            let (mut checks, mut place) = (0, places.start);
            for tokens in own.by_ref().take(places.len()) {
                checks |= check(tokens) << (8 * place);
                place += 1;
            }
            GroupSlice { group: tag(seed, content(head), start), places, checks }
        })
    }

    /// The block `blocks` positions before this one.
    fn above(&self, mut block: BlockId, mut blocks: u32) -> BlockId {
        loop {
            let run = self.run_of(block);
            let within = block - run.first;
            if blocks <= within {
                return block - blocks;
            }
            blocks -= within + 1;
            block = self.runs[run.parent].last().expect("its path is that long");
        }
    }
}

/// 8-bit check of a block's first, middle and last token.
fn check(tokens: &[Token]) -> u64 {
    word(tokens).wrapping_mul(FACTOR) >> 56
}

/// First, middle and last token of a block.
#[inline]
fn word(tokens: &[Token]) -> u64 {
    let at = |at: usize| u64::from(tokens[at]);
    let last = tokens.len() - 1;
    at(0) ^ at(tokens.len() / 2) << 16 ^ at(last) << 32
}

/// Tag of a block from the previous block's content hash, its own, and its depth.
fn tag(before: u64, content: u64, depth: u32) -> u64 {
    fold(fold(SEED ^ u64::from(depth), before), content)
}

pub(super) fn fold(state: u64, word: u64) -> u64 {
    let wide = u128::from(state ^ SEED.rotate_left(32)) * u128::from(word ^ FACTOR);
    let (low, high) = (wide & u128::from(u64::MAX), wide >> 64);
    u64::try_from(low ^ high).expect("both halves fit")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{GROUP, GroupSlice, check, content, sample_hash, tag};
    use crate::trie::{Trie, count};

    #[test]
    fn different_blocks_have_different_tags() {
        let mut tags = BTreeSet::new();
        for before in 0..50 {
            for token in 0..50 {
                for tokens in [vec![token], vec![token, 0], vec![0, token], vec![7, token, 9]] {
                    let depth = token / 10;
                    let one = tag(before, content(&tokens), depth);
                    tags.insert((one, before, depth, tokens));
                }
            }
        }
        let distinct: BTreeSet<u64> = tags.iter().map(|(tag, ..)| *tag).collect();
        assert_eq!(distinct.len(), tags.len());
    }

    /// A block's tag and a group's key do not depend on the run or the starting block of the walk.
    #[test]
    fn a_tag_does_not_depend_on_runs() {
        let mut trie: Trie<u32> = Trie::new(1);
        let root = trie.add_root();
        let mut path = Vec::new();
        for (value, tokens) in [(1, &[7, 8, 9][..]), (2, &[1; 9]), (3, &[2; 15])] {
            trie.extend(root, path.last().copied(), tokens, value, &mut path);
        }
        trie.insert(root, Some(path[5]), &[77], 4);
        let tokens: Vec<u32> = path.iter().map(|&block| trie.tokens(block)[0]).collect();
        let mut whole: Trie<u32> = Trie::new(1);
        let (root, mut alone) = (whole.add_root(), Vec::new());
        whole.extend(root, None, &tokens, 1, &mut alone);
        let groups: Vec<GroupSlice> = trie.slices(7, None, &tokens).collect();
        let group = |at: u32| groups[(at / GROUP) as usize].group;
        assert!(groups.windows(2).all(|two| two[0].group != two[1].group));
        for from in 0..tokens.len() {
            let parent = from.checked_sub(1).map(|at| path[at]);
            assert_eq!(trie.print(7, path[from]), whole.print(7, alone[from]));
            for to in from..=tokens.len() {
                let slices = trie.slices(7, parent, &tokens[from..to]);
                let one = |slice: GroupSlice| {
                    let check = move |place: u32| (slice.checks >> (8 * place)) & 0xFF;
                    slice.places.map(move |place| (slice.group, place, check(place)))
                };
                let ours: Vec<_> = slices.flat_map(one).collect();
                let known = |at: usize| (group(count(at)), count(at) % GROUP, check(&[tokens[at]]));
                assert_eq!(ours, (from..to).map(known).collect::<Vec<_>>());
            }
        }
    }

    /// Blocks with a different depth or a single different token are sampled independently.
    #[test]
    fn an_eighth_of_the_blocks_is_sampled() {
        let share =
            |hash: &dyn Fn(u32) -> u64| (0..4096).filter(|&i| hash(i).is_multiple_of(8)).count();
        let shares = [
            share(&|i| sample_hash(&[7; 16], i)),
            share(&|i| sample_hash(&[i], 0)),
            share(&|i| sample_hash(&[[i], [9], [9]].concat(), 3)),
            share(&|i| sample_hash(&[[9], [i], [9]].concat(), 3)),
            share(&|i| sample_hash(&[[9], [9], [i]].concat(), 3)),
        ];
        assert!(shares.iter().all(|share| (410..=614).contains(share)), "{shares:?}");
    }

    /// Tables use the low bits and the high bits as they are, so both must be uniform.
    #[test]
    fn tags_are_uniform() {
        let tags: Vec<u64> = (0..4096).map(|token| tag(0, content(&[token]), 0)).collect();
        for shift in [0, 58] {
            let mut buckets = [0_u32; 64];
            for tag in &tags {
                buckets[usize::try_from(tag >> shift & 63).unwrap()] += 1;
            }
            assert!(buckets.iter().all(|&count| (32..=96).contains(&count)), "{buckets:?}");
        }
    }
}
