//! Windows: the slots of a lease in the groups after the first.
//!
//! A request matches up to a border at which every group can resume. Its lease holds what that needs,
//! takes slots for what its own borders will need, and gives each block its slots as it is committed:
//!
//! ```text
//!   match   border          branch            end of the prompt
//!   |-------|----------------|-----------------|------ answer
//!    [held ]            [ window of a point ]  [ window of a point ]   the rest: slots that are free
//! ```
//!
//! Invariant: a lease holds on the first tier what its border needs. Cost: O(blocks committed · groups).

use smallvec::SmallVec;

use crate::block::{BlockId, GroupId, LeaseId, MoveId, NO_SLOT, Part, Place, Slot, TierId};
use crate::error::{Error, Result};
use crate::group::GroupKind;
use crate::manager::Manager;
use crate::manager::evict::leased::Matched;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::manager::request::life::lease::{Lease, Plan};
use crate::manager::request::matching::residency_scan::MissingBlock;
use crate::manager::request::slots::next_slots::path_room;
use crate::manager::request::slots::window_slots::{PlannedLoad, Windows, blocks_at, path_border};
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::transfer::MoveKind;

impl Manager {
    /// Holds what the match needs, and takes room for `open` blocks and their windows.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing but the holds has changed then.
    pub(crate) fn open_windows(
        &mut self,
        windows: Option<&mut Windows>,
        path: &[BlockId],
        open: usize,
        missing: &[MissingBlock],
        now: Nanos,
    ) -> Result<()> {
        let Some(windows) = windows else { return Ok(()) };
        let holes = missing.iter().filter(|miss| !miss.compute.is_empty());
        let holes = holes.map(|miss| u32::try_from(miss.at).expect("fewer than 2^32 blocks"));
        let holes: Vec<u32> = holes.collect();
        let loads = missing.iter().filter(|miss| !miss.lacks.is_empty()).count();
        let wanted = windows.wanted.iter().map(|places| places.len() as u64);
        let mut wanted: Vec<u64> = wanted.collect();
        wanted[0] = (open + loads) as u64;
        for (group, needed) in self.points.needed_over(&holes, path).into_iter().enumerate() {
            for place in needed.iter() {
                // The request writes the block in a slot of its own: other leases may read the copy on a tier.
                if holes.binary_search(&place).is_ok() {
                    windows.wanted[group].push(place);
                    wanted[group] += 1;
                    continue;
                }
                let block = path[place as usize];
                let from = Place::new(self.nearest(Part { group, block }), group);
                if from.tier == 0 {
                    windows.held[group].push(place);
                } else {
                    // What is loaded stays below until the load has begun.
                    self.blocks.hold(from, [block]);
                    windows.loads.push(PlannedLoad { from, place });
                    wanted[group] += 1;
                }
            }
            self.blocks.hold(Place::new(0, group), blocks_at(path, &windows.held[group]));
        }
        // The engine makes room for itself.
        if self.tiers.engine_owned() {
            windows.wanted.clear();
            return Ok(());
        }
        let sources = missing
            .iter()
            .flat_map(|miss| miss.loads().map(|(tier, _)| (tier, miss.block..miss.block + 1)));
        let sources: Vec<_> = sources.collect();
        self.check_growth(&wanted, Matched { path, held: &windows.held })?;
        self.make_room(&[Wanted { tier: 0, slots: &wanted }], &sources, now)?;
        for (group, places) in std::mem::take(&mut windows.wanted).into_iter().enumerate() {
            for place in places {
                let slot = self.blocks.take_slot(Place::new(0, group)).slot;
                windows.open[group].insert(place, slot);
            }
        }
        Ok(())
    }

    /// Takes slots for the blocks of a prompt that no border needs, as far as any are free once the
    /// request has those that it was promised: a later prompt may leave this one there.
    pub(in crate::manager::request) fn take_spare_slots(&mut self, windows: Option<&mut Windows>) {
        let Some(windows) = windows.filter(|_| self.tiers.writes_bytes()) else { return };
        for group in self.points.other_numbers() {
            // A state is there only where a pass ends.
            let state = self.points.groups[group].kind == GroupKind::State;
            for place in if state { 0..0 } else { windows.done..windows.end } {
                if windows.open[group].has(place) {
                    continue;
                }
                let Some(slot) = self.blocks.try_take(Place::new(0, group)) else { break };
                windows.spare[group].insert(place, slot);
            }
        }
    }

    /// Begins the loads that a match needs, into slots for which there is room, and delays the plan
    /// until they end. The border of the match is a resume point on the first tier again if it is one
    /// below, or if the prompt leaves a known path or ends there. Returns all moves that bring what
    /// the match needs.
    pub(crate) fn load_windows(
        &mut self,
        windows: Option<&mut Windows>,
        path: &[BlockId],
        id: LeaseId,
        plan: &mut Plan,
        now: Nanos,
    ) -> Vec<MoveId> {
        let Some(windows) = windows else { return Vec::new() };
        if self.tiers.engine_owned() {
            return self.load_bound(windows, path, id, plan, now);
        }
        for PlannedLoad { from, place } in std::mem::take(&mut windows.loads) {
            let block = path[place as usize];
            self.copy_part(self.whole(MoveKind::Load, id, block), from, 0, now);
            self.blocks.unhold(from, [block]);
            self.blocks.hold(Place::new(0, from.group), [block]);
            windows.held[from.group].push(place);
            windows.held[from.group].sort_unstable();
        }
        self.raise_point(path);
        let moves = self.bringing_windows(windows, path);
        let ready = moves.iter().filter_map(|&id| self.moves.get(id)).map(|known| known.ready);
        plan.wait_until(ready.max().unwrap_or(0));
        if let Some(stay) = windows.here {
            self.add_point(path, path_border(path), stay);
        }
        moves
    }

    /// The moves that bring what a lease holds of a path to the first tier.
    pub(in crate::manager::request) fn bringing_windows(
        &self,
        windows: &Windows,
        path: &[BlockId],
    ) -> Vec<MoveId> {
        let mut moves = Vec::new();
        for (group, held) in windows.held.iter().enumerate() {
            let (here, layers) = (Place::new(0, group), self.points.layers(group));
            if self.blocks.table(here).arrivals() > 0 {
                let held = blocks_at(path, held);
                moves.extend(held.flat_map(|block| self.bringing(here, block, layers)));
            }
        }
        moves
    }

    /// Puts the resume point at the end of a path on the first tier too, if that has all it needs: it
    /// lacks what is still computed in holes.
    fn raise_point(&mut self, path: &[BlockId]) {
        let Some(&last) = path.last() else { return };
        if self.points.has(last)
            && !self.points.has_on(0, last)
            && self.can_resume(0, path, path_border(path))
        {
            self.hold_point(0, path, path_border(path));
        }
    }

    /// Gives the blocks that a request has computed within its match their slots, and lets go of what
    /// only they needed.
    pub(crate) fn place_computed(&mut self, id: LeaseId) {
        if self.tiers.engine_owned() {
            return;
        }
        let lease = self.lease_mut(id);
        let Some(mut windows) = lease.windows.take() else { return };
        let path = lease.path.blocks().to_vec();
        let (end, room) = (windows.done, path_room(lease));
        for group in self.points.other_numbers() {
            let places = windows.open[group].iter().map(|(place, _)| place);
            let places: Vec<u32> = places.take_while(|&place| place < end).collect();
            self.place_in_group(group, &mut windows, &path, places, end, room);
            windows.held[group].sort_unstable();
            self.slide(group, &mut windows, &path, end);
        }
        self.raise_point(&path[..end as usize]);
        if let Some(stay) = windows.here {
            self.add_point(&path, end, stay);
        }
        self.lease_mut(id).windows = Some(windows);
    }

    /// The block table of a lease in a group of layers, as [`Manager::slots`]. In a group after the
    /// first a slot on the first tier is one that the lease holds or writes. Its spare slots stay with
    /// it from then on.
    ///
    /// # Errors
    /// As [`Manager::slots`]; [`Error::Config`] if there is no such group.
    pub fn group_table(
        &mut self,
        id: LeaseId,
        tier: TierId,
        group: usize,
    ) -> Result<(usize, Vec<Slot>)> {
        let first = self.slots(id, tier)?;
        let groups = self.points.other_numbers().end;
        if group >= groups {
            return Err(Error::config(format!(
                "there is no group {group}, the manager keeps {groups} apart"
            )));
        }
        if group == 0 {
            return Ok(first);
        }
        let mut twice = Vec::new();
        if let (0, Some(windows)) = (tier, &mut self.lease_mut(id).windows) {
            for (place, slot) in windows.spare[group].take() {
                // A reservation may have taken another slot for the place.
                if place < windows.done || windows.open[group].has(place) {
                    twice.push(slot);
                } else {
                    windows.open[group].insert(place, slot);
                }
            }
        }
        for slot in twice {
            self.blocks.give_slot(Place::new(0, group), slot);
        }
        let here = Place::new(tier, group);
        Ok((1, self.window_table(&self.leases[&id], here, first.1.len())))
    }

    fn window_table(&self, lease: &Lease, here: Place, blocks: usize) -> Vec<Slot> {
        let Place { tier, group } = here;
        let windows = lease.windows.as_ref();
        let held = windows.map_or(&[][..], |windows| &windows.held[group]);
        let named = |place| {
            let bound = windows.and_then(|windows| windows.bound[group].get(&place));
            bound.map_or(NO_SLOT, |&private| self.private_slots[private].slot)
        };
        let slot = |(place, block): (u32, Option<&BlockId>)| {
            if tier == 0 && self.tiers.engine_owned() {
                return named(place);
            }
            let has = tier > 0 || held.binary_search(&place).is_ok();
            if let Some(&block) = block.filter(|_| has) {
                let here = self.residency(here, block);
                return if here.state == ResidencyState::Bad { NO_SLOT } else { here.slot };
            }
            let open = windows.filter(|_| tier == 0).map(|windows| &windows.open[group]);
            open.and_then(|open| open.get(place)).unwrap_or(NO_SLOT)
        };
        let path = lease.path.blocks();
        let places = path.iter().map(Some).chain(std::iter::repeat(None)).take(blocks);
        (0..).zip(places).map(slot).collect()
    }

    /// The moves that still read slots which a lease is to write in groups after the first.
    pub(crate) fn window_waits<'a>(
        &'a self,
        lease: &'a Lease,
    ) -> impl Iterator<Item = MoveId> + 'a {
        let slots = lease.windows.iter().flat_map(|windows| windows.slots());
        slots.flat_map(|(group, slot)| self.blocks.waits(Place::new(0, group), slot))
    }

    /// Gives all slots and holds of a lease back.
    pub(crate) fn close_windows(&mut self, windows: Option<&mut Windows>, path: &[BlockId]) {
        let Some(windows) = windows else { return };
        for (group, held) in windows.held.iter_mut().enumerate() {
            self.blocks.unhold(Place::new(0, group), blocks_at(path, held));
            held.clear();
        }
        for (group, slot) in windows.take_slots() {
            self.blocks.give_slot(Place::new(0, group), slot);
        }
        for private in windows.bound.iter_mut().flat_map(std::mem::take) {
            self.unref_private(private.1);
        }
        for PlannedLoad { from, place } in windows.loads.drain(..) {
            self.blocks.unhold(from, [path[place as usize]]);
        }
    }

    /// Gives the blocks that a lease has committed their slots, makes its borders resume points, and
    /// releases what no later token attends to.
    pub(crate) fn place_committed(&mut self, id: LeaseId) {
        let lease = self.lease_mut(id);
        let Some(mut windows) = lease.windows.take() else { return };
        let path = lease.path.blocks().to_vec();
        let (end, room) = (path_border(&path), path_room(lease));
        if self.tiers.engine_owned() {
            self.store_committed(&mut windows, &path);
            self.lease_mut(id).windows = Some(windows);
            self.carry_out();
            return;
        }
        let new = windows.done..end;
        for group in self.points.other_numbers() {
            self.place_in_group(group, &mut windows, &path, new.clone(), end, room);
        }
        let reached = windows.borders.partition_point(|&(border, _)| border <= end);
        for (border, stay) in windows.borders.drain(..reached) {
            self.add_point(&path, border, stay);
        }
        for group in self.points.other_numbers() {
            self.slide(group, &mut windows, &path, end);
        }
        windows.done = end;
        self.lease_mut(id).windows = Some(windows);
    }

    /// The same for one group: a slot for each new block that a border or the end needs, and for
    /// others as long as room is free.
    fn place_in_group(
        &mut self,
        number: GroupId,
        windows: &mut Windows,
        path: &[BlockId],
        places: impl IntoIterator<Item = u32>,
        end: u32,
        room: u32,
    ) {
        let (group, here) = (self.points.groups[number], Place::new(0, number));
        let needed = group.needed_at(windows.ends(end), self.points.block_tokens, 0..end);
        for place in places {
            let block = path[place as usize];
            let wanted = needed.contains(place);
            let (open, spare) = (&mut windows.open[number], &mut windows.spare[number]);
            let own = open.remove(place).or_else(|| spare.remove(place));
            match (self.residency(here, block).state, own) {
                (ResidencyState::Absent, own) => {
                    let slot = own.or_else(|| self.late_slot(number, windows, path, end, wanted));
                    let Some(slot) = slot else { continue };
                    self.blocks.put(here, block, slot);
                }
                // The same bytes are there, and a later block of the answer gets the slot.
                (ResidencyState::Resident, Some(slot)) => {
                    let open = &mut windows.open[number];
                    let mut places = end..room;
                    let next = places.find(|&place| !open.has(place));
                    if let Some(next) =
                        next.filter(|_| place >= windows.end && self.tiers.writes_bytes())
                    {
                        open.insert(next, slot);
                    } else {
                        self.blocks.give_slot(here, slot);
                    }
                }
                // Moves may still write the slot that the block has: the lease keeps its own.
                (_, Some(slot)) if self.tiers.writes_bytes() => {
                    windows.open[number].insert(place, slot);
                    continue;
                }
                (_, Some(slot)) => self.blocks.give_slot(here, slot),
                (_, None) => {}
            }
            if wanted && self.blocks.expects(here, block) {
                self.blocks.hold(here, [block]);
                windows.held[number].push(place);
            }
        }
    }

    /// A slot for a committed block that got none before: where no bytes are written, one of those
    /// that a lease needs no more, or a free or released one if it is `wanted`.
    fn late_slot(
        &mut self,
        number: GroupId,
        windows: &mut Windows,
        path: &[BlockId],
        end: u32,
        wanted: bool,
    ) -> Option<Slot> {
        // A state is there only where a pass ends.
        let state = self.points.groups[number].kind == GroupKind::State;
        if self.tiers.writes_bytes() || (state && !wanted) {
            return None;
        }
        if !wanted {
            return self.blocks.try_take(Place::new(0, number));
        }
        self.slide(number, windows, path, end);
        self.take_unheld_slot(number)
    }

    /// A slot that is free or released.
    pub(in crate::manager::request) fn take_unheld_slot(&mut self, group: GroupId) -> Option<Slot> {
        loop {
            if let Some(slot) = self.blocks.try_take(Place::new(0, group)) {
                return Some(slot);
            }
            if let Some(id) = self.spare_lease(LeaseId::MAX).map(|lease| lease.id) {
                self.give_spare_slots(&[id]);
            } else if !self.blocks.take_released(0, 1) {
                return None;
            }
        }
    }

    /// Releases what neither the end of a lease nor one of its borders needs.
    fn slide(&mut self, number: GroupId, windows: &mut Windows, path: &[BlockId], end: u32) {
        let (size, here) = (self.points.block_tokens, Place::new(0, number));
        let needed = self.points.groups[number].needed_at(windows.ends(end), size, 0..u32::MAX);
        let blocks = &mut self.blocks;
        let mut passed: SmallVec<[BlockId; 32]> = SmallVec::new();
        windows.held[number].retain(|&place| {
            let stays = needed.contains(place);
            if !stays {
                passed.push(path[place as usize]);
            }
            stays
        });
        blocks.unhold(here, passed);
        windows.open[number].retain(|place, slot| {
            let stays = place >= end || needed.contains(place);
            if !stays {
                blocks.give_slot(here, slot);
            }
            stays
        });
    }

    /// Keeps the end of an answer as a resume point, and gives all slots and holds back.
    pub(crate) fn end_windows(&mut self, lease: &mut Lease) {
        let Some(mut windows) = lease.windows.take() else { return };
        let path = lease.path.blocks();
        let end = path_border(path);
        let regular = self.points.every == 0;
        // Holes that were not computed are still there.
        if regular && windows.done == end && !lease.unconfirmed {
            self.add_point(path, end, Stay::Newest);
        }
        self.close_windows(Some(&mut windows), path);
    }
}
