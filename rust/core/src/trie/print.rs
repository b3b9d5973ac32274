//! Prints: 64 bits that name a block's whole path, for what is remembered of blocks that are gone.
//!
//! Invariant: the same path has the same print in every process; no decision about whose KV matches
//! rests on it. Cost: one multiplication per two tokens.

use crate::block::Token;

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
const FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;

/// The print of a block with these tokens behind a block (or scope) of print `before`.
#[must_use]
pub fn print(before: u64, tokens: &[Token]) -> u64 {
    let fold = |state: u64, word: u64| {
        let wide = u128::from(state ^ word) * u128::from(FACTOR);
        let (low, high) = (wide & u128::from(u64::MAX), wide >> 64);
        u64::try_from(low ^ high).expect("both halves fit").wrapping_add(SEED)
    };
    let mut pairs = tokens.chunks_exact(2);
    let state = pairs.by_ref().fold(fold(SEED, before), |state, pair| {
        fold(state, u64::from(pair[0]) << 32 | u64::from(pair[1]))
    });
    let last = pairs.remainder().first().map_or(1 << 40, |&token| u64::from(token));
    fold(fold(state, last), SEED)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::print;

    #[test]
    fn paths_that_differ_anywhere_have_different_prints() {
        let mut prints = BTreeSet::new();
        for before in 0..50 {
            for token in 0..50 {
                for tokens in [vec![token], vec![token, 0], vec![0, token], vec![7, token, 9]] {
                    prints.insert((print(before, &tokens), before, tokens));
                }
            }
        }
        let distinct: BTreeSet<u64> = prints.iter().map(|(print, ..)| *print).collect();
        assert_eq!(distinct.len(), prints.len());
    }

    /// The low and the high bits are spread: both are used as they are.
    #[test]
    fn prints_are_spread() {
        let prints: Vec<u64> = (0..4096).map(|token| print(0, &[token])).collect();
        for shift in [0, 58] {
            let mut buckets = [0_u32; 64];
            for print in &prints {
                buckets[usize::try_from(print >> shift & 63).unwrap()] += 1;
            }
            assert!(buckets.iter().all(|&count| (32..=96).contains(&count)), "{buckets:?}");
        }
    }
}
