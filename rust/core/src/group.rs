//! Layer groups: layers of a model that retain the same part of a sequence, and the blocks needed
//! from each group for a resume.
//!
//! Invariant: [`Group::needed`] returns exactly the blocks attended to by the token after the
//! border, and the block with the state before it. Cost: O(1). A match is O(blocks · groups).

use std::ops::Range;

use smallvec::SmallVec;

use crate::error::{Error, Result};

/// At most `1 / PARTS` of a page stays unused.
const PARTS: u64 = 25;

/// Kind of a group, by the past tokens visible to a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// All.
    Full,
    /// The last `window` tokens, including the token itself, and the first `sinks` tokens.
    Sliding {
        /// Tokens of the window.
        window: u64,
        /// Leading tokens that stay visible.
        sinks: u64,
    },
    /// Tokens of its own chunk.
    Chunked {
        /// Tokens of a chunk.
        chunk: u64,
    },
    /// None: the recurrent state after the previous token replaces them.
    State,
}

/// Group of layers that retain the same part of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Kind.
    pub kind: GroupKind,
    /// Bytes of a slot: a block of all the group's layers, or a state.
    pub slot_bytes: u64,
    /// Number of layers.
    pub layers: u16,
}

/// Block indices on a path needed from a group for a resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Blocks of the sinks.
    pub leading: Range<u32>,
    /// Blocks up to the border, without the blocks in `leading`.
    pub trailing: Range<u32>,
}

impl Needed {
    /// All needed blocks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        self.leading.clone().chain(self.trailing.clone())
    }

    /// Whether a block is needed.
    #[must_use]
    pub fn contains(&self, block: u32) -> bool {
        self.leading.contains(&block) || self.trailing.contains(&block)
    }
}

/// Places on a path, as ascending ranges with gaps in between.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places(SmallVec<[Range<u32>; 4]>);

impl Places {
    /// All places in these ranges.
    pub(crate) fn of(ranges: impl IntoIterator<Item = Range<u32>>) -> Self {
        let mut ranges: SmallVec<[Range<u32>; 4]> =
            ranges.into_iter().filter(|range| !range.is_empty()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let touches = next.start <= range.end;
            if touches {
                range.end = range.end.max(next.end);
            }
            touches
        });
        Self(ranges)
    }

    /// All places, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges().flatten()
    }

    /// The ranges, ascending.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.0.iter().cloned()
    }

    /// Number of places.
    #[must_use]
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether a place is contained.
    #[must_use]
    pub(crate) fn contains(&self, place: u32) -> bool {
        let after = self.0.partition_point(|range| range.end <= place);
        self.0.get(after).is_some_and(|range| range.start <= place)
    }
}

impl Group {
    /// Places in `within` needed to resume at any of the borders.
    pub(crate) fn needed_at(
        &self,
        borders: impl Iterator<Item = u32>,
        block_tokens: u64,
        within: Range<u32>,
    ) -> Places {
        Places::of(borders.flat_map(|border| {
            let Needed { leading, trailing } = self.needed(border, block_tokens);
            let cut = |range: Range<u32>| range.start.max(within.start)..range.end.min(within.end);
            [cut(leading), cut(trailing)]
        }))
    }

    /// Number of blocks that hold all earlier tokens visible to a token, plus 1.
    #[must_use]
    pub fn span(&self, block_tokens: u64) -> u32 {
        let blocks = match self.kind {
            GroupKind::State => return 1,
            GroupKind::Full => return u32::MAX,
            GroupKind::Sliding { window, .. } => window.div_ceil(block_tokens) + 1,
            GroupKind::Chunked { chunk } => chunk.div_ceil(block_tokens) + 1,
        };
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// Blocks needed to resume after `border` blocks of `block_tokens` tokens.
    #[must_use]
    pub fn needed(&self, border: u32, block_tokens: u64) -> Needed {
        let blocks = |tokens: u64| {
            u32::try_from(tokens.div_ceil(block_tokens)).unwrap_or(u32::MAX).min(border)
        };
        let (leading, first) = match self.kind {
            GroupKind::Full => (0, 0),
            GroupKind::Sliding { window, sinks } => (blocks(sinks), border - blocks(window - 1)),
            GroupKind::Chunked { chunk } => {
                let end = u64::from(border).saturating_mul(block_tokens);
                // Block with the start of the next token's chunk. None if this token starts a
                // chunk.
                let start = end - end % chunk;
                (0, u32::try_from(start / block_tokens).unwrap_or(u32::MAX))
            }
            GroupKind::State => (0, border.saturating_sub(1)),
        };
        Needed { leading: 0..leading, trailing: first.max(leading)..border }
    }
}

/// Longest border up to `most` where every group has all blocks needed to resume.
///
/// `has(group, block)` reports whether a block is present. A missing block rules out every border
/// between it and the end of its window, so the next candidate is the border before the block.
/// Window blocks already found are not checked again.
pub fn longest(
    groups: &[Group],
    block_tokens: u64,
    most: u32,
    has: impl Fn(usize, u32) -> bool,
) -> u32 {
    let mut border = most;
    // Per group: all blocks from here to the border are present.
    let mut seen = vec![most; groups.len()];
    while border > 0 {
        let lacking = groups.iter().zip(&mut seen).enumerate().find_map(|(at, (group, seen))| {
            let Needed { leading, trailing } = group.needed(border, block_tokens);
            *seen = border.min(*seen);
            let unseen = trailing.start..trailing.end.min(*seen);
            if let Some(block) = unseen.rev().find(|&block| !has(at, block)) {
                return Some(block);
            }
            *seen = trailing.start.min(*seen);
            leading.rev().find(|&block| !has(at, block))
        });
        let Some(block) = lacking else { break };
        border = block;
    }
    border
}

/// [`longest`] for a request that computes the blocks `holes`, ascending. The last block before the
/// border is never a hole.
///
/// The tokens of a hole attend to the windows before it, which are present or computed with an
/// earlier hole. Recurrent states cannot be rolled back, so a model with a state group computes no
/// hole.
pub(crate) fn longest_over_holes(
    groups: &[Group],
    block_tokens: u64,
    most: u32,
    holes: &[u32],
    has: impl Fn(usize, u32) -> bool,
) -> u32 {
    let hole = |block: u32| holes.binary_search(&block).is_ok();
    let resident = |at: usize, block: u32| hole(block) || has(at, block);
    let begins = |&&start: &&u32| start.checked_sub(1).is_none_or(|before| !hole(before));
    let lacks = |&&start: &&u32| {
        groups.iter().enumerate().any(|(at, group)| {
            let mut needed = group.needed(start, block_tokens).iter();
            group.kind == GroupKind::State || !needed.all(|block| resident(at, block))
        })
    };
    let mut most = holes.iter().filter(begins).find(lacks).map_or(most, |&start| start.min(most));
    loop {
        let border = longest(groups, block_tokens, most, resident);
        let before = (0..border).rev().take_while(|&block| hole(block)).last();
        let Some(start) = before else { return border };
        most = start;
    }
}

/// Page size of an arena, in bytes, for slots of these sizes.
///
/// The smallest size, at least the largest slot, with at most 1/25 of a page unused in every group.
///
/// # Errors
/// [`Error::Config`] for a slot of 0 bytes or more than 2^56 bytes.
pub fn page_bytes(slots: &[u64]) -> Result<u64> {
    let largest = slots.iter().copied().max().unwrap_or(0);
    if slots.contains(&0) || largest > 1 << 56 {
        return Err(Error::config(format!("slots of {slots:?} bytes, 1 to 2^56 wanted")));
    }
    // A smaller slot wastes less than its own size.
    let coarse: Vec<u64> = slots.iter().copied().filter(|&slot| slot * PARTS > largest).collect();
    let fits = |page: u64| coarse.iter().all(|&slot| page % slot * PARTS <= page);
    // Starting at a multiple of a slot, its waste grows with the page.
    let pages =
        |&slot: &u64| (largest.div_ceil(slot)..=PARTS * largest / slot).map(move |n| n * slot);
    let least = coarse.iter().flat_map(pages).filter(|&page| fits(page)).min();
    Ok(least.unwrap_or(PARTS * largest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Group, GroupKind, Places, longest, longest_over_holes, page_bytes};

    fn group(kind: GroupKind) -> Group {
        Group { kind, slot_bytes: 1, layers: 1 }
    }

    /// Whether a token at `query` attends to the earlier token `past`: the definition of attention.
    fn attends(kind: GroupKind, query: u64, past: u64) -> bool {
        match kind {
            GroupKind::Full => true,
            GroupKind::Sliding { window, sinks } => query - past < window || past < sinks,
            GroupKind::Chunked { chunk } => query / chunk == past / chunk,
            GroupKind::State => false,
        }
    }

    /// Whether a resume at a border can compute its first token, checked token by token.
    fn resumes(groups: &[Group], size: u64, border: u32, has: &[Vec<bool>]) -> bool {
        let query = u64::from(border) * size;
        groups.iter().zip(has).all(|(group, has)| {
            let resident = |token: u64| has[usize::try_from(token / size).unwrap()];
            let past = (0..query).all(|past| !attends(group.kind, query, past) || resident(past));
            past && (group.kind != GroupKind::State || border == 0 || has[border as usize - 1])
        })
    }

    /// Whether a request can compute the holes before a border, token by token and first to last,
    /// and then its own first token.
    fn fills(groups: &[Group], size: u64, border: u32, holes: &[u32], has: &[Vec<bool>]) -> bool {
        let hole = |token: u64| holes.contains(&u32::try_from(token / size).unwrap());
        let end = u64::from(border) * size;
        let computed = (0..end).filter(|&token| hole(token));
        computed.chain([end]).all(|query| {
            groups.iter().zip(has).all(|(group, has)| {
                let resident = |past| hole(past) || has[usize::try_from(past / size).unwrap()];
                let state = group.kind == GroupKind::State;
                // A pass over a hole would begin with the state after it.
                let found = !state || (query == end && (end == 0 || resident(end - 1)));
                found && (0..query).all(|past| !attends(group.kind, query, past) || resident(past))
            })
        }) && (border == 0 || !hole(end - 1))
    }

    fn kind() -> impl Strategy<Value = GroupKind> {
        let sliding = (1_u64..40, 0_u64..9);
        prop_oneof![
            1 => Just(GroupKind::Full),
            4 => sliding.prop_map(|(window, sinks)| GroupKind::Sliding { window, sinks }),
            3 => (1_u64..40).prop_map(|chunk| GroupKind::Chunked { chunk }),
            2 => Just(GroupKind::State),
        ]
    }

    /// Groups (1 to 4), tokens per block, and the blocks present in each group, mostly in runs.
    fn case() -> impl Strategy<Value = (Vec<Group>, u64, Vec<Vec<bool>>)> {
        (1_u64..9, 1_usize..14).prop_flat_map(|(size, blocks)| {
            let runs = prop::collection::vec((any::<bool>(), 1_usize..6), blocks);
            let has = runs.prop_map(move |runs| {
                let all = runs.into_iter().flat_map(|(has, n)| std::iter::repeat_n(has, n));
                all.take(blocks).collect::<Vec<_>>()
            });
            let dense = prop::collection::vec(prop::bool::weighted(0.9), blocks);
            let one = (kind().prop_map(group), prop_oneof![has, dense]);
            let several = prop::collection::vec(one, 1..5);
            several.prop_map(move |several| {
                let (groups, has) = several.into_iter().unzip();
                (groups, size, has)
            })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100_000))]

        #[test]
        fn the_longest_match_is_the_one_that_attention_gives((groups, size, has) in case()) {
            let most = u32::try_from(has[0].len()).unwrap();
            let naive = (0..=most).rev().find(|&border| resumes(&groups, size, border, &has));
            let found = longest(&groups, size, most, |group, block| has[group][block as usize]);
            prop_assert_eq!(Some(found), naive);
        }

        #[test]
        fn a_hole_is_computed_where_attention_has_what_its_tokens_see(
            (groups, size, has) in case(),
            holes in prop::collection::btree_set(0_u32..13, 0..5),
        ) {
            let most = u32::try_from(has[0].len()).unwrap();
            let holes: Vec<u32> = holes.into_iter().filter(|&hole| hole < most).collect();
            let naive = (0..=most).rev().find(|&border| fills(&groups, size, border, &holes, &has));
            let has = |group: usize, block: u32| has[group][block as usize];
            prop_assert_eq!(Some(longest_over_holes(&groups, size, most, &holes, has)), naive);
        }

        #[test]
        fn places_are_those_of_their_ranges(
            ranges in prop::collection::vec((0_u32..40, 0_u32..6), 0..8),
        ) {
            let ranges = ranges.into_iter().map(|(start, blocks)| start..start + blocks);
            let naive: std::collections::BTreeSet<u32> = ranges.clone().flatten().collect();
            let places = Places::of(ranges);
            prop_assert_eq!(places.iter().collect::<Vec<_>>(), naive.iter().copied().collect::<Vec<_>>());
            for place in 0..50 {
                prop_assert_eq!(places.contains(place), naive.contains(&place));
            }
        }

        #[test]
        fn a_page_is_the_least_that_wastes_little(
            slots in prop::collection::vec(1_u64..400, 1..5),
        ) {
            let largest = *slots.iter().max().unwrap();
            let fits = |page: &u64| slots.iter().all(|slot| page % slot * 25 <= *page);
            let naive = (largest..=25 * largest).find(fits).unwrap();
            let found = page_bytes(&slots).unwrap();
            prop_assert!(found == naive, "{found} for {slots:?}, {naive} is enough");
        }
    }

    #[test]
    fn a_resume_needs_what_the_next_token_attends_to() {
        let needs = |kind, border| group(kind).needed(border, 16).iter().collect::<Vec<_>>();
        assert_eq!(needs(GroupKind::Full, 3), [0, 1, 2]);
        assert_eq!(needs(GroupKind::Sliding { window: 17, sinks: 0 }, 9), [8]);
        assert_eq!(needs(GroupKind::Sliding { window: 18, sinks: 0 }, 9), [7, 8]);
        assert_eq!(needs(GroupKind::Sliding { window: 1, sinks: 4 }, 9), [0]);
        assert_eq!(needs(GroupKind::Sliding { window: 1024, sinks: 4 }, 3), [0, 1, 2]);
        assert_eq!(needs(GroupKind::Chunked { chunk: 64 }, 7), [4, 5, 6]);
        assert_eq!(needs(GroupKind::Chunked { chunk: 64 }, 8), []);
        assert_eq!(needs(GroupKind::Chunked { chunk: 24 }, 2), [1]);
        assert_eq!(needs(GroupKind::State, 5), [4]);
        assert_eq!(needs(GroupKind::State, 0), []);
    }

    #[test]
    fn gemma_3_takes_pages_of_five_full_slots() {
        let row = 16 * 2 * 128 * 2;
        let (full, window) = (10 * 512 * row, 52 * 512 * row);
        assert_eq!(page_bytes(&[full, window]).unwrap(), window);
        assert!(page_bytes(&[4, 0]).is_err());
    }
}
