//! Resume points of a set: points that leave a tier, and points copied to the tier below.
//!
//! A leaving point frees the slots held by it alone. A copied point takes slots below for the
//! missing parts. In the set's view the point is already moved, and `abandon` moves it back.
//! Invariant: a part needed below by a copied point neither leaves nor is dropped in the same set.
//! Cost: O(slots of the point), and room for them.

use crate::block::{BlockId, Layers, NO_SLOT, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::evict::set::{EvictionSet, Fate, Victim};
use crate::manager::points::Shifted;
use crate::policy::Entry;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::transfer::MoveKind;

/// Resume point that a set takes from a tier, or copies to the tier below.
#[derive(Debug)]
pub(super) struct PointVictim {
    tier: TierId,
    block: BlockId,
    /// All needs of the point.
    needs: Vec<Part>,
    leaves: bool,
    copied: Option<Copied>,
    /// The point before its move.
    before: Shifted,
}

/// Needs of a copied point on the tier below.
#[derive(Debug)]
pub(crate) struct Copied {
    /// Parts already on the tier before the set is carried out.
    resident: Vec<Part>,
    /// Parts stored there for this point. The remaining parts are stored for different points.
    lacking: Vec<Part>,
}

impl Manager {
    /// Whether a leaving point is worth a store on the tier below.
    pub(super) fn worth_copying(&self, set: &EvictionSet, tier: TierId, block: BlockId) -> bool {
        // No victim is written to a shared tier.
        let worth = !set.dropping
            && self.tiers.writes(tier)
            && !self.tiers.above_shared(tier)
            && self.node(block).uses >= self.tiers[tier].spec.admit_after
            && self.refused.may_write(block, tier + 1);
        // A point on a second tier is not lost. A point above is stored when it leaves there.
        worth && !(0..self.tiers.len()).any(|at| at != tier && self.points.has_on(at, block))
    }

    /// Takes a resume point from a tier, and copies it to the tier below if it is worth a store
    /// there.
    pub(in crate::manager) fn demote_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let mut set = self.eviction_set();
        self.choose(&mut set, tier, block, now);
        self.apply(&set, now);
    }

    /// Copies a resume point to the next tier, if there is room. With `leaves`, it leaves this
    /// tier. Returns whether it was copied.
    pub(in crate::manager) fn copy_point_below(
        &mut self,
        tier: TierId,
        block: BlockId,
        leaves: bool,
        now: Nanos,
    ) -> bool {
        let mut set = self.eviction_set();
        let copied = self.can_copy(&mut set, tier, block, now);
        if copied.is_none() {
            self.abandon(&set);
            return false;
        }
        self.take_out(&mut set, tier, block);
        self.add_point_victim(&mut set, tier, block, copied, leaves);
        self.apply(&set, now);
        true
    }

    /// Makes room on the tier below for the missing parts of a point, if possible.
    pub(super) fn can_copy(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        now: Nanos,
    ) -> Option<Copied> {
        let below = tier + 1;
        let path = self.path_to(Some(block));
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let needs = self.points.needs(&path, border).into_iter();
        let (resident, lacking): (Vec<_>, Vec<_>) =
            needs.partition(|&part| self.part_in(set, below, part));
        // Without a copy of its last block a point ends.
        if self.absent(set, block) || !lacking.iter().all(|&part| self.part_absent(below, part)) {
            return None;
        }
        let mut wanted = vec![0; self.points.other_numbers().end];
        for part in &lacking {
            wanted[part.group] += 1;
        }
        // The parts already below must not make room for the rest.
        for &part in &resident {
            self.plan_hold(set, below, part);
        }
        // The point below must not leave for itself.
        self.take_out(set, below, block);
        set.moving.push(block);
        let fits = self.room(set, below, &wanted, now);
        set.moving.pop();
        if !fits {
            for &part in &resident {
                self.plan_unhold(set, below, part);
            }
            return None;
        }
        let brought = &set.shared[below].brought;
        let resident = resident.into_iter().filter(|part| !brought.contains(part)).collect();
        set.shared[below].brought.extend(&lacking);
        set.coming.extend(lacking.iter().map(|part| part.block).chain([block]));
        Some(Copied { resident, lacking })
    }

    /// Adds a point that `leaves` a tier or stays, and updates the entries around it.
    pub(super) fn add_point_victim(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        copied: Option<Copied>,
        leaves: bool,
    ) {
        let path = self.path_to(Some(block));
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let needs = self.points.needs(&path, border);
        let to = copied.is_some().then_some(tier + 1);
        let before = self.points.shift(block, leaves.then_some(tier), to);
        if leaves {
            for &part in &needs {
                self.plan_unhold(set, tier, part);
            }
        }
        // It affects the worth of its neighbours and the band of its block.
        for other in before.around().chain([block]) {
            self.relink(set, other);
        }
        if leaves && let Some(entry) = self.exposed(set, tier, block, false) {
            self.put_in(set, tier, entry);
        }
        set.touched.extend(to.map(|below| (below, block)));
        let fate = Fate::Point(u32::try_from(set.points.len()).expect("fewer than 2^32 blocks"));
        set.points.push(PointVictim { tier, block, needs, leaves, copied, before });
        set.victims.push(Victim { blocks: 0, ..Victim::one(tier, block, Layers::NONE, fate) });
    }

    /// Updates the linked entries of a block to their price and band in the set's view.
    fn relink(&mut self, set: &mut EvictionSet, block: BlockId) {
        for tier in 0..self.tiers.len() {
            if self.tiers[tier].eviction.get(block).is_some() {
                let entry = self.entry(tier, block, self.view(set, tier, block));
                self.take_out(set, tier, block);
                self.put_in(set, tier, entry);
            }
        }
    }

    /// Entry of a point on a tier without its block. It is not linked.
    pub(super) fn point_without_block(&self, set: &EvictionSet, tier: TierId) -> Option<Entry> {
        let mut points = self.points.all();
        let found = points.find(|&(block, point)| {
            point.tiers >> tier & 1 == 1
                && self.residency(tier, block).state == ResidencyState::Absent
                && !set.coming.contains(&block)
                && !self.read_for_shared(tier, block)
        });
        found.map(|(block, _)| self.entry(tier, block, Layers::NONE))
    }

    /// Before a set is carried out: ends the holds of leaving points, after copied points hold
    /// their existing parts below.
    pub(in crate::manager::evict) fn hold_copied(&mut self, set: &EvictionSet) {
        for point in &set.points {
            for &Part { group, block } in point.copied.iter().flat_map(|copied| &copied.resident) {
                self.blocks.hold(Place::new(point.tier + 1, group), [block]);
            }
        }
        for point in set.points.iter().filter(|point| point.leaves) {
            for &Part { group, block } in &point.needs {
                self.blocks.unhold(Place::new(point.tier, group), [block]);
            }
        }
    }

    /// Drops the waiting store of a leaving point to a shared tier.
    pub(in crate::manager::evict) fn drop_store_of_victim(
        &mut self,
        set: &EvictionSet,
        number: u32,
    ) {
        let PointVictim { tier, block, leaves, .. } = set.points[number as usize];
        if leaves && self.tiers.writes_shared(tier) {
            self.drop_point_store(tier, block, set.cause);
        }
    }

    /// Starts the stores of a copied point.
    pub(in crate::manager::evict) fn copy_point_victim(
        &mut self,
        set: &EvictionSet,
        number: u32,
        now: Nanos,
    ) {
        let point = &set.points[number as usize];
        let Some(copied) = &point.copied else { return };
        for &Part { group, block } in &copied.lacking {
            let store = self.whole(MoveKind::Store, 0, block);
            self.copy_part(store, Place::new(point.tier, group), point.tier + 1, now);
        }
        for part in point.needs.iter().filter(|part| !copied.resident.contains(part)) {
            self.blocks.hold(Place::new(point.tier + 1, part.group), [part.block]);
        }
    }

    /// Frees the slots needed by a set: the tier's victims have left, and nothing is stored yet.
    pub(in crate::manager::evict) fn free_pages(&mut self, set: &EvictionSet, tier: TierId) {
        let above = set.points.iter().filter(|point| point.tier + 1 == tier);
        for &Part { group, block } in above.flat_map(|point| &point.copied).flat_map(|c| &c.lacking)
        {
            let place = Place::new(tier, group);
            // Its slot was freed, and the part is stored again in a new slot.
            if self.residency(place, block).slot != NO_SLOT {
                self.blocks.discard(place, block);
            }
        }
        let wanted = set.shared[tier].wanted();
        while let lacking @ 1.. = self.blocks.arena(tier).map_or(0, |arena| arena.lacking(wanted)) {
            assert!(self.blocks.take_released(tier, lacking), "a set leaves the room it counts");
        }
    }

    /// Moves the points of a set back to their tiers.
    pub(super) fn restore_points(&mut self, set: &EvictionSet) {
        for point in set.points.iter().rev() {
            self.points.restore(point.block, &point.before);
        }
    }
}
