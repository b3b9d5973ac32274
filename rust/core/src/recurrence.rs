//! Recurrence: tokens shared by two sequences in runs of at least [`RUN`] tokens at any offset.
//!
//! Every position of the sequence has a class: the first position with the same [`RUN`] tokens.
//! Each sequence compared with it is read once, and marks the positions of every class it contains.
//! Invariant: equal runs are compared token by token. Hashes only find candidates. Cost: a hash per
//! run that does not continue the previous run, in each sequence, and 20 bytes per token of the
//! first sequence.

use crate::block::Token;
use crate::trie::content;

/// Minimum length of a run, in tokens.
pub(crate) const RUN: usize = 16;

/// An empty place of the table.
const NONE: u32 = u32::MAX;

/// Runs of a sequence by their tokens.
#[derive(Debug)]
struct Runs<'a> {
    tokens: &'a [Token],
    /// Hash table of classes with open addressing: the upper half of a run's hash, and the run's
    /// first position.
    places: Vec<(u32, u32)>,
    /// Class of each position.
    class: Vec<u32>,
}

impl<'a> Runs<'a> {
    fn new(tokens: &'a [Token]) -> Self {
        let count = (tokens.len() + 1).saturating_sub(RUN);
        let size = (2 * count).next_power_of_two().max(2);
        let mut runs =
            Self { tokens, places: vec![(0, NONE); size], class: Vec::with_capacity(count) };
        for at in 0..count {
            let (place, print) = runs.locate(&tokens[at..at + RUN]);
            let known = runs.places[place].1;
            if known == NONE {
                let first = u32::try_from(at).expect("fewer than 2^32 tokens");
                runs.places[place] = (print, first);
                runs.class.push(first);
            } else {
                runs.class.push(known);
            }
        }
        runs
    }

    /// Place of a run, or the empty place for it, and the check value of its hash.
    fn locate(&self, run: &[Token]) -> (usize, u32) {
        let hash = content(run);
        let print = u32::try_from(hash >> 32).expect("half of the bits");
        let mask = self.places.len() - 1;
        let mut place = usize::try_from(hash & u64::from(u32::MAX)).expect("32 bits") & mask;
        loop {
            let (check, first) = self.places[place];
            let first_at = first as usize;
            if first == NONE || (check == print && self.tokens[first_at..first_at + RUN] == *run) {
                return (place, print);
            }
            place = (place + 1) & mask;
        }
    }

    /// Class of a run, if the sequence contains it.
    fn find(&self, run: &[Token]) -> Option<u32> {
        let first = self.places[self.locate(run).0].1;
        (first != NONE).then_some(first)
    }

    /// Class of the next position, if the run there ends with this token.
    fn next(&self, class: u32, token: Token) -> Option<u32> {
        let after = class as usize + 1;
        let last = self.tokens.get(after + RUN - 1)?;
        (*last == token).then(|| self.class[after])
    }
}

/// For each of `others`, the number of `tokens` covered by common runs of at least [`RUN`] tokens.
#[must_use]
pub(crate) fn recurring(tokens: &[Token], others: &[&[Token]]) -> Vec<usize> {
    let runs = Runs::new(tokens);
    let mut seen = vec![0; runs.class.len()];
    let count = |(number, other): (usize, &&[Token])| {
        let mark = number + 1;
        let mut before: Option<u32> = None;
        for (at, run) in other.windows(RUN).enumerate() {
            // Most runs continue the previous run and need no hash.
            let class = before
                .and_then(|class| runs.next(class, other[at + RUN - 1]))
                .or_else(|| runs.find(run));
            if let Some(class) = class {
                seen[class as usize] = mark;
            }
            before = class;
        }
        let (mut covered, mut end) = (0, 0);
        for (at, &class) in runs.class.iter().enumerate() {
            if seen[class as usize] == mark {
                covered += at + RUN - end.max(at);
                end = at + RUN;
            }
        }
        covered
    };
    others.iter().enumerate().map(count).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{RUN, recurring};
    use crate::block::Token;

    /// By comparison of all pairs of positions.
    fn naive(tokens: &[Token], other: &[Token]) -> usize {
        let mut covered = BTreeSet::new();
        for (at, run) in tokens.windows(RUN).enumerate() {
            if other.windows(RUN).any(|window| window == run) {
                covered.extend(at..at + RUN);
            }
        }
        covered.len()
    }

    /// Texts of few pieces: runs recur at different offsets, with changed tokens.
    fn text() -> impl Strategy<Value = Vec<Token>> {
        let piece = (0_u32..4, 0_usize..40, prop::option::of(0_usize..40));
        prop::collection::vec(piece, 0..6).prop_map(|pieces| {
            let mut text = Vec::new();
            for (kind, length, changed) in pieces {
                let first = text.len();
                text.extend((0..length).map(|at| {
                    let at = u32::try_from(at).unwrap();
                    // The last kind repeats two tokens.
                    if kind == 3 { at % 2 } else { 100 * kind + at }
                }));
                if let Some(at) = changed.filter(|&at| at < length) {
                    text[first + at] = 9999;
                }
            }
            text
        })
    }

    proptest! {
        #[test]
        fn it_is_what_all_pairs_give(
            tokens in text(),
            others in prop::collection::vec(text(), 0..4),
        ) {
            let all: Vec<&[Token]> = others.iter().map(Vec::as_slice).collect();
            let naive: Vec<usize> = all.iter().map(|other| naive(&tokens, other)).collect();
            prop_assert_eq!(recurring(&tokens, &all), naive);
        }
    }

    #[test]
    fn a_short_run_does_not_count() {
        let text: Vec<Token> = (0..40).collect();
        assert_eq!(recurring(&text, &[&text, &text[5..20], &text[5..21], &[]]), [40, 0, 16, 0]);
        assert_eq!(recurring(&text[..15], &[&text]), [0]);
    }
}
