//! Prints: 64 bits that name a block, for what is remembered of blocks that are gone.
//!
//! A print is made of the block's tokens, those of the block before it and its place, so that it
//! costs the same however long the path is. Invariant: a path that comes back has the same prints;
//! no decision about whose KV matches rests on them. Cost: one multiplication per token.

use crate::block::Token;

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;

/// What a block's tokens, or a scope's number, add to its print and to that of the next one.
#[must_use]
pub fn content(tokens: &[Token]) -> u64 {
    // Every word is mixed for itself, with its place: the processor does several at once.
    let mut pairs = tokens.chunks_exact(2);
    let (mut sum, mut place) = (0_u64, SEED);
    for pair in pairs.by_ref() {
        sum = sum.wrapping_add(mix(place ^ (u64::from(pair[0]) << 32 | u64::from(pair[1]))));
        place = place.wrapping_add(SEED);
    }
    let last = pairs.remainder().first().map_or(1 << 40, |&token| u64::from(token));
    sum.wrapping_add(mix(place ^ last))
}

/// The print of a block with this content, behind a block with that of `before`, as the block
/// number `depth` of its path.
#[must_use]
pub fn print(before: u64, content: u64, depth: u32) -> u64 {
    fold(fold(SEED ^ u64::from(depth), before), content)
}

fn mix(word: u64) -> u64 {
    let word = word.wrapping_mul(FACTOR);
    (word ^ word >> 32).wrapping_mul(FACTOR)
}

fn fold(state: u64, word: u64) -> u64 {
    let wide = u128::from(state ^ word) * u128::from(FACTOR);
    let (low, high) = (wide & u128::from(u64::MAX), wide >> 64);
    u64::try_from(low ^ high).expect("both halves fit").wrapping_add(SEED)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{content, print};

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
