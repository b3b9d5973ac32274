//! Decisions: the fate of each victim of an eviction set.
//!
//! Invariant: a decision changes only the set, and room on the tier below is made in the same set.
//! Cost: O(tiers) per victim, plus the cost of room below.

use smallvec::{SmallVec, smallvec};

use crate::block::{BlockId, Layers, Structure, TierId};
use crate::policy::Entry;
use crate::tier::{ResidencyState, Write};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::evict::set::{EvictionSet, Fate, Victim};
use crate::manager::settings::DropOrder;

/// Slots needed for a store to the tier below, and the stored layers.
struct StoreBelow {
    slots: u64,
    /// Layers on the tier below after the store.
    joined: Layers,
}

impl Manager {
    /// Decides the fate of a block, and adds it if it can leave.
    pub(super) fn decide(&mut self, set: &mut EvictionSet, tier: TierId, entry: Entry, now: Nanos) {
        let block = entry.id;
        if self.points.has_on(tier, block) {
            // Slots being read by a store to a shared tier cannot be promised.
            if self.read_for_shared(tier, block) {
                return;
            }
            let worth = self.worth_copying(set, tier, block);
            let copied = if worth { self.can_copy(set, tier, block, now) } else { None };
            self.add_point_victim(set, tier, block, copied, true);
            return;
        }
        // A write-back ahead must not push out a copy of a block it would then write again,
        // forever.
        let ahead = set.preview.is_some_and(|at| at < tier && !self.expected(at, block).is_empty());
        if ahead {
            return;
        }
        // A request that finds the block only in flight to a shared tier would wait for the store.
        let stored = |at: TierId| self.arrival(at, block).is_some_and(|it| !it.moves.is_empty());
        if self.tiers.above_shared(tier) && stored(tier + 1) {
            return;
        }
        let have = self.view(set, tier, block);
        if self.residency(tier, block).state == ResidencyState::Bad {
            // Bad bytes: nothing is lost, and nothing can be written.
            self.add_victim(set, Victim::one(tier, block, have, Fate::Clean));
            return;
        }
        let out = self.next_out(tier, block, have);
        // The dirty layers are not a single range, so no store can write them.
        let Some(dirty) = self.dirty(set, tier, block, out) else {
            self.drop_whole(set, tier, block, have);
            return;
        };
        // A second tier has the same layers.
        if dirty.is_empty() {
            self.add_victim(set, Victim::one(tier, block, out, Fate::Clean));
            return;
        }
        // A block that cannot be dropped because of a child in flight is still written.
        if set.dropping && self.drop_whole(set, tier, block, have) {
            return;
        }
        // Recursion: victims of the tier below are decided in the same set, and must not be this
        // block.
        set.moving.push(block);
        let store = self.store_below(set, tier, block, dirty);
        let store = store.filter(|store| self.room(set, tier + 1, &[store.slots], now));
        set.moving.pop();
        if let Some(store) = store {
            set.added.insert((tier + 1, block), store.joined);
            set.taken.remove(&(tier + 1, block));
            self.add_victim(set, Victim::one(tier, block, out, Fate::Demote(dirty)));
        } else {
            // Without a copy below, the order of dropping applies, not the order of demoting.
            let single = tier == self.tiers.last();
            self.drop_whole(set, tier, block, if single { out } else { have });
        }
    }

    /// The part of `out` resident on no sufficient tier, or `None` if it is not a single range.
    pub(super) fn dirty(
        &self,
        set: &EvictionSet,
        tier: TierId,
        block: BlockId,
        out: Layers,
    ) -> Option<Layers> {
        self.covering(set, tier)
            .try_fold(out, |left, other| left.without(self.usable_view(set, other, block)))
    }

    /// Tiers with a sufficient copy for a clean eviction.
    ///
    /// On the lowest tier a copy above is sufficient too: dropping this copy loses nothing. The
    /// same applies above a shared tier, because no victim is written there, and with several
    /// groups, where a copy above is stored when its resume point leaves.
    pub(super) fn covering(
        &self,
        set: &EvictionSet,
        tier: TierId,
    ) -> impl Iterator<Item = TierId> + use<> {
        let above = tier == self.tiers.last()
            || self.tiers.above_shared(tier) && set.preview != Some(tier)
            || self.blocks.arena(tier).is_some();
        let upper = if above { 0..tier } else { 0..0 };
        upper.chain(tier + 1..self.tiers.len())
    }

    /// Whether layers save computation. Computing a missing layer computes all layers below it, so
    /// they do only if every layer above is resident somewhere.
    pub(crate) fn saves_compute(
        &self,
        layers: Layers,
        resident: impl Fn(TierId) -> Layers,
    ) -> bool {
        let above = Layers::new(layers.hi, self.settings.layers);
        let left = (0..self.tiers.len()).try_fold(above, |left, tier| left.without(resident(tier)));
        self.settings.drop_order == DropOrder::Seed || left.is_some_and(Layers::is_empty)
    }

    /// The store that writes a victim to the next tier, if allowed.
    fn store_below(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        dirty: Layers,
    ) -> Option<StoreBelow> {
        let node = *self.node(block);
        let spec = &self.tiers[tier].spec;
        // A rarely used block, or a block refused by the tier below, is not worth a store. The
        // parent of a written block serves the same resume points.
        let follows = |child| set.added.contains_key(&(tier + 1, child));
        let worth = node.uses >= spec.admit_after
            && self.refused.may_write(block, tier + 1)
            && (self.serves_points(tier, block) || self.trie().children(block).any(follows));
        if tier == self.tiers.last() || spec.write == Write::Never || !worth {
            return None;
        }
        // A victim's slot must not wait for a shared store. For a write ahead, the copy stays.
        if set.preview != Some(tier) && self.tiers.above_shared(tier) {
            return None;
        }
        let below = tier + 1;
        let held_below = self.view(set, below, block);
        // New layers cannot join bad layers, nor slots that a failed move may still write.
        if self.residency(below, block).state == ResidencyState::Bad || self.stuck(below, block) {
            return None;
        }
        // A tier keeps a single range of layers per block.
        let joined = held_below.join(dirty)?;
        // A store of layers useless to requests would push out useful layers.
        if !self.saves_compute(joined, |other| self.usable_view(set, other, block)) {
            return None;
        }
        // Its copy below grows, so it must not be evicted for itself.
        self.take_out(set, below, block);
        // A slot with part of the block has room for the rest.
        let one_slot = !self.tiers[below].spec.layer_slots;
        let free_slot = one_slot && !held_below.is_empty();
        let slots = if free_slot { 0 } else { self.tiers.units(below, dirty) };
        Some(StoreBelow { slots, joined })
    }

    /// Adds `out` of a last copy to the victims. A leaf-only block leaves all tiers at once, since
    /// a part of it is useless. Returns whether it could be dropped.
    pub(super) fn drop_whole(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        out: Layers,
    ) -> bool {
        // Holes leave their children usable, and a preview decides on a single tier.
        if set.preview == Some(tier) || self.structure(block) == Structure::Holes {
            self.add_victim(set, Victim::one(tier, block, out, Fate::Drop));
            return true;
        }
        // A subtree is dropped only by a dropping set. Otherwise a block with children stays.
        let dropped: SmallVec<[BlockId; 1]> =
            if set.dropping { self.subtree(block).into() } else { smallvec![block] };
        // A descendant in use keeps its ancestors.
        let with_children = set.dropping;
        if !dropped.iter().all(|&block| self.droppable(set, block, with_children)) {
            return false;
        }
        // Children first, so that each exposes its parent in the view.
        for &block in dropped.iter().rev() {
            for tier in 0..self.tiers.len() {
                let layers = self.view(set, tier, block);
                if !layers.is_empty() {
                    self.take_out(set, tier, block);
                    self.add_victim(set, Victim::one(tier, block, layers, Fate::Drop));
                }
            }
        }
        true
    }

    /// Whether a leaf-only block may be removed, optionally with its children: it is not in use,
    /// and all its children leave.
    fn droppable(&self, set: &EvictionSet, block: BlockId, with_children: bool) -> bool {
        let tiers = 0..self.tiers.len();
        let settled = tiers.clone().all(|tier| {
            let residency = self.residency(tier, block);
            residency.busy == 0
                && residency.state != ResidencyState::Arriving
                && !set.added.contains_key(&(tier, block))
                && !set.guards(tier, block..block + 1)
        }) && !set.moving.contains(&block)
            && !self.groups_arrive(set, block);
        // A write-back ahead takes nothing from its source tier or the tiers above.
        let ahead = set.preview.is_none_or(|at| {
            (0..=at).all(|tier| self.residency(tier, block).state == ResidencyState::Absent)
        });
        settled
            && ahead
            && self.node(block).refs == 0
            && (with_children
                || self
                    .trie()
                    .children(block)
                    .all(|child| self.node(child).refs == 0 && self.absent(set, child)))
    }

    /// Whether any group after the first of a block is arriving on a tier, in the set's view.
    pub(super) fn groups_arrive(&self, set: &EvictionSet, block: BlockId) -> bool {
        set.coming.contains(&block) || self.blocks.groups_arrive(block)
    }

    /// Whether a block is absent from every tier in the set's view, and not in flight.
    pub(super) fn absent(&self, set: &EvictionSet, block: BlockId) -> bool {
        // Previewed victims stay in their slots.
        let stays =
            set.preview.is_some_and(|at| self.residency(at, block).state != ResidencyState::Absent);
        if stays {
            return false;
        }
        (0..self.tiers.len()).all(|tier| {
            self.view(set, tier, block).is_empty()
                && (self.residency(tier, block).state != ResidencyState::Arriving
                    || set.rest(tier, block).is_some())
        })
    }

    /// Adds a victim, and updates the entries around it to the view.
    pub(super) fn add_victim(&mut self, set: &mut EvictionSet, victim: Victim) {
        let Victim { tier, block, layers, .. } = victim;
        let have = self.view(set, tier, block);
        let rest = have.without(layers).expect("evicted layers are at an end of the range");
        set.victims.push(victim);
        set.taken.insert((tier, block), rest);
        if self.tiers[tier].spec.layer_slots {
            set.spare[tier] += u64::from(layers.len());
        } else if rest.is_empty() {
            self.free_slots(set, tier, block..block + 1, 1);
        }
        // The rest of the block is a candidate again, at the price of its next layers.
        if !rest.is_empty() {
            let entry = self.entry(tier, block, rest);
            self.put_in(set, tier, entry);
            return;
        }
        // The policy learns of the victim in order, as if it had been evicted already.
        let band = self.band(tier, block);
        self.tiers[tier].eviction.select(band);
        // Without its last child on the tier a leaf-only parent becomes a victim.
        if self.departures(block) == Structure::LeafOnly
            && let Some(parent) = self.trie().parent(block)
            && let Some(entry) = self.exposed(set, tier, parent, false)
        {
            self.put_in(set, tier, entry);
        }
    }

    /// The entry of a leaf-only block after its children have left. `bare` skips the check of the
    /// children.
    pub(super) fn exposed(
        &self,
        set: &EvictionSet,
        tier: TierId,
        parent: BlockId,
        bare: bool,
    ) -> Option<Entry> {
        let residency = self.residency(tier, parent);
        let free = matches!(residency.state, ResidencyState::Resident | ResidencyState::Bad)
            && residency.busy == 0
            && (tier > 0 || self.node(parent).refs == 0)
            && !set.guards(tier, parent..parent + 1)
            && !set.moving.contains(&parent)
            // A point brought by the set stays.
            && !(set.coming.contains(&parent) && self.points.has_on(tier, parent))
            // A child kept it from leaving with its tail.
            && !set.taken.contains_key(&(tier, parent))
            && !set.added.contains_key(&(tier, parent));
        let alone = |child| {
            self.residency(tier, child).state == ResidencyState::Absent
                && !set.added.contains_key(&(tier, child))
                || set.rest(tier, child).is_some_and(Layers::is_empty)
        };
        // The children are checked last, because there may be many.
        let exposed = free
            && self.tiers[tier].eviction.get(parent).is_none()
            && (bare || self.trie().children(parent).all(alone));
        exposed.then(|| self.entry(tier, parent, residency.have))
    }
}
