//! Eviction index of one tier: the minimum, at any time, over all entries that may leave it.
//!
//! Entries of one class keep their order while time passes, so each class is an ordered list and only
//! the lists' heads compete: in a kinetic tournament where the policy orders by value or by rank, one
//! after the other where the order is its own.
//!
//! ```text
//! victim <- tournament over classes <- heads of lists <- entries, by block id
//! ```
//!
//! Costs are rounded down to classes that differ by the factor `1 + epsilon`, so a victim's value is at
//! most that factor above the smallest one; with 0 none are rounded. Bands precede the policy's order:
//! first shares that exceed their quota, the one with the largest excess first, then lower priorities.
//! Invariant: exactly the linked entries are held, each once, and [`EvictionIndex::victim`] is the
//! minimum by that order. Cost: link O(1) in order of time, O(log n) otherwise; victim O(log classes)
//! amortised, O(classes of one share) while one exceeds its quota; 24 bytes per entry where all
//! neighbours have one, about 200 where none has, and for one outside the normal band an entry of a
//! hash map.

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

/// Priority queue of the linked entries of one tier under its policy.
#[derive(Debug)]
pub struct EvictionIndex {
    policy: Box<dyn Policy>,
    /// Of the policy: asked for every block.
    needs: Needs,
    order: Order,
    /// Significant bits of a class number after its highest one.
    bits: u32,
    /// Index of each class's list, which is its leaf of the tournament too.
    leaves: FxHashMap<(Priority, u64), Leaf>,
    lists: Vec<List>,
    free: Vec<Leaf>,
    entries: Entries,
    heads: Tournament,
    /// Used if the policy compares both ends of each class.
    ends: Ends,
    /// Bands of linked entries outside the normal one.
    bands: FxHashMap<BlockId, Band>,
    /// A second index of the entries that have a share.
    shares: Shares,
    /// For a policy that needs arrivals, by block id: one more than the number of the request by which
    /// the block became resident, 0 if it is not.
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
            // Rounding merges classes of nearly equal cost; ranks are exact.
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

    /// Number of the request by which a block became resident, if the policy needs that and the block
    /// is resident.
    #[must_use]
    pub fn arrival(&self, id: BlockId) -> Option<u64> {
        self.arrivals.get(id)?.checked_sub(1)
    }

    /// Records that a block became resident by the `request`th request, or is no longer.
    pub fn set_arrival(&mut self, id: BlockId, request: Option<u64>) {
        self.arrivals.put(id, request.map_or(0, |request| request + 1));
    }

    /// Learned uses per request, from now on, of a block with this last use; `None` if the policy does
    /// not learn.
    #[must_use]
    pub fn reuse_rate(&self, last_use: &LastUse) -> Option<f64> {
        let (class, place) = self.policy.of_use(&LastUse { weight: 1.0, ..*last_use })?;
        Some(self.policy.worth(&Entry { class, place, tie: 0, id: BlockId::MAX }).0)
    }

    /// A request has begun, the `request`th one.
    pub fn on_request(&mut self, request: u64, learned: Option<&Arc<Reuse>>) {
        self.policy.on_request(request, learned);
        self.ends.begin_request(request, learned.is_some());
    }

    /// Whether the block before one that was just chosen leaves next, without a look at any other.
    /// Neither is linked; both have this band.
    #[must_use]
    pub fn follows(&self, before: &Entry, chosen: &Entry, band: Band) -> bool {
        if !self.policy.follows(before, chosen) {
            return false;
        }
        let leaf = self.leaves.get(&(band.priority, before.class));
        let ends = leaf.and_then(|&leaf| self.lists[leaf as usize].ends());
        // Linked, it must be an end of its class's list, or it would not be looked at.
        ends.is_none_or(|(first, last)| before.key() < first || before.key() > last)
            && !self.ties(before, band)
    }

    /// The entry of a block without a price, if it follows from its last use alone.
    #[must_use]
    pub fn of_use(&self, id: BlockId, tie: u32, last_use: &LastUse) -> Option<Entry> {
        let (class, place) = self.policy.of_use(last_use)?;
        Some(Entry { class, place, tie, id })
    }

    /// Whether the `blocks` blocks before the chosen one are evicted next that have the same last use as
    /// it, and weigh no more the farther they are before it; then the entry of the farthest one, whose
    /// last use is `lightest`. No block may have a band.
    #[must_use]
    pub fn following(&self, chosen: &Entry, blocks: u32, lightest: &LastUse) -> Option<Entry> {
        // Ties of a path ascend towards its start.
        let entry = self.of_use(chosen.id - blocks, chosen.tie + blocks, lightest)?;
        let place = entry.place;
        let leaf = self.leaves.get(&(Band::NORMAL.priority, chosen.class));
        let ends = leaf.and_then(|&leaf| self.lists[leaf as usize].ends());
        // All of them must be ends of their class's list when they are linked. Of equal places the
        // ties decide, which are not looked at here.
        let ends = ends.is_none_or(|(a, b)| chosen.place < a.place || place > b.place);
        (ends && self.policy.follows(&entry, chosen)).then_some(entry)
    }

    /// Whether an entry that is not linked would be the victim if it were, if the policy compares
    /// the ends of classes and no entry has a band; `None` otherwise.
    pub fn leads(&mut self, entry: &Entry, band: Band, now: Nanos) -> Option<bool> {
        if self.order != Order::Ends || !self.bands.is_empty() || band != Band::NORMAL {
            return None;
        }
        let leaf = self.leaves.get(&(band.priority, entry.class)).copied();
        Some(self.ends.leads(&self.lists, leaf, entry, &*self.policy, now))
    }

    /// Links an entry, in a band: it may leave. Its block must not be linked.
    pub fn link(&mut self, entry: Entry, band: Band) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        // Few entries have a hint or a quota: other entries have no row.
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
        // The tournament is played over heads alone, where there is one.
        if self.plays() && head.is_none_or(|head| entry.key() < head) {
            self.heads.set(leaf, Some(&entry), band.priority);
        }
    }

    /// Unlinks the block's entry and returns it; `None` if it is not linked.
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
        // The next head plays for the class; without one its leaf is free for another class.
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

    /// Adds an empty list for a class that has none.
    fn add_class(&mut self, class: (Priority, u64)) -> Leaf {
        let leaf = add_list(&mut self.lists, &mut self.free, class.1);
        self.leaves.insert(class, leaf);
        self.ends.add(leaf);
        leaf
    }

    /// Selects a block of this band to leave the tier: the next victims are found as if it had left.
    pub fn select(&mut self, band: Band) {
        self.shares.select(band.share);
    }

    /// Ends the selection: all selected blocks have left, or stay.
    pub fn end_selection(&mut self) {
        self.shares.end_selection();
    }

    /// Sets the number of a share's blocks beyond its quota: that many leave first.
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

    /// Whether an entry that is not linked would leave before a linked one.
    #[must_use]
    pub fn precedes(&self, entry: &Entry, band: Band, linked: &Entry, now: Nanos) -> bool {
        self.before(entry, band, linked, self.band(linked.id), now).is_lt()
    }

    /// Whether a linked entry of this band has the class and the place of one that is not linked and
    /// would be the first of its class.
    #[must_use]
    pub fn ties(&self, entry: &Entry, band: Band) -> bool {
        let leaf = self.leaves.get(&(band.priority, entry.class));
        let head = leaf.and_then(|&leaf| self.lists[leaf as usize].head());
        head.is_some_and(|head| head.place == entry.place)
    }

    /// Whether `a` is worth less than `b`, both as [`EvictionIndex::unrounded`] has them and their blocks
    /// linked, if the policy ranks by value and both have the same share and priority.
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

    /// Prefetches the CPU cache line in which a block's entry is looked for first.
    pub fn prefetch_line(&self, id: BlockId) {
        self.entries.prefetch_line(id);
    }

    /// The entry that leaves first at `now`. It stays linked.
    pub fn victim(&mut self, now: Nanos) -> Option<Entry> {
        // A share over its quota precedes all other entries, whatever their value.
        if let Some(share) = self.shares.largest_excess() {
            let heads = self.shares.heads(share, &*self.policy, now);
            return heads.min_by(|a, b| self.compare(a, b, now));
        }
        match self.policy.order() {
            // No formula gives the time at which two heads change places.
            Order::Own => self.scan(now),
            // Its values do not change within a request, and there are few lists.
            Order::Ends => self.least_end(now),
            Order::Value | Order::Rank => {
                let (leaf, class) = self.heads.winner(now)?;
                Some(self.lists[leaf as usize].head()?.entry(class))
            }
        }
    }

    /// The end of a list that leaves first.
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

    /// Number of entries that leave before this one at `now`, in O(n). `changed` has the bands at
    /// that time of the blocks whose band is another one by then.
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

    /// Number of classes that have an entry.
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

    /// All entries in the order in which they would leave at `now`: a full sort, the reference of
    /// [`EvictionIndex::victim`].
    #[must_use]
    pub fn order(&self, now: Nanos) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.entries().collect();
        entries.sort_unstable_by(|a, b| self.compare(a, b, now));
        entries
    }
}

/// First or last entry of a list, the one that leaves first under [`Order::Ends`].
fn end(list: &List, policy: &dyn Policy, now: Nanos) -> Option<Key> {
    let (oldest, youngest) = list.ends()?;
    let (a, b) = (oldest.entry(list.class), youngest.entry(list.class));
    Some(if oldest != youngest && policy.compare(&b, &a, now).is_lt() { youngest } else { oldest })
}

/// An empty list for a class: a free one, or one more.
fn add_list(lists: &mut Vec<List>, free: &mut Vec<Leaf>, class: u64) -> Leaf {
    if let Some(leaf) = free.pop() {
        lists[leaf as usize] = List::new(class);
        return leaf;
    }
    lists.push(List::new(class));
    Leaf::try_from(lists.len() - 1).expect("fewer classes than blocks")
}

/// Number of bits after the highest one that keep the error of rounding down below `epsilon`.
fn bits(epsilon: f64) -> u32 {
    (0..u64::BITS - 1).find(|&bits| 0.5_f64.powi(bits.cast_signed()) <= epsilon).unwrap_or(63)
}

/// A class number rounded down to `bits` bits after its highest one.
fn rounded(class: u64, bits: u32) -> u64 {
    let low = (u64::BITS - class.leading_zeros()).saturating_sub(1 + bits);
    class >> low << low
}
