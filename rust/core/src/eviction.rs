//! Victims: the minimum, at any time, over all entries that may leave a tier; of rounded costs, unless
//! `epsilon` is 0.
//!
//! Invariant: exactly the linked entries are held, each once, and [`EvictionIndex::victim`] is the
//! minimum by the policy's order. Within a class the order of leaving does not change with time,
//! so only the heads of the classes compete: in a tournament where the order is by value or by rank,
//! one after the other where it is the policy's own. Costs are rounded down to classes that differ
//! by the factor `1 + epsilon`, so a victim's value is at most that factor above the smallest one;
//! with 0 none are rounded. Bands come before the policy's order: a lower priority leaves first, and
//! before all others a share that holds more than it may, the one that holds the most too much. Cost:
//! link O(1) in order of time, O(log n) otherwise; victim O(log classes) amortised, O(classes of one
//! share) while one holds too much; about 80 bytes per entry, and for one outside the normal band an
//! entry of a hash map.

mod ghosts;
mod list;
mod places;
mod shares;
#[cfg(test)]
mod tests;
mod tournament;

use std::cmp::Ordering;

use rustc_hash::FxHashMap;

use crate::block::BlockId;
use crate::cost::CostModel;
use crate::hint::{Band, Priority, Share};
use crate::paged_vec::PagedVec;
use crate::policy::{Entry, Event, Facts, Key, Needs, Order, Policy, by_value};
use crate::time::Nanos;
use crate::visits;

pub use ghosts::GhostTable;

use list::List;
use places::Places;
use shares::Shares;
use tournament::{Leaf, Tournament};

/// The linked entries of one tier, and its policy.
#[derive(Debug)]
pub struct EvictionIndex {
    policy: Box<dyn Policy>,
    /// Of the policy: asked for every block.
    needs: Needs,
    /// Significant bits of a class number behind its first one.
    bits: u32,
    slots: FxHashMap<(Priority, u64), Leaf>,
    lists: Vec<List>,
    free: Vec<Leaf>,
    places: Places,
    heads: Tournament,
    /// The bands of linked entries that are not in the normal one.
    bands: FxHashMap<BlockId, Band>,
    /// Those with a share once more.
    shares: Shares,
    /// For a policy that watches, by block id: one more than the request for which the block came
    /// to stand here, 0 if it does not.
    since: PagedVec<u64>,
}

impl EvictionIndex {
    /// No entries, under `policy`. Costs are rounded to classes `1 + epsilon` apart.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, epsilon: f64) -> Self {
        Self {
            heads: Tournament::new(policy.order()),
            bits: bits(epsilon),
            needs: policy.needs(),
            policy,
            slots: FxHashMap::default(),
            lists: Vec::new(),
            free: Vec::new(),
            places: Places::new(),
            bands: FxHashMap::default(),
            shares: Shares::new(),
            since: PagedVec::new(0),
        }
    }

    /// The entry of a block with these facts.
    #[must_use]
    pub fn entry(&self, facts: &Facts, tie: u32, cost: &CostModel) -> Entry {
        let entry = self.unrounded(facts, tie, cost);
        match self.policy.order() {
            Order::Value => Entry { class: rounded(entry.class, self.bits), ..entry },
            Order::Rank | Order::Own => entry,
        }
    }

    /// The same before its cost is rounded.
    #[must_use]
    pub fn unrounded(&self, facts: &Facts, tie: u32, cost: &CostModel) -> Entry {
        let (class, place) = (self.policy.class(facts, cost), self.policy.place(facts));
        Entry { class, place, tie, id: facts.id }
    }

    /// Whether the policy has the block as resident.
    #[must_use]
    pub fn holds(&self, id: BlockId) -> bool {
        self.since.get(id).is_some_and(|&since| since > 0)
    }

    /// Feeds a block that became resident to a policy that needs events. Returns the other blocks
    /// whose entries changed; so do the next two.
    pub fn on_resident(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        self.since.put(event.facts.id, event.request + 1);
        self.policy.on_resident(event)
    }

    /// Feeds a hit to it.
    pub fn on_hit(&mut self, event: &Event<'_>) -> Vec<BlockId> {
        let known = self.since.get(event.facts.id).copied().unwrap_or(0);
        // The request that made the block resident counted it already.
        if known == 0 || known > event.request {
            return Vec::new();
        }
        self.policy.on_hit(event)
    }

    /// Feeds a block that left the tier to it.
    pub fn on_evict(&mut self, id: BlockId, tag: u64) -> Vec<BlockId> {
        self.since[id] = 0;
        self.policy.on_evict(id, tag)
    }

    /// Makes `entry` eligible, in a band. Its block must not be linked.
    pub fn link(&mut self, entry: Entry, band: Band) {
        debug_assert!(self.get(entry.id).is_none(), "block {} is linked already", entry.id);
        if band != Band::NORMAL {
            self.bands.insert(entry.id, band);
        }
        if band.share > 0 {
            self.shares.link(entry, band);
        }
        let class = (band.priority, entry.class);
        let slot = match self.slots.get(&class) {
            Some(&slot) => slot,
            None => self.open(class),
        };
        let list = &mut self.lists[slot as usize];
        let before = list.head();
        list.link(&mut self.places, entry, slot);
        if before.is_none_or(|head| entry.key() < head) {
            self.heads.set(slot, Some(&entry), band.priority);
        }
    }

    /// Takes the block's entry out; `None` if it is not linked.
    pub fn unlink(&mut self, id: BlockId) -> Option<Entry> {
        let place = self.places.remove(id)?;
        let (entry, slot) = (place.entry, place.slot);
        let band = self.band(id);
        let list = &mut self.lists[slot as usize];
        let headed = list.head() == Some(entry.key());
        list.unlink(&mut self.places, place);
        if headed {
            let head = list.head().map(|key| key.entry(entry.class));
            self.heads.set(slot, head.as_ref(), band.priority);
            if head.is_none() {
                self.slots.remove(&(band.priority, entry.class));
                self.free.push(slot);
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

    /// A slot for a class that has none.
    fn open(&mut self, class: (Priority, u64)) -> Leaf {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.lists.push(List::default());
            Leaf::try_from(self.lists.len() - 1).expect("fewer classes than blocks")
        });
        self.slots.insert(class, slot);
        slot
    }

    /// Selects a block, of this band, to leave the tier: the next victims are found as if it had left.
    pub fn select(&mut self, id: BlockId, band: Band) {
        self.policy.on_select(id);
        self.shares.select(band.share);
    }

    /// Ends the selection: all selected blocks have left, or stay.
    pub fn end_selection(&mut self) {
        self.policy.end_selection();
        self.shares.end_selection();
    }

    /// So many blocks of a share stand here beyond what it may hold: that many leave first.
    pub fn exceed(&mut self, share: Share, blocks: u64) {
        self.shares.exceed(share, blocks);
    }

    /// The band of a linked entry.
    #[must_use]
    pub fn band(&self, id: BlockId) -> Band {
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
        let slot = self.slots.get(&(band.priority, entry.class));
        let head = slot.and_then(|&slot| self.lists[slot as usize].head());
        head.is_some_and(|head| head.place == entry.place)
    }

    /// Whether `a` is worth less than `b`, both as [`EvictionIndex::unrounded`] has them and their blocks
    /// linked, where the policy ranks by value and neither share nor priority tells them apart.
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
        self.places.get(id).map(|place| place.entry)
    }

    /// Prefetches the CPU cache line in which a block's entry is looked for first.
    pub fn prefetch_line(&self, id: BlockId) {
        self.places.prefetch_line(id);
    }

    /// The entry that leaves first at `now`. It stays linked.
    pub fn victim(&mut self, now: Nanos) -> Option<Entry> {
        if let Some(share) = self.shares.leader() {
            let heads = self.shares.heads(share, &*self.policy, now);
            return heads.min_by(|a, b| self.compare(a, b, now));
        }
        match self.policy.order() {
            Order::Own => self.scan(now),
            Order::Value | Order::Rank => {
                let (slot, class) = self.heads.winner(now)?;
                Some(self.lists[slot as usize].head()?.entry(class))
            }
        }
    }

    /// The same by comparing the heads of all classes: the simple twin of the tournament.
    #[must_use]
    pub fn scan(&self, now: Nanos) -> Option<Entry> {
        let mut leaders = self.shares.leaders().peekable();
        if leaders.peek().is_some() {
            let heads = leaders.flat_map(|share| self.shares.heads(share, &*self.policy, now));
            return heads.min_by(|a, b| self.compare(a, b, now));
        }
        let head = |(&(_, class), &slot): (&(Priority, u64), &Leaf)| {
            visits::note(1);
            let list = &self.lists[slot as usize];
            let key = match self.policy.order() {
                Order::Own => self.policy.head(&mut list.keys(&self.places), now)?,
                Order::Value | Order::Rank => list.head()?,
            };
            Some(key.entry(class))
        };
        self.slots.iter().filter_map(head).min_by(|a, b| self.compare(a, b, now))
    }

    /// How many entries leave before this one at `now`, in O(n).
    #[must_use]
    pub fn rank(&self, id: BlockId, now: Nanos) -> Option<usize> {
        let entry = self.get(id)?;
        Some(self.entries().filter(|other| self.compare(other, &entry, now).is_lt()).count())
    }

    /// How many entries are linked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing is linked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.len() == 0
    }

    /// How many classes there are now.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.slots.len()
    }

    /// All entries, priority by priority and class by class.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let mut classes: Vec<((Priority, u64), Leaf)> =
            self.slots.iter().map(|(&class, &slot)| (class, slot)).collect();
        classes.sort_unstable();
        classes.into_iter().flat_map(|((_, class), slot)| {
            let keys = self.lists[slot as usize].keys(&self.places);
            keys.map(move |key: Key| key.entry(class))
        })
    }

    /// Whether the policy has these needs.
    #[inline]
    #[must_use]
    pub fn needs(&self, needs: Needs) -> bool {
        self.needs.has(needs)
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// All entries in the order in which they would leave if time stood still at `now`: a full
    /// sort, the simple twin of [`EvictionIndex::victim`].
    #[must_use]
    pub fn order(&self, now: Nanos) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.entries().collect();
        entries.sort_unstable_by(|a, b| self.compare(a, b, now));
        entries
    }
}

/// How many bits behind the first one keep the error of rounding down below `epsilon`.
fn bits(epsilon: f64) -> u32 {
    (0..u64::BITS - 1).find(|&bits| 0.5_f64.powi(bits.cast_signed()) <= epsilon).unwrap_or(63)
}

/// A class number rounded down to so many bits behind its first one.
fn rounded(class: u64, bits: u32) -> u64 {
    let low = (u64::BITS - class.leading_zeros()).saturating_sub(1 + bits);
    class >> low << low
}
