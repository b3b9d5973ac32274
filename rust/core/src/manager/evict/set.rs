//! Eviction sets: plans of victims that make room, completed before any change.
//!
//! A set takes victims in exact order of value, tier by tier down the cascade, on a view of the
//! future residencies. Above a shared tier clean victims come first (`clean_first.rs`). Planning
//! only unlinks entries of the eviction indexes and shifts resume points, and `abandon` restores
//! them, so a set without enough room leaves no trace. Invariant: `spare` and `shared` count the
//! slots left free or draining after the set is carried out. Cost: O(log n) per victim, plus the
//! scan over class heads. Decision for each victim:
//!
//! ```text
//! lowest entry -> resume point? --yes--> copied one tier down, or dropped (points.rs)
//!                       | no
//!                       v
//!              tail of an idle leaf-only run? --yes--> all its last blocks at once (tail.rs)
//!                       | no
//!                       v
//!        resident elsewhere? --yes--> Clean
//!                       | no
//!                       v
//!   room on the next tier (recursive), not a shared one? --yes--> Demote --no--> Drop
//! ```

mod clean_first;
mod decide;
mod pages;
mod points;
mod tail;
mod transit;

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, Layers, LeaseId, TierId};
use crate::policy::Entry;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::trie::RunId;
use crate::visits;

use crate::manager::Manager;
use crate::manager::kinds::Cause;
use pages::{PageView, Planned};
use points::PointVictim;

/// Maximum number of victims of a set with memory kept for reuse.
const MANY: usize = 1024;

/// Fate of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// A second copy is resident, or the copy is bad: its slots are free at once.
    Clean,
    /// This range must be written back to the next tier first.
    Demote(Layers),
    /// The last copy, to be dropped.
    Drop,
    /// The resume point with this number in the set. Its block stays.
    Point(u32),
}

/// Victim: a range of layers of a block on a tier, or all layers of a run's consecutive blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) tier: TierId,
    /// The block, or the last of several blocks.
    pub(crate) block: BlockId,
    pub(crate) blocks: u32,
    pub(crate) layers: Layers,
    pub(crate) fate: Fate,
    /// Whether the blocks are the tail of a leaf-only run, fully resident and idle: only their
    /// slots and nodes change.
    pub(crate) idle: bool,
}

impl Victim {
    fn one(tier: TierId, block: BlockId, layers: Layers, fate: Fate) -> Self {
        Self { tier, block, blocks: 1, layers, fate, idle: false }
    }

    /// The range of its blocks.
    pub(crate) fn run(&self) -> Range<BlockId> {
        self.block + 1 - self.blocks..self.block + 1
    }
}

/// Room needed on a tier.
#[derive(Clone, Copy)]
enum Goal<'a> {
    /// Number of slots of the first group that can be taken.
    Slots(u64),
    /// Pages for these numbers of slots of each group, in addition to slots already taken by the
    /// set.
    Pages(&'a [u64]),
}

/// Eviction set: victims decided but not evicted yet, with the resulting view.
#[derive(Debug, Default)]
pub(crate) struct EvictionSet {
    pub(crate) victims: Vec<Victim>,
    /// Remaining layers of residencies that lose layers.
    taken: FxHashMap<(TierId, BlockId), Layers>,
    /// Tails that leave a tier with all layers, except the latest tail: end of the range by tier
    /// and first block.
    tails: BTreeMap<(TierId, BlockId), BlockId>,
    /// The latest tail, or an empty range. The next exposed block is its parent.
    latest_tail: (TierId, Range<BlockId>),
    /// Layers that will be resident or in flight on the next tier.
    added: FxHashMap<(TierId, BlockId), Layers>,
    /// Free slots of the first group per tier after the set is carried out.
    spare: Vec<u64>,
    /// The pages of each tier, if several groups share them.
    shared: Vec<PageView>,
    /// Leases that return their spare slots.
    spared: Vec<LeaseId>,
    /// Changes of the holds on parts of blocks, and parts with leaving slots.
    planned: Vec<Planned>,
    /// Resume points that leave or are copied.
    points: Vec<PointVictim>,
    /// Blocks with windows and states stored below: they must not be dropped.
    coming: FxHashSet<BlockId>,
    /// Tier with previewed victims only.
    preview: Option<TierId>,
    /// Whether victims are dropped if possible, not written back.
    dropping: bool,
    /// Entries linked or unlinked for single blocks. Always refreshed.
    touched: Vec<(TierId, BlockId)>,
    /// Entries linked or unlinked for tails. Correct without a refresh if only tails are evicted.
    tail_entries: Vec<(TierId, BlockId)>,
    /// Copies that must stay: end of the range by tier and first block.
    guarded: BTreeMap<(TierId, BlockId), BlockId>,
    /// Blocks with copies waiting for room on a lower tier: they must not be dropped until then.
    moving: Vec<BlockId>,
    /// Cause of the evictions.
    pub(crate) cause: Cause,
}

impl EvictionSet {
    /// Empties the set, and keeps its memory.
    fn clear(&mut self) {
        let Self {
            victims,
            taken,
            tails,
            latest_tail,
            added,
            spare,
            shared,
            spared,
            planned,
            points,
            coming,
            preview,
            dropping,
            touched,
            tail_entries,
            guarded,
            moving,
            cause,
        } = self;
        victims.clear();
        taken.clear();
        tails.clear();
        added.clear();
        spare.clear();
        shared.iter_mut().for_each(PageView::clear);
        spared.clear();
        planned.clear();
        points.clear();
        coming.clear();
        touched.clear();
        tail_entries.clear();
        guarded.clear();
        moving.clear();
        (*latest_tail, *preview, *dropping, *cause) = Default::default();
    }

    /// The tiers with pages shared by several groups: all or none.
    pub(super) fn shared(&self) -> Range<TierId> {
        0..self.shared.len()
    }

    /// Leases that return their spare slots.
    pub(super) fn spared(&self) -> &[LeaseId] {
        &self.spared
    }

    /// Whether any of these copies must stay.
    fn guards(&self, tier: TierId, blocks: Range<BlockId>) -> bool {
        // Ranges do not overlap, so the last range that begins before the end decides.
        let before = self.guarded.range((tier, 0)..(tier, blocks.end)).next_back();
        before.is_some_and(|(_, &end)| blocks.start < end)
    }

    /// Whether a block leaves with a tail.
    fn in_tail(&self, tier: TierId, block: BlockId) -> bool {
        // The latest tail is checked most often, so it is kept outside the map.
        if self.latest_tail.0 == tier && self.latest_tail.1.contains(&block) {
            return true;
        }
        let before = self.tails.range((tier, 0)..=(tier, block)).next_back();
        before.is_some_and(|(_, &end)| block < end)
    }

    /// Whether none of these blocks leaves a tier.
    #[inline(never)]
    fn keeps(&self, tier: TierId, blocks: Range<BlockId>) -> bool {
        let before = self.tails.range(..(tier, blocks.end)).next_back();
        let latest = &self.latest_tail;
        let tail = before.is_some_and(|(&(at, _), &end)| at == tier && blocks.start < end)
            || latest.0 == tier && latest.1.start < blocks.end && blocks.start < latest.1.end;
        let taken = |block| self.taken.contains_key(&(tier, block));
        !tail && (self.taken.is_empty() || !blocks.clone().any(taken))
    }

    /// Adds a leaving tail.
    fn add_tail(&mut self, tier: TierId, blocks: Range<BlockId>) {
        let (at, known) = std::mem::replace(&mut self.latest_tail, (tier, blocks));
        if !known.is_empty() {
            self.tails.insert((at, known.start), known.end);
        }
    }

    /// The remaining layers of a residency that loses layers.
    fn rest(&self, tier: TierId, block: BlockId) -> Option<Layers> {
        let taken = self.taken.get(&(tier, block)).copied();
        taken.or_else(|| self.in_tail(tier, block).then_some(Layers::NONE))
    }
}

impl Manager {
    /// An empty set over the slots available now.
    pub(crate) fn eviction_set(&self) -> EvictionSet {
        let mut set = EvictionSet::default();
        self.open_set(&mut set);
        set
    }

    /// Counts the available slots of each tier.
    fn open_set(&self, set: &mut EvictionSet) {
        let tiers = 0..self.tiers.len();
        set.spare.extend(tiers.clone().map(|tier| self.blocks.takeable(tier)));
        if self.points.several() {
            set.shared.resize_with(tiers.end, PageView::default);
            for (tier, view) in set.shared.iter_mut().enumerate() {
                view.open(self.blocks.arena(tier).expect("a tier of several groups"));
            }
        }
    }

    /// An empty set. Reuses the memory of an earlier set if possible.
    pub(super) fn reuse_set(&mut self, dropping: bool) -> Box<EvictionSet> {
        let mut set = self.spare_set.take().unwrap_or_default();
        self.open_set(&mut set);
        set.dropping = dropping;
        set
    }

    /// Keeps the memory of a set for reuse, unless it is large.
    pub(crate) fn keep(&mut self, mut set: Box<EvictionSet>) {
        // A large eviction must not keep its memory for all later small evictions.
        if set.victims.len() > MANY || set.taken.len() > MANY || set.planned.len() > 4 * MANY {
            return;
        }
        set.clear();
        self.spare_set = Some(set);
    }

    /// An empty set with this cause of eviction.
    pub(crate) fn eviction_set_for(&self, cause: Cause) -> EvictionSet {
        EvictionSet { cause, ..self.eviction_set() }
    }

    /// A set that previews the victims of `tier`, for writing them ahead of need.
    pub(crate) fn preview(&self, tier: TierId) -> EvictionSet {
        EvictionSet { preview: Some(tier), ..self.eviction_set_for(Cause::Ahead) }
    }

    /// Adds victims until the wanted slots of a tier are available, and takes them. Victims added
    /// before a failure stay in the set.
    pub(crate) fn room(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        wanted: &[u64],
        now: Nanos,
    ) -> bool {
        // A store into a slot already used by its block takes no new slot: the reserve alone evicts
        // nothing.
        if wanted.iter().all(|&slots| slots == 0) {
            return true;
        }
        if self.blocks.arena(tier).is_none() {
            let upto = wanted[0] + self.kept_free(set, tier);
            let fits = self.leave(set, tier, Goal::Slots(upto), now);
            set.spare[tier] -= if fits { wanted[0] } else { 0 };
            return fits;
        }
        self.leave_unneeded(set, tier, wanted);
        let fits = self.leave(set, tier, Goal::Pages(wanted), now);
        if fits {
            set.shared[tier].take(wanted);
        }
        fits
    }

    /// Adds victims until this number of slots of the first group leaves a tier.
    pub(crate) fn slots_leave(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        slots: u64,
        now: Nanos,
    ) -> bool {
        let upto = self.blocks.takeable(tier).saturating_add(slots + self.kept_free(set, tier));
        self.leave(set, tier, Goal::Slots(upto), now)
    }

    /// Slots of a tier that a set leaves free for transit. Zero for a dropping set, because it
    /// writes no stores.
    fn kept_free(&self, set: &EvictionSet, tier: TierId) -> u64 {
        if set.dropping { 0 } else { self.transit_reserve(tier) }
    }

    /// Number of slots of the first group missing for a goal on a tier.
    fn short(&self, set: &EvictionSet, tier: TierId, goal: Goal<'_>) -> u64 {
        match goal {
            Goal::Slots(upto) => upto.saturating_sub(set.spare[tier]),
            Goal::Pages(wanted) => self.short_of_pages(set, tier, wanted),
        }
    }

    /// Adds victims in order of value until a tier has reached a goal. Returns whether there are
    /// enough victims.
    fn leave(&mut self, set: &mut EvictionSet, tier: TierId, goal: Goal<'_>, now: Nanos) -> bool {
        let (mut next, mut passed) = (None, self.pass_dirty(set, tier));
        let mut slots = self.short(set, tier, goal);
        while slots > 0 {
            // A block exposed by a tail stays unlinked, which saves a link and an unlink per block.
            let (entry, linked) = match next.take() {
                Some(next) => next,
                None => match self.next_victim(set, tier, &mut passed, now) {
                    Some(entry) => (entry, true),
                    None => match self.point_without_block(set, tier) {
                        Some(entry) => (entry, false),
                        None => return false,
                    },
                },
            };
            visits::note(1);
            let run = self.prefetch_victim(entry.id);
            if linked {
                self.tiers[tier].eviction.unlink(entry.id);
            }
            self.prefetch_parent(tier, run);
            // The decision for a block applies to the tail of its run if the policy ranks these
            // blocks alike.
            let tail = self.evict_tail(set, tier, entry, slots, now);
            if !tail {
                set.touched.push((tier, entry.id));
                self.decide(set, tier, entry, now);
            }
            slots = self.short(set, tier, goal);
            if tail {
                set.tail_entries.push((tier, entry.id));
                // With clean copies first, the parent must be compared with all entries.
                let more = slots > 0 && !passed.passes();
                next = self.expose(set, tier, more, now).map(|entry| (entry, false));
            }
        }
        if passed.passes() {
            self.end_passing(set, tier, &mut passed);
        }
        true
    }

    /// Prefetches the CPU cache lines needed for deciding on a victim, so that their memory
    /// latencies overlap. Returns the victim's run.
    fn prefetch_victim(&self, block: BlockId) -> RunId {
        self.prefetch_lines(block);
        let (run, first) = self.trie().prefetch_lines(block);
        self.prefetch_lines(first);
        run
    }

    /// Prefetches the lines of the parent of a run, because the parent is linked when the run
    /// leaves.
    fn prefetch_parent(&self, tier: TierId, run: RunId) {
        if let Some(parent) = self.trie().prefetch_parent(run) {
            self.prefetch_lines(parent);
            self.tiers[tier].eviction.prefetch_line(parent);
        }
    }

    /// Adds a block as a victim, regardless of its value.
    pub(crate) fn choose(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        now: Nanos,
    ) {
        let entry = self.entry(tier, block, self.residency(tier, block).have);
        self.take_out(set, tier, block);
        self.decide(set, tier, entry, now);
    }

    /// Number of slots still available to a set on a tier, or of pages if several groups share
    /// them.
    pub(crate) fn spare(set: &EvictionSet, tier: TierId) -> u64 {
        set.shared.get(tier).map_or(set.spare[tier], |view| view.pages)
    }

    /// Restores every entry and point moved by a set.
    pub(crate) fn abandon(&mut self, set: &EvictionSet) {
        self.end_planning(set);
        self.restore_points(set);
        self.relink_set(set);
    }

    /// Refreshes all entries moved by a set.
    pub(crate) fn relink_set(&mut self, set: &EvictionSet) {
        self.refresh_touched(set);
        for &(tier, block) in &set.tail_entries {
            self.refresh_on(tier, block);
        }
    }

    /// Refreshes the entries of single blocks decided by a set.
    pub(crate) fn refresh_touched(&mut self, set: &EvictionSet) {
        for tier in self.tiers.iter_mut() {
            tier.eviction.end_selection();
        }
        for &(tier, block) in &set.touched {
            self.refresh_on(tier, block);
        }
    }

    /// Keeps resident blocks of a run out of the set. Guarded ranges of a tier overlap only if a
    /// range extends an earlier range.
    pub(crate) fn guard(&mut self, set: &mut EvictionSet, tier: TierId, blocks: Range<BlockId>) {
        let end = set.guarded.entry((tier, blocks.start)).or_default();
        *end = blocks.end.max(*end);
        for block in self.edge(tier, blocks.clone(), self.departures(blocks.start)) {
            self.take_out(set, tier, block);
        }
        for block in self.points.of_run(blocks) {
            self.take_out(set, tier, block);
        }
    }

    /// Refreshes the entries of copies kept by a set: some may be leaves now.
    pub(crate) fn refresh_stay(&mut self, stay: Vec<(TierId, Range<BlockId>)>) {
        for (tier, run) in stay {
            let structure = self.departures(run.start);
            self.refresh_points(tier, run.clone());
            self.refresh_from(tier, run, structure);
        }
    }

    fn take_out(&mut self, set: &mut EvictionSet, tier: TierId, block: BlockId) {
        if self.tiers[tier].eviction.unlink(block).is_some() {
            set.touched.push((tier, block));
        }
    }

    fn put_in(&mut self, set: &mut EvictionSet, tier: TierId, entry: Entry) {
        self.link(tier, entry);
        set.touched.push((tier, entry.id));
    }

    fn link(&mut self, tier: TierId, entry: Entry) {
        let band = self.band(tier, entry.id);
        self.tiers[tier].eviction.link(entry, band);
    }

    /// The layers of a block on a tier in the set's view, usable or bad.
    fn view(&self, set: &EvictionSet, tier: TierId, block: BlockId) -> Layers {
        if let Some(rest) = set.rest(tier, block) {
            return rest;
        }
        if let Some(&more) = set.added.get(&(tier, block)) {
            // A victim may be written back from above: `can_write` removes its remaining layers.
            return more;
        }
        // Bad layers cannot be read, but their slots can be freed.
        match self.residency(tier, block).state {
            ResidencyState::Bad => self.residency(tier, block).have,
            _ => self.expected(tier, block),
        }
    }

    fn usable_view(&self, set: &EvictionSet, tier: TierId, block: BlockId) -> Layers {
        // A bad copy serves no request, so it does not make a second copy clean.
        if self.residency(tier, block).state == ResidencyState::Bad {
            Layers::NONE
        } else {
            self.view(set, tier, block)
        }
    }
}
