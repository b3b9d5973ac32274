//! The entries of tenants with a quota once more, by tenant: those of one that holds too much leave
//! before all others.
//!
//! Invariant: exactly the linked entries with a share are here, and the shares that hold too much and
//! have an entry are in order: who holds the most too much comes first. Cost: O(log n) to link and to
//! unlink, O(log shares) when what a share holds too much changes, whatever the number of shares; the
//! first entry of a share O(its classes); about 130 bytes per entry.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockId;
use crate::hint::{Band, Priority, Share};
use crate::policy::{Entry, Order, Policy};
use crate::time::Nanos;
use crate::visits;

use super::list::List;
use super::places::Places;
use super::tournament::Leaf;

/// By how many blocks a share holds too much.
#[derive(Clone, Copy, Debug, Default)]
struct Over {
    blocks: u64,
    /// How many of them are chosen to leave.
    leaving: u64,
    /// With how many it stands in the order; 0 if it does not.
    stands: u64,
}

/// The entries of all shares.
#[derive(Debug)]
pub(super) struct Shares {
    slots: BTreeMap<(Share, Priority, u64), Leaf>,
    lists: Vec<List>,
    free: Vec<Leaf>,
    places: Places,
    over: BTreeMap<Share, Over>,
    first: BTreeSet<(Reverse<u64>, Share)>,
    /// Shares of which something is chosen to leave.
    leaving: Vec<Share>,
}

impl Shares {
    pub(super) fn new() -> Self {
        Self {
            slots: BTreeMap::new(),
            lists: Vec::new(),
            free: Vec::new(),
            places: Places::new(),
            over: BTreeMap::new(),
            first: BTreeSet::new(),
            leaving: Vec::new(),
        }
    }

    pub(super) fn link(&mut self, entry: Entry, band: Band) {
        let class = (band.share, band.priority, entry.class);
        let slot = *self.slots.entry(class).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.lists.push(List::default());
                Leaf::try_from(self.lists.len() - 1).expect("fewer classes than blocks")
            })
        });
        self.lists[slot as usize].link(&mut self.places, entry, slot);
        self.settle(band.share);
    }

    pub(super) fn unlink(&mut self, id: BlockId, band: Band) {
        let Some(place) = self.places.remove(id) else { return };
        let slot = place.slot;
        self.lists[slot as usize].unlink(&mut self.places, place);
        if self.lists[slot as usize].head().is_none() {
            self.slots.remove(&(band.share, band.priority, place.entry.class));
            self.free.push(slot);
        }
        self.settle(band.share);
    }

    /// So many blocks of a share stand here beyond what it may hold.
    pub(super) fn exceed(&mut self, share: Share, blocks: u64) {
        if blocks > 0 || self.over.contains_key(&share) {
            self.over.entry(share).or_default().blocks = blocks;
            self.settle(share);
        }
        if blocks == 0 {
            self.over.remove(&share);
        }
    }

    /// A block of a share is chosen to leave.
    pub(super) fn select(&mut self, share: Share) {
        let Some(over) = self.over.get_mut(&share) else { return };
        over.leaving += 1;
        self.leaving.push(share);
        self.settle(share);
    }

    /// All who were chosen have left, or stay.
    pub(super) fn end_selection(&mut self) {
        for share in std::mem::take(&mut self.leaving) {
            if let Some(over) = self.over.get_mut(&share) {
                over.leaving = 0;
                self.settle(share);
            }
        }
    }

    /// By how many blocks a share holds too much that are not chosen to leave, and which share; of
    /// those that do not they say nothing. The least one's entries leave first.
    pub(super) fn rank(&self, share: Share) -> (Reverse<u64>, Share) {
        let over = self.over.get(&share).map_or(0, |over| over.blocks.saturating_sub(over.leaving));
        (Reverse(over), if over > 0 { share } else { 0 })
    }

    /// The share that holds the most too much, of those with an entry.
    pub(super) fn leader(&self) -> Option<Share> {
        self.first.first().map(|&(_, share)| share)
    }

    /// All shares that hold too much and have an entry.
    pub(super) fn leaders(&self) -> impl Iterator<Item = Share> + '_ {
        self.first.iter().map(|&(_, share)| share)
    }

    /// The entry that leaves first of each class of a share.
    pub(super) fn heads<'a>(
        &'a self,
        share: Share,
        policy: &'a dyn Policy,
        now: Nanos,
    ) -> impl Iterator<Item = Entry> + 'a {
        self.slots.range(of(share)).filter_map(move |(&(_, _, class), &slot)| {
            visits::note(1);
            let list = &self.lists[slot as usize];
            let key = match policy.order() {
                Order::Own => policy.head(&mut list.keys(&self.places), now)?,
                Order::Value | Order::Rank => list.head()?,
            };
            Some(key.entry(class))
        })
    }

    /// Brings a share's place in the order in line.
    fn settle(&mut self, share: Share) {
        let (Reverse(excess), _) = self.rank(share);
        let Some(over) = self.over.get_mut(&share) else { return };
        let entries = self.slots.range(of(share)).next().is_some();
        let stands = if entries { excess } else { 0 };
        let before = std::mem::replace(&mut over.stands, stands);
        if before != stands {
            self.first.remove(&(Reverse(before), share));
            if stands > 0 {
                self.first.insert((Reverse(stands), share));
            }
        }
    }
}

fn of(share: Share) -> std::ops::RangeInclusive<(Share, Priority, u64)> {
    (share, Priority::MIN, u64::MIN)..=(share, Priority::MAX, u64::MAX)
}
