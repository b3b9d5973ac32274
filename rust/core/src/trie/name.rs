//! Names: what is remembered of blocks that are gone is found by them.
//!
//! A print is made of the block's tokens, those of the block before it and its place, so that it
//! costs the same however long the path is. Blocks of a group follow one another: what is kept by
//! group lies together. Invariant: a path that comes back has the same names; no decision about
//! whose KV matches rests on them. Cost: one multiplication per four tokens.

use crate::block::{BlockId, Token};

use super::{RunId, Trie};

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;

/// What a block's tokens, or a scope's number, add to its print and to that of the next one.
fn content(tokens: &[Token]) -> u64 {
    // Every four tokens are mixed for themselves, with their place: the processor does several at
    // once.
    let pair = |low: Token, high: Token| u64::from(low) | u64::from(high) << 32;
    let mut fours = tokens.chunks_exact(4);
    let (mut sum, mut place) = (0_u64, SEED);
    for four in fours.by_ref() {
        sum = sum.wrapping_add(fold(pair(four[0], four[1]) ^ place, pair(four[2], four[3])));
        place = place.wrapping_add(SEED);
    }
    let rest = fours.remainder();
    if rest.is_empty() {
        return sum;
    }
    let at = |at: usize| rest.get(at).copied().unwrap_or(Token::MAX);
    let length = u64::try_from(rest.len()).expect("below four");
    sum.wrapping_add(fold(pair(at(0), at(1)) ^ place, pair(at(2), 0) ^ length << 32))
}

/// Blocks of a path that belong together, from a multiple of so many on.
pub const GROUP: u32 = 8;

/// A block's name: the same whenever its path comes back under the same root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// 64 bits of its own.
    pub print: u64,
    /// The print of the first block of its group.
    pub group: u64,
    /// How many blocks of its group stand before it.
    pub place: u32,
}

/// Names blocks that stand one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// What the next print begins with: the content of the block before.
    before: u64,
    depth: u32,
    group: u64,
}

impl Names {
    /// Names the paths of a scope.
    #[must_use]
    pub fn of(root: RunId) -> Self {
        Self { before: u64::from(root), depth: 0, group: 0 }
    }

    /// The name of the next block, which has these tokens.
    pub fn next(&mut self, tokens: &[Token]) -> Name {
        let content = content(tokens);
        let print = print(std::mem::replace(&mut self.before, content), content, self.depth);
        let place = self.depth % GROUP;
        if place == 0 {
            self.group = print;
        }
        self.depth += 1;
        Name { print, group: self.group, place }
    }
}

impl<T: Copy + PartialEq + Default> Trie<T> {
    /// The print of a block's name.
    #[must_use]
    pub fn print(&self, block: BlockId) -> u64 {
        let mut names = self.behind(self.home(block).parent, self.parent(block));
        names.next(self.tokens(block)).print
    }

    /// Names the blocks behind `parent`, of a path's first ones if there is none.
    #[must_use]
    pub fn names(&self, root: RunId, parent: Option<BlockId>) -> Names {
        let names = self.behind(root, parent);
        match (parent, names.depth % GROUP) {
            (Some(parent), within @ 1..) => {
                Names { group: self.print(self.above(parent, within - 1)), ..names }
            }
            _ => names,
        }
    }

    /// Names a block and those behind it.
    #[must_use]
    pub fn names_from(&self, block: BlockId) -> Names {
        self.names(self.home(block).parent, self.parent(block))
    }

    /// As [`Trie::names`], but for the group that the blocks before it began.
    fn behind(&self, root: RunId, parent: Option<BlockId>) -> Names {
        parent.map_or(Names::of(root), |block| {
            let before = content(self.tokens(block));
            Names { before, depth: self.depth(block) + 1, group: 0 }
        })
    }

    /// The block that stands so many blocks before this one.
    fn above(&self, mut block: BlockId, mut blocks: u32) -> BlockId {
        loop {
            let run = self.home(block);
            let within = block - run.first;
            if blocks <= within {
                return block - blocks;
            }
            blocks -= within + 1;
            block = self.runs[run.parent].last().expect("its path is that long");
        }
    }
}

/// The print of a block with this content, behind a block with that of `before`, as the block
/// number `depth` of its path.
fn print(before: u64, content: u64, depth: u32) -> u64 {
    fold(fold(SEED ^ u64::from(depth), before), content)
}

fn fold(state: u64, word: u64) -> u64 {
    let wide = u128::from(state ^ SEED.rotate_left(32)) * u128::from(word ^ FACTOR);
    let (low, high) = (wide & u128::from(u64::MAX), wide >> 64);
    u64::try_from(low ^ high).expect("both halves fit")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{GROUP, Name, Names, content, print};
    use crate::trie::Trie;

    #[test]
    fn blocks_that_differ_have_different_prints() {
        let mut prints = BTreeSet::new();
        for before in 0..50 {
            for token in 0..50 {
                for tokens in [vec![token], vec![token, 0], vec![0, token], vec![7, token, 9]] {
                    let depth = token / 10;
                    let name = print(before, content(&tokens), depth);
                    prints.insert((name, before, depth, tokens));
                }
            }
        }
        let distinct: BTreeSet<u64> = prints.iter().map(|(print, ..)| *print).collect();
        assert_eq!(distinct.len(), prints.len());
    }

    /// Wherever naming begins, in whatever run, a block has the same name; a group is named by its
    /// first block.
    #[test]
    fn a_name_does_not_depend_on_runs() {
        let mut trie: Trie<u32> = Trie::new(1);
        let root = trie.add_root();
        let mut path = Vec::new();
        for (own, tokens) in [(1, &[7, 8, 9][..]), (2, &[1; 9]), (3, &[2; 15])] {
            trie.extend(root, path.last().copied(), tokens, own, &mut path);
        }
        trie.insert(root, Some(path[5]), &[77], 4);
        let mut names = Names::of(root);
        let expected: Vec<Name> = path.iter().map(|&at| names.next(trie.tokens(at))).collect();
        for (at, &block) in path.iter().enumerate() {
            assert_eq!(trie.names_from(block).next(trie.tokens(block)), expected[at]);
            assert_eq!(trie.print(block), expected[at].print);
            let (place, group) = (at % GROUP as usize, expected[at - at % GROUP as usize].print);
            assert_eq!((expected[at].place as usize, expected[at].group), (place, group));
        }
    }

    /// The low and the high bits are spread: both are used as they are.
    #[test]
    fn prints_are_spread() {
        let prints: Vec<u64> = (0..4096).map(|token| print(0, content(&[token]), 0)).collect();
        for shift in [0, 58] {
            let mut buckets = [0_u32; 64];
            for print in &prints {
                buckets[usize::try_from(print >> shift & 63).unwrap()] += 1;
            }
            assert!(buckets.iter().all(|&count| (32..=96).contains(&count)), "{buckets:?}");
        }
    }
}
