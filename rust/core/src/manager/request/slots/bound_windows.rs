//! Windows in slots that an engine owns: named by `bind`, loaded and stored from there.
//!
//! The first tier has no residency then, so a resume point is on the tier below. It is stored when its
//! border is committed, since the engine takes slots back that no token attends to. Invariant: a slot
//! is of one group at a time. Cost: O(slots) per call.

use rustc_hash::FxHashMap;

use crate::block::{BlockId, GroupId, LeaseId, MoveId, NO_SLOT, Place, Slot};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::manager::request::life::lease::Plan;
use crate::manager::request::slots::window_slots::{PlannedLoad, Windows, path_border};
use crate::private_slots::PrivateSlotId;
use crate::time::{Nanos, Stamp};
use crate::transfer::{Endpoint, MoveKind};

impl Manager {
    /// Refuses a call for a lease whose windows are in slots of an engine.
    pub(crate) fn refuse_bound(&self, id: LeaseId, what: &str) -> Result<()> {
        if self.tiers.engine_owned() && self.leases[&id].windows.is_some() {
            return Err(Error::config(format!(
                "{what} of lease {id} is not supported where an engine owns the slots of several \
                 groups"
            )));
        }
        Ok(())
    }

    /// Fails if a group does not exist, another group has one of these slots, or a place is bound to
    /// another slot.
    pub(crate) fn check_groups(
        &self,
        id: LeaseId,
        first: usize,
        slots: &[Slot],
        group: usize,
    ) -> Result<()> {
        let groups = self.points.other_numbers().end;
        if group >= groups {
            return Err(Error::config(format!(
                "there is no group {group}, the manager keeps {groups} apart"
            )));
        }
        let other = |&&slot: &&Slot| {
            self.private_slots.group_of(slot).is_some_and(|known| usize::from(known) != group)
        };
        if let Some(&slot) = slots.iter().find(other) {
            let holder = self.private_slots.group_of(slot).unwrap_or(0);
            return Err(Error::config(format!(
                "slot {slot} is bound in group {holder}, not {group}: a slot is of one group at a time"
            )));
        }
        let Some(windows) = self.leases[&id].windows.as_ref().filter(|_| group > 0) else {
            return Ok(());
        };
        for (place, &slot) in (first..).zip(slots) {
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            let bound = windows.bound[group].get(&place);
            let known = bound.map_or(NO_SLOT, |&private| self.private_slots[private].slot);
            if known != NO_SLOT && known != slot {
                return Err(Error::config(format!(
                    "block {place} of lease {id} is bound to slot {known} in group {group}, not {slot}"
                )));
            }
        }
        Ok(())
    }

    /// Names slots of a group after the first, that were checked.
    pub(crate) fn bind_windows(
        &mut self,
        id: LeaseId,
        first: usize,
        slots: &[Slot],
        group: GroupId,
    ) -> Result<()> {
        self.check_memory(slots.len())?;
        let Some(mut windows) = self.lease_mut(id).windows.take() else { return Ok(()) };
        let mut bound: FxHashMap<PrivateSlotId, Slot> = FxHashMap::default();
        for (place, &slot) in (first..).zip(slots) {
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            let known = windows.bound[group].get(&place).copied();
            let private = known.unwrap_or_else(|| self.new_bound(group));
            windows.bound[group].insert(place, private);
            self.private_slots.set_slot(private, slot);
            bound.insert(private, slot);
        }
        self.lease_mut(id).windows = Some(windows);
        self.name_moves(&bound);
        Ok(())
    }

    /// A slot of a group that the engine will name.
    fn new_bound(&mut self, group: GroupId) -> PrivateSlotId {
        let layers = self.points.layers(group);
        self.private_slots.add_of(u8::try_from(group).expect("few groups"), layers)
    }

    /// Begins the loads that a match needs, into slots that the engine will name, and delays the plan
    /// until they end.
    pub(crate) fn load_bound(
        &mut self,
        windows: &mut Windows,
        path: &[BlockId],
        id: LeaseId,
        plan: &mut Plan,
        now: Nanos,
    ) -> Vec<MoveId> {
        let mut moves = Vec::with_capacity(windows.loads.len());
        for PlannedLoad { from: here, place } in std::mem::take(&mut windows.loads) {
            let (block, private) = (path[place as usize], self.new_bound(here.group));
            windows.bound[here.group].insert(place, private);
            let src = Endpoint::here(here, self.residency(here, block).slot);
            let dst = Endpoint::private(Place::new(0, here.group), NO_SLOT, private);
            let by = self.copy_slot(self.whole(MoveKind::Load, id, block), src, dst, now);
            self.blocks.unhold(here, [block]);
            moves.push(by);
        }
        let ready = moves.iter().filter_map(|&id| self.moves.get(id)).map(|known| known.ready);
        plan.wait_until(ready.max().unwrap_or(0));
        moves
    }

    /// Stores the resume points of the borders that a lease has committed, and lets go of what no
    /// later token attends to.
    pub(crate) fn store_committed(&mut self, windows: &mut Windows, path: &[BlockId]) {
        let (end, now) = (path_border(path), self.clock.last());
        let reached = windows.borders.partition_point(|&(border, _)| border <= end);
        for (border, stay) in windows.borders.drain(..reached).collect::<Vec<_>>() {
            self.store_bound(windows, path, border, stay, now);
        }
        let points = &self.points;
        let ends = windows.borders.iter().map(|&(border, _)| border).chain([end]);
        let ends: Vec<u32> = ends.collect();
        let (groups, size) = (points.groups.clone(), points.block_tokens);
        for (bound, group) in windows.bound.iter_mut().zip(groups) {
            let needed: Vec<_> = ends.iter().map(|&end| group.needed(end, size)).collect();
            let stays = |place| place >= end || needed.iter().any(|needed| needed.contains(place));
            let gone: Vec<u32> = bound.keys().copied().filter(|&place| !stays(place)).collect();
            for private in gone.into_iter().filter_map(|place| bound.remove(&place)) {
                self.unref_private(private);
            }
        }
        windows.done = end;
    }

    /// Writes blocks that only the engine's slots hold one tier down, before it takes them back.
    pub(crate) fn store_engine_blocks(&mut self, id: LeaseId, now: Nanos) {
        if !self.tiers.engine_owned() || !self.tiers.writes(0) || self.leases[&id].suspended() {
            return;
        }
        let exceptions: Vec<_> = self.leases[&id].path.exceptions().collect();
        for (_, step) in exceptions {
            // Slots that are still written, or not named yet, have no valid bytes.
            let ready = !step.fresh && step.compute.is_empty();
            if let (Some(private), true) = (step.private, ready)
                && self.private_slots[private].slot != NO_SLOT
            {
                self.write_down(0, step.block, Some(private), Stamp::MAX, now);
            }
        }
        self.store_engine_end(id, now);
    }

    /// Makes the end of a lease's path a resume point, before the engine takes its slots back.
    fn store_engine_end(&mut self, id: LeaseId, now: Nanos) {
        let lease = self.lease_mut(id);
        let Some(windows) = lease.windows.take() else { return };
        let path = lease.path.blocks().to_vec();
        let end = path_border(&path);
        if self.points.every == 0 && windows.done == end {
            self.store_bound(&windows, &path, end, Stay::Newest, now);
        }
        self.lease_mut(id).windows = Some(windows);
    }

    /// Makes a border a resume point on the tier below, if the engine has named all that the tier
    /// lacks and there is room.
    fn store_bound(
        &mut self,
        windows: &Windows,
        path: &[BlockId],
        border: u32,
        stay: Stay,
        now: Nanos,
    ) {
        if !self.tiers.writes(0) || border == 0 {
            return;
        }
        let points = &self.points;
        let mut wanted = vec![0; points.groups.len()];
        let (mut there, mut lacking) = (Vec::new(), Vec::new());
        for (number, group) in points.others() {
            let below = Place::new(1, number);
            for place in group.needed(border, points.block_tokens).iter() {
                let block = path[place as usize];
                if self.blocks.expects(below, block) {
                    there.push((below, block));
                    continue;
                }
                let private = windows.bound[number].get(&place).copied();
                let named = private.filter(|&id| self.private_slots[id].slot != NO_SLOT);
                let free = self.residency(below, block).slot == NO_SLOT;
                // Bytes that cannot be read, or a failed move that may still write them.
                let Some(private) = named.filter(|_| free) else { return };
                lacking.push((below, block, private));
                wanted[number] += 1;
            }
        }
        // What is there must not make room for the rest.
        for &(below, block) in &there {
            self.blocks.hold(below, [block]);
        }
        if self.make_soft_room(Wanted { tier: 1, slots: &wanted }, &[], now) {
            for (below, block, private) in lacking {
                self.store_window(below, block, private, now);
            }
            self.add_point_on(1, path, border, stay);
        }
        for (below, block) in there {
            self.blocks.unhold(below, [block]);
        }
        let last = path[border as usize - 1];
        if self.tiers.writes_through(1) && self.points.has_on(1, last) {
            self.copy_point(1, last, now);
        }
    }

    /// Begins to copy a window or a state from an engine's slot to the tier below, which has room.
    fn store_window(&mut self, below: Place, block: BlockId, private: PrivateSlotId, now: Nanos) {
        let named = self.private_slots[private].slot;
        let src = Endpoint::private(Place::new(0, below.group), named, private);
        let dst = Endpoint::here(below, self.blocks.take_slot(below).slot);
        self.copy_slot(self.whole(MoveKind::Store, 0, block), src, dst, now);
    }
}
