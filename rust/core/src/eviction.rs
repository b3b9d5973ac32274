//! Eviction index of a tier: the minimum, at any time, over all evictable entries.
//!
//! Entries of a class keep their order while time passes. Each class is therefore an ordered list,
//! and only the heads of the lists compete: in a kinetic tournament if the policy orders by value
//! or rank, in a scan if the policy has its own order.
//!
//! ```text
//! victim <- tournament over classes <- heads of lists <- entries, by block id
//! ```
//!
//! Costs are rounded down to classes a factor of `1 + epsilon` apart, so the value of a victim is
//! at most this factor above the minimum. With `epsilon` 0 nothing is rounded. Bands precede the
//! policy's order: first shares over their quota, by descending excess, then lower priorities.
//! Invariant: every linked entry is held exactly once, and [`EvictionIndex::victim`] is the minimum
//! in this order. Cost: link O(1) in order of time, otherwise O(log n). Victim O(log classes)
//! amortised, or O(classes of a share) while a share exceeds its quota. 24 bytes per entry if all
//! neighbours have an entry, about 200 if none has, plus a hash map entry outside the normal band.

mod ends;
mod entries;
mod ghosts;
mod link;
mod list;
mod shares;
#[cfg(test)]
mod tests;
mod tournament;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::block::BlockId;
use crate::cost::CostModel;
use crate::hint::{Band, Priority, Share};
use crate::paged_vec::PagedVec;
use crate::policy::{Entry, Facts, Key, LastUse, Needs, Order, Policy, Reuse, by_value};
use crate::time::Nanos;
use crate::visits;

pub(crate) use ghosts::GhostTable;

use ends::Ends;
use entries::Entries;
use list::List;
use shares::Shares;
use tournament::{Leaf, Tournament};

/// Priority queue of the linked entries of a tier under its policy.
#[derive(Debug)]
pub struct EvictionIndex {
    policy: Box<dyn Policy>,
    /// Needs of the policy, cached because they are read for every block.
    needs: Needs,
    order: Order,
    /// Significant bits of a class number after its highest set bit.
    bits: u32,
    /// Index of each class's list, also its leaf in the tournament.
    leaves: FxHashMap<(Priority, u64), Leaf>,
    lists: Vec<List>,
    free: Vec<Leaf>,
    entries: Entries,
    heads: Tournament,
    /// Used if the policy compares both ends of each class.
    ends: Ends,
    /// Bands of linked entries outside the normal band.
    bands: FxHashMap<BlockId, Band>,
    /// Second index of the entries with a share.
    shares: Shares,
    /// By block id: number of the request that made the block resident, plus 1. 0 if it is not
    /// resident. Empty unless the policy needs arrivals.
    arrivals: PagedVec<u64>,
}

impl EvictionIndex {
    /// An empty index under `policy`. Costs are rounded to classes `1 + epsilon` apart.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, epsilon: f64) -> Self {
        Self {
            heads: Tournament::new(policy.order()),
            ends: Ends::default(),
            bits: bits(epsilon),
            needs: policy.needs(),
            order: policy.order(),
            policy,
            leaves: FxHashMap::default(),
            lists: Vec::new(),
            free: Vec::new(),
            entries: Entries::new(),
            bands: FxHashMap::default(),
            shares: Shares::new(),
            arrivals: PagedVec::new(0),
        }
    }

    /// The entry of a block with these facts.
    #[must_use]
    pub fn entry(&self, facts: &Facts, tie: u32, cost: &CostModel) -> Entry {
        let entry = self.unrounded(facts, tie, cost);
        match self.policy.order() {
            // Rounding merges classes of nearly equal cost. Ranks are exact.
            Order::Value => Entry { class: rounded(entry.class, self.bits), ..entry },
            Order::Rank | Order::Own | Order::Ends => entry,
        }
    }

    /// [`EvictionIndex::entry`] before its cost is rounded.
    #[must_use]
    pub fn unrounded(&self, facts: &Facts, tie: u32, cost: &CostModel) -> Entry {
        let (class, place) = (self.policy.class(facts, cost), self.policy.place(facts));
        Entry { class, place, tie, id: facts.id }
    }

    /// Number of the request that made a block resident, if the policy needs arrivals and the block
    /// is resident.
    #[must_use]
    pub fn arrival(&self, id: BlockId) -> Option<u64> {
        self.arrivals.get(id)?.checked_sub(1)
    }

    /// Records the request that made a block resident, or `None` when it no longer is.
    pub fn set_arrival(&mut self, id: BlockId, request: Option<u64>) {
        self.arrivals.put(id, request.map_or(0, |request| request + 1));
    }

    /// Learned rate of future uses per request of a block with this last use. `None` if the policy
    /// does not learn.
    #[must_use]
    pub fn reuse_rate(&self, last_use: &LastUse) -> Option<f64> {
        let (class, place) = self.policy.of_use(&LastUse { weight: 1.0, ..*last_use })?;
        Some(self.policy.worth(&Entry { class, place, tie: 0, id: BlockId::MAX }).0)
    }

    /// Notifies the policy of the start of the `request`th request.
    pub fn on_request(&mut self, request: u64, learned: Option<&Arc<Reuse>>) {
        self.policy.on_request(request, learned);
        self.ends.begin_request(request, learned.is_some());
    }

    /// Whether `before`, the block before the victim `chosen`, is the next victim.
    ///
    /// Compares no further blocks. Neither entry is linked, and both have this band.
    #[must_use]
    pub fn follows(&self, before: &Entry, chosen: &Entry, band: Band) -> bool {
        if !self.policy.follows(before, chosen) {
            return false;
        }
        let leaf = self.leaves.get(&(band.priority, before.class));
        let ends = leaf.and_then(|&leaf| self.lists[leaf as usize].ends());
        // When linked, it must be an end of its class's list, because only ends are compared.
        ends.is_none_or(|(first, last)| before.key() < first || before.key() > last)
            && !self.ties(before, band)
    }

    /// The entry of a block without a price, if its last use determines it.
    #[must_use]
    pub fn of_use(&self, id: BlockId, tie: u32, last_use: &LastUse) -> Option<Entry> {
        let (class, place) = self.policy.of_use(last_use)?;
        Some(Entry { class, place, tie, id })
    }

    /// Entry of the farthest of the `blocks` blocks before `chosen`, if all of them are evicted
    /// next.
    ///
    /// The blocks must have the last use of `chosen`, weights not increasing with distance, and no
    /// band. `lightest` is the last use of the farthest block.
    #[must_use]
    pub fn following(&self, chosen: &Entry, blocks: u32, lightest: &LastUse) -> Option<Entry> {
        // Ties of a path ascend towards its start.
        let entry = self.of_use(chosen.id - blocks, chosen.tie + blocks, lightest)?;
        let place = entry.place;
        let leaf = self.leaves.get(&(Band::NORMAL.priority, chosen.class));
        let ends = leaf.and_then(|&leaf| self.lists[leaf as usize].ends());
        // When linked, each must be an end of its class's list. Equal places are excluded: ties
        // would decide, and ties are not compared here.
        let ends = ends.is_none_or(|(a, b)| chosen.place < a.place || place > b.place);
        (ends && self.policy.follows(&entry, chosen)).then_some(entry)
    }

    /// Whether an unlinked entry would be the victim if it were linked.
    ///
    /// `None` unless the policy compares the ends of classes and no entry has a band.
    pub fn leads(&mut self, entry: &Entry, band: Band, now: Nanos) -> Option<bool> {
        if self.order != Order::Ends || !self.bands.is_empty() || band != Band::NORMAL {
            return None;
        }
        let leaf = self.leaves.get(&(band.priority, entry.class)).copied();
        Some(self.ends.leads(&self.lists, leaf, entry, &*self.policy, now))
    }

    /// Links an entry in a band, which makes it evictable. Its block must not be linked.
    pub fn link(&mut self, entry: Entry, band: Band) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        // Few entries have a hint or a quota, so the normal band has no rows.
        if band != Band::NORMAL {
            self.bands.insert(entry.id, band);
        }
        if band.share > 0 {
            self.shares.link(entry, band);
        }
        let class = (band.priority, entry.class);
        let leaf = match self.leaves.get(&class) {
            Some(&leaf) => leaf,
            None => self.add_class(class),
        };
        let list = &mut self.lists[leaf as usize];
        let head = list.head();
        list.link(&mut self.entries, entry.key(), leaf);
        if self.order == Order::Ends {
            self.ends.link(leaf, entry.key());
        }
        // Only heads play in the tournament.
        if self.plays() && head.is_none_or(|head| entry.key() < head) {
            self.heads.set(leaf, Some(&entry), band.priority);
        }
    }

    /// Unlinks the block's entry and returns it, or `None` if it is not linked.
    pub fn unlink(&mut self, id: BlockId) -> Option<Entry> {
        let link = self.entries.remove(id)?;
        let (key, leaf) = (link.key(id), link.leaf);
        let band = self.band(id);
        let list = &mut self.lists[leaf as usize];
        let entry = key.entry(list.class);
        let was_head = list.head() == Some(key);
        if self.order == Order::Ends {
            self.ends.unlink(leaf, key);
        }
        list.unlink(&mut self.entries, key, link);
        // The next head plays for the class. An empty class frees its leaf.
        if was_head {
            let head = list.head().map(|key| key.entry(entry.class));
            if self.plays() {
                self.heads.set(leaf, head.as_ref(), band.priority);
            }
            if head.is_none() {
                self.leaves.remove(&(band.priority, entry.class));
                self.free.push(leaf);
            }
        }
        if band != Band::NORMAL {
            self.bands.remove(&id);
        }
        if band.share > 0 {
            self.shares.unlink(id, band);
        }
        Some(entry)
    }

    /// Whether the lists' heads compete in the tournament.
    fn plays(&self) -> bool {
        matches!(self.order, Order::Value | Order::Rank)
    }

    /// Adds an empty list for a new class.
    fn add_class(&mut self, class: (Priority, u64)) -> Leaf {
        let leaf = add_list(&mut self.lists, &mut self.free, class.1);
        self.leaves.insert(class, leaf);
        self.ends.add(leaf);
        leaf
    }

    /// Selects a block of this band as victim. The next victims are found as if it had left.
    pub fn select(&mut self, band: Band) {
        self.shares.select(band.share);
    }

    /// Ends the selection. Each selected block has left or stays.
    pub fn end_selection(&mut self) {
        self.shares.end_selection();
    }

    /// Sets the number of blocks of a share over its quota. This number of blocks leaves first.
    pub fn exceed(&mut self, share: Share, blocks: u64) {
        self.shares.exceed(share, blocks);
    }

    /// The band of a linked entry.
    #[must_use]
    pub fn band(&self, id: BlockId) -> Band {
        // The usual case saves a hash.
        if self.bands.is_empty() {
            return Band::NORMAL;
        }
        self.bands.get(&id).copied().unwrap_or(Band::NORMAL)
    }

    /// Whether an unlinked entry would leave before a linked entry.
    #[must_use]
    pub fn precedes(&self, entry: &Entry, band: Band, linked: &Entry, now: Nanos) -> bool {
        self.before(entry, band, linked, self.band(linked.id), now).is_lt()
    }

    /// Whether the first linked entry of the same class and band has the place of `entry`.
    ///
    /// `entry` is not linked and would be the first of its class.
    #[must_use]
    pub fn ties(&self, entry: &Entry, band: Band) -> bool {
        let leaf = self.leaves.get(&(band.priority, entry.class));
        let head = leaf.and_then(|&leaf| self.lists[leaf as usize].head());
        head.is_some_and(|head| head.place == entry.place)
    }

    /// Whether `a` is worth less than `b`. False unless the policy ranks by value and both have the
    /// same share and priority.
    ///
    /// Both are [`EvictionIndex::unrounded`] entries of linked blocks.
    #[must_use]
    pub fn worth_less(&self, a: &Entry, b: &Entry, now: Nanos) -> bool {
        let first = |entry: &Entry| {
            let band = self.band(entry.id);
            (self.shares.rank(band.share), band.priority)
        };
        self.policy.order() == Order::Value && first(a) == first(b) && by_value(a, b, now).is_lt()
    }

    /// `Less` if `a` leaves before `b`: by share, by priority, by the policy.
    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        // Without hints no entry has a band: no look-up per comparison.
        if self.bands.is_empty() {
            return self.policy.compare(a, b, now);
        }
        self.before(a, self.band(a.id), b, self.band(b.id), now)
    }

    fn before(&self, a: &Entry, left: Band, b: &Entry, right: Band, now: Nanos) -> Ordering {
        let first = |band: Band| (self.shares.rank(band.share), band.priority);
        first(left).cmp(&first(right)).then_with(|| self.policy.compare(a, b, now))
    }

    /// The block's entry, if it is linked.
    #[must_use]
    pub fn get(&self, id: BlockId) -> Option<Entry> {
        let link = self.entries.get(id)?;
        Some(link.key(id).entry(self.lists[link.leaf as usize].class))
    }

    /// Prefetches the first CPU cache line of a block's entry look-up.
    pub fn prefetch_line(&self, id: BlockId) {
        self.entries.prefetch_line(id);
    }

    /// The first entry to leave at `now`. It stays linked.
    pub fn victim(&mut self, now: Nanos) -> Option<Entry> {
        // A share over its quota leaves first, whatever the values.
        if let Some(share) = self.shares.largest_excess() {
            let heads = self.shares.heads(share, &*self.policy, now);
            return heads.min_by(|a, b| self.compare(a, b, now));
        }
        match self.policy.order() {
            // No formula predicts when a head overtakes the next.
            Order::Own => self.scan(now),
            // Its values do not change within a request, and there are few lists.
            Order::Ends => self.least_end(now),
            Order::Value | Order::Rank => {
                let (leaf, class) = self.heads.winner(now)?;
                Some(self.lists[leaf as usize].head()?.entry(class))
            }
        }
    }

    /// The first list end to leave.
    fn least_end(&mut self, now: Nanos) -> Option<Entry> {
        if self.bands.is_empty() {
            return self.ends.victim(&self.lists, &*self.policy, now);
        }
        // No share is over its quota, so the priority decides before the policy.
        let lowest = self.leaves.keys().map(|&(priority, _)| priority).min()?;
        let lists = self.leaves.iter().filter(|((priority, _), _)| *priority == lowest);
        let heads = lists.filter_map(|(&(_, class), &leaf)| {
            Some(end(&self.lists[leaf as usize], &*self.policy, now)?.entry(class))
        });
        heads.min_by(|a, b| self.policy.compare(a, b, now))
    }

    /// [`EvictionIndex::victim`] by a scan of the heads of all classes: the tournament's reference.
    #[must_use]
    pub fn scan(&self, now: Nanos) -> Option<Entry> {
        let mut over = self.shares.over_quota().peekable();
        if over.peek().is_some() {
            let heads = over.flat_map(|share| self.shares.heads(share, &*self.policy, now));
            return heads.min_by(|a, b| self.compare(a, b, now));
        }
        let head = |(&(_, class), &leaf): (&(Priority, u64), &Leaf)| {
            visits::note(1);
            let list = &self.lists[leaf as usize];
            let key = match self.policy.order() {
                Order::Own => self.policy.head(&mut list.keys(&self.entries), now)?,
                Order::Ends => end(list, &*self.policy, now)?,
                Order::Value | Order::Rank => list.head()?,
            };
            Some(key.entry(class))
        };
        self.leaves.iter().filter_map(head).min_by(|a, b| self.compare(a, b, now))
    }

    /// Number of entries leaving before this block at `now`. Cost: O(n).
    ///
    /// `changed` has the bands at `now` of blocks with a different band by then.
    #[must_use]
    pub fn rank(
        &self,
        id: BlockId,
        now: Nanos,
        changed: &BTreeMap<BlockId, Band>,
    ) -> Option<usize> {
        let entry = self.get(id)?;
        let band = |id: BlockId| changed.get(&id).copied().unwrap_or_else(|| self.band(id));
        let mine = band(id);
        let first = |other: &Entry| self.before(other, band(other.id), &entry, mine, now).is_lt();
        Some(self.entries().filter(first).count())
    }

    /// Number of linked entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is linked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.len() == 0
    }

    /// Number of non-empty classes.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.leaves.len()
    }

    /// All entries, priority by priority and class by class.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut classes: Vec<((Priority, u64), Leaf)> =
            self.leaves.iter().map(|(&class, &leaf)| (class, leaf)).collect();
        classes.sort_unstable();
        classes.into_iter().flat_map(|((_, class), leaf)| {
            let keys = self.lists[leaf as usize].keys(&self.entries);
            keys.map(move |key: Key| key.entry(class))
        })
    }

    /// Whether the policy has these needs.
    #[inline]
    #[must_use]
    pub fn needs(&self, needs: Needs) -> bool {
        self.needs.has(needs)
    }

    /// The policy's kind of order.
    #[must_use]
    pub fn order_kind(&self) -> Order {
        self.order
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// All entries in eviction order at `now`, by a full sort. Reference for
    /// [`EvictionIndex::victim`].
    #[must_use]
    pub fn order(&self, now: Nanos) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.entries().collect();
        entries.sort_unstable_by(|a, b| self.compare(a, b, now));
        entries
    }
}

/// First or last entry of a list, whichever leaves first under [`Order::Ends`].
fn end(list: &List, policy: &dyn Policy, now: Nanos) -> Option<Key> {
    let (oldest, youngest) = list.ends()?;
    let (a, b) = (oldest.entry(list.class), youngest.entry(list.class));
    Some(if oldest != youngest && policy.compare(&b, &a, now).is_lt() { youngest } else { oldest })
}

/// Adds an empty list for a class, reusing a free list if possible.
fn add_list(lists: &mut Vec<List>, free: &mut Vec<Leaf>, class: u64) -> Leaf {
    if let Some(leaf) = free.pop() {
        lists[leaf as usize] = List::new(class);
        return leaf;
    }
    lists.push(List::new(class));
    Leaf::try_from(lists.len() - 1).expect("fewer classes than blocks")
}

/// Number of bits to keep after the highest bit for a rounding error of at most `epsilon`.
fn bits(epsilon: f64) -> u32 {
    (0..u64::BITS - 1).find(|&bits| 0.5_f64.powi(bits.cast_signed()) <= epsilon).unwrap_or(63)
}

/// Class number rounded down to `bits` bits after its highest set bit.
fn rounded(class: u64, bits: u32) -> u64 {
    let low = (u64::BITS - class.leading_zeros()).saturating_sub(1 + bits);
    class >> low << low
}
