//! Second index, by tenant, of the entries of tenants with a quota. Tenants over quota are evicted
//! first.
//!
//! Invariant: exactly the linked entries with a share are here, and `ranking` has exactly the
//! shares over their quota with at least one entry, by descending excess. Cost: O(log n) to link
//! and to unlink. O(log shares) when an excess changes, whatever the number of shares. The first
//! entry of a share is O(its classes). 24 to 200 bytes per entry, as in the first index.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockId;
use crate::hint::{Band, Priority, Share};
use crate::policy::{Entry, Order, Policy};
use crate::time::Nanos;
use crate::visits;

use super::add_list;
use super::entries::Entries;
use super::list::List;
use super::tournament::Leaf;

/// Excess of a share: its blocks over quota.
#[derive(Clone, Copy, Debug, Default)]
struct Excess {
    blocks: u64,
    /// Selected blocks of the share.
    selected: u64,
    /// The excess in `ranking`, or 0 if the share is not there.
    ranked: u64,
}

/// The entries of all shares.
#[derive(Debug)]
pub(super) struct Shares {
    /// Index of each class's list.
    leaves: BTreeMap<(Share, Priority, u64), Leaf>,
    lists: Vec<List>,
    free: Vec<Leaf>,
    entries: Entries,
    excesses: BTreeMap<Share, Excess>,
    ranking: BTreeSet<(Reverse<u64>, Share)>,
    /// The share of each selected block.
    selected: Vec<Share>,
}

impl Shares {
    pub(super) fn new() -> Self {
        Self {
            leaves: BTreeMap::new(),
            lists: Vec::new(),
            free: Vec::new(),
            entries: Entries::new(),
            excesses: BTreeMap::new(),
            ranking: BTreeSet::new(),
            selected: Vec::new(),
        }
    }

    pub(super) fn link(&mut self, entry: Entry, band: Band) {
        let class = (band.share, band.priority, entry.class);
        let Self { leaves, lists, free, .. } = self;
        let leaf = *leaves.entry(class).or_insert_with(|| add_list(lists, free, entry.class));
        self.lists[leaf as usize].link(&mut self.entries, entry.key(), leaf);
        self.rerank(band.share);
    }

    pub(super) fn unlink(&mut self, id: BlockId, band: Band) {
        let Some(link) = self.entries.remove(id) else { return };
        let leaf = link.leaf;
        let list = &mut self.lists[leaf as usize];
        list.unlink(&mut self.entries, link.key(id), link);
        if list.head().is_none() {
            self.leaves.remove(&(band.share, band.priority, list.class));
            self.free.push(leaf);
        }
        self.rerank(band.share);
    }

    /// Sets the number of a share's blocks over quota.
    pub(super) fn exceed(&mut self, share: Share, blocks: u64) {
        // Shares within their quota have no row.
        if blocks > 0 || self.excesses.contains_key(&share) {
            self.excesses.entry(share).or_default().blocks = blocks;
            self.rerank(share);
        }
        if blocks == 0 {
            self.excesses.remove(&share);
        }
    }

    /// Selects a block of a share as victim. It no longer counts as excess.
    pub(super) fn select(&mut self, share: Share) {
        // A share within its quota is not in the ranking.
        let Some(excess) = self.excesses.get_mut(&share) else { return };
        excess.selected += 1;
        self.selected.push(share);
        self.rerank(share);
    }

    /// Ends the selection. Each selected block has left or stays.
    pub(super) fn end_selection(&mut self) {
        for share in std::mem::take(&mut self.selected) {
            if let Some(excess) = self.excesses.get_mut(&share) {
                excess.selected = 0;
                self.rerank(share);
            }
        }
    }

    /// Rank of a share. The lowest rank leaves first: descending excess without selected blocks,
    /// then share. All shares within their quota have the same rank.
    pub(super) fn rank(&self, share: Share) -> (Reverse<u64>, Share) {
        let known = self.excesses.get(&share);
        let excess = known.map_or(0, |excess| excess.blocks.saturating_sub(excess.selected));
        (Reverse(excess), if excess > 0 { share } else { 0 })
    }

    /// The share with the largest excess, among shares with an entry.
    pub(super) fn largest_excess(&self) -> Option<Share> {
        self.ranking.first().map(|&(_, share)| share)
    }

    /// All shares over their quota with an entry.
    pub(super) fn over_quota(&self) -> impl Iterator<Item = Share> + '_ {
        self.ranking.iter().map(|&(_, share)| share)
    }

    /// The first entry to leave of each class of a share.
    pub(super) fn heads<'a>(
        &'a self,
        share: Share,
        policy: &'a dyn Policy,
        now: Nanos,
    ) -> impl Iterator<Item = Entry> + 'a {
        self.leaves.range(of(share)).filter_map(move |(&(_, _, class), &leaf)| {
            visits::note(1);
            let list = &self.lists[leaf as usize];
            let key = match policy.order() {
                Order::Own => policy.head(&mut list.keys(&self.entries), now)?,
                Order::Ends => super::end(list, policy, now)?,
                Order::Value | Order::Rank => list.head()?,
            };
            Some(key.entry(class))
        })
    }

    /// Updates a share's place in the ranking.
    fn rerank(&mut self, share: Share) {
        let (Reverse(blocks), _) = self.rank(share);
        let Some(excess) = self.excesses.get_mut(&share) else { return };
        let has_entries = self.leaves.range(of(share)).next().is_some();
        // A share without entries has no victims, and must not hide the next share.
        let ranked = if has_entries { blocks } else { 0 };
        let before = std::mem::replace(&mut excess.ranked, ranked);
        if before != ranked {
            self.ranking.remove(&(Reverse(before), share));
            if ranked > 0 {
                self.ranking.insert((Reverse(ranked), share));
            }
        }
    }
}

/// All classes of a share.
fn of(share: Share) -> std::ops::RangeInclusive<(Share, Priority, u64)> {
    (share, Priority::MIN, u64::MIN)..=(share, Priority::MAX, u64::MAX)
}
