//! Next slots: room of a lease for the tokens after its path, in all groups.
//!
//! ```text
//!   prompt               end                    last block that a reservation fills
//!   |---------------------|----------|----------|--------|
//!    slots that borders    windows: as far as a token attends
//!    need                  states: the next one [1], and one more that takes its place [2]
//! ```
//!
//! A commit gives the slot of the next state to its block. The previous slot is then free, unless
//! the lease leaves a resume point there: the second slot is for this case. Invariant: a lease has
//! a slot for its next state as long as it has room for tokens after its prompt. Cost: O(slots
//! taken).

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, GroupId, LeaseId, Place, Slot};
use crate::error::Result;
use crate::group::{Group, GroupKind, Places};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::request::life::lease::Lease;
use crate::manager::request::matching::path::path_border;
use crate::manager::request::slots::lease_slots::{LATER, LeaseGroups, NewPlaces, OpenSlot};
use crate::time::Nanos;

impl Manager {
    /// Takes room again for lost blocks of a lease.
    ///
    /// These are `lost` blocks after its path, or the missing blocks of its prompt if there are
    /// more. With several groups, a lack of room in any group leaves it without room, and it has to
    /// reserve.
    pub(crate) fn reopen(&mut self, id: LeaseId, lost: usize, now: Nanos) {
        let lease = &self.leases[&id];
        let open = lease.groups[0].written.len();
        let more = lost.max((lease.groups.end as usize).saturating_sub(lease.path.len() + open));
        let places = self.unopened(lease, (open + more) * self.block_tokens());
        if self.open_places(id, &places, now).is_err() && self.points.several() {
            let mut groups = std::mem::take(&mut *self.lease_mut(id).groups);
            self.close_slots(&mut groups);
            *self.lease_mut(id).groups = groups;
        }
    }

    /// Places by group without a slot, if a lease's next tokens fill blocks up to `written` tokens.
    pub(in crate::manager::request) fn unopened(&self, lease: &Lease, written: usize) -> NewPlaces {
        let (groups, path) = (&lease.groups, lease.path.blocks());
        let first = path_border(path);
        let most = u32::try_from(written.div_ceil(self.block_tokens())).unwrap_or(u32::MAX);
        let end = first.saturating_add(most);
        let known = path_room(lease);
        let mut places = NewPlaces { first: known..end.max(known), others: Vec::new() };
        // If no bytes are written, a block of later groups gets its slot at its commit.
        if !self.tiers.writes_bytes() {
            return places;
        }
        let prompt = first..groups.end.clamp(first, end);
        let lacks = |(number, group): (GroupId, &Group)| {
            let state = group.kind == GroupKind::State;
            let more = if state { 0 } else { end - prompt.end };
            let places = self.places_of(group, &groups.borders, prompt.clone(), more);
            let places = groups[number].written.lacking(&places);
            if !state {
                return places;
            }
            let next = self.state_place(groups, first, written);
            let states = self.lacking_states(number, groups, path, prompt.end..end, next);
            Places::of(places.ranges().chain(states.map(|place| place..place + 1)))
        };
        places.others = self.points.others().map(lacks).collect();
        places
    }

    /// Makes room for slots of a lease at these places of each group, and takes them.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::error::Error::NoSpace). Nothing has changed then.
    pub(in crate::manager::request) fn open_places(
        &mut self,
        id: LeaseId,
        places: &NewPlaces,
        now: Nanos,
    ) -> Result<()> {
        let wanted = self.slots_for(places);
        if wanted.iter().all(|&slots| slots == 0) {
            return Ok(());
        }
        self.make_room(&[Wanted { tier: 0, slots: &wanted }], &[], now)?;
        let mut groups = std::mem::take(&mut *self.lease_mut(id).groups);
        self.take_places(&mut groups, places);
        *self.lease_mut(id).groups = groups;
        Ok(())
    }

    /// The place of the next state written by a lease.
    ///
    /// It is the last block filled by the next tokens, or the block they start. Inside the prompt
    /// passes end only at borders, so it is after the prompt.
    fn state_place(&self, groups: &LeaseGroups, first: u32, written: usize) -> u32 {
        let full = u32::try_from(written / self.block_tokens()).unwrap_or(u32::MAX);
        first.saturating_add(full.saturating_sub(1)).max(groups.end)
    }

    /// Missing places of a lease's next state slots, if it is to write the blocks `after` its
    /// prompt and its path, with the `next` state at the end of a block.
    fn lacking_states(
        &self,
        group: GroupId,
        groups: &LeaseGroups,
        path: &[BlockId],
        after: Range<u32>,
        next: u32,
    ) -> impl Iterator<Item = u32> {
        let end = groups[group]
            .held
            .last()
            .filter(|&&place| place >= groups.end && place + 1 == path_border(path));
        // No point holds it, so its slot is free once the next state is written.
        let group_place = Place::new(0, group);
        let own = end.is_some_and(|&end| self.blocks.holds(group_place, path[end as usize]) == 1);
        let written = &groups[group].written;
        let has = written.iter().filter(|&(place, _)| place >= after.start).count();
        let wanted = after.len().min(if own { 1 } else { 2 }).saturating_sub(has);
        [next, LATER].into_iter().filter(|&place| !written.has(place)).take(wanted)
    }

    /// Moves the slot of a lease's next state to the place of its block.
    pub(crate) fn place_states(&mut self, id: LeaseId, written: usize) {
        if !self.tiers.writes_bytes() {
            return;
        }
        let lease = &self.leases[&id];
        let first = path_border(lease.path.blocks());
        let next = self.state_place(&lease.groups, first, written);
        let begin = first.max(lease.groups.end);
        let lease = self.leases.get_mut(&id).expect("seen above");
        for (group, slots) in self.points.groups.iter().zip(lease.groups.all_mut()) {
            if group.kind == GroupKind::State {
                let moved = slots.written.take_unless(|place| place < begin);
                for (place, slot) in [next, LATER].into_iter().zip(moved) {
                    slots.written.insert(place, slot);
                }
            }
        }
    }

    /// Takes slots for the block after a path, for the next tokens.
    pub(crate) fn open_next(&mut self, id: LeaseId) {
        // Without room to grow they have no block in the first group either.
        let room = path_room(&self.leases[&id]);
        if !self.tiers.writes_bytes() || room == path_border(self.leases[&id].path.blocks()) {
            return;
        }
        self.place_states(id, 0);
        let mut groups = std::mem::take(&mut *self.lease_mut(id).groups);
        for group in self.points.other_numbers() {
            for place in self.next_places(&self.leases[&id], group, &groups, room) {
                if let Some(slot) = self.take_unheld_slot(group) {
                    groups[group].written.insert(place, OpenSlot::Plain(slot));
                }
            }
        }
        *self.lease_mut(id).groups = groups;
    }

    /// Places after the path of a lease with optional slots in a group, taken while slots are free.
    fn next_places(
        &self,
        lease: &Lease,
        group: GroupId,
        groups: &LeaseGroups,
        room: u32,
    ) -> SmallVec<[u32; 2]> {
        let end = groups.done;
        if self.points.groups[group].kind != GroupKind::State {
            return std::iter::once(end).filter(|&end| !groups[group].written.has(end)).collect();
        }
        let first = end.max(groups.end);
        let path = lease.path.blocks();
        self.lacking_states(group, groups, path, first..room.max(first), first).collect()
    }

    /// Takes a free or released slot.
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

    /// Takes free slots for the prompt's blocks between borders, after the request has its promised
    /// slots: speculative slots for a prompt that diverges later.
    pub(in crate::manager::request) fn take_spare_slots(&mut self, groups: &mut LeaseGroups) {
        if !self.tiers.writes_bytes() {
            return;
        }
        let places = groups.done..groups.end;
        for group in self.points.other_numbers() {
            // A state exists only at the end of a pass.
            let state = self.points.groups[group].kind == GroupKind::State;
            for place in if state { 0..0 } else { places.clone() } {
                if groups[group].written.has(place) {
                    continue;
                }
                let Some(slot) = self.blocks.try_take(Place::new(0, group)) else { break };
                groups[group].spare.insert(place, OpenSlot::Plain(slot));
            }
        }
    }

    /// Makes the spare slots of a lease permanent, in a group.
    pub(in crate::manager::request) fn keep_spare(&mut self, id: LeaseId, group: GroupId) {
        let mut twice: SmallVec<[OpenSlot; 4]> = SmallVec::new();
        let groups = &mut self.lease_mut(id).groups;
        for (place, slot) in std::mem::take(&mut groups[group].spare).iter() {
            // A reservation may have taken a second slot for the place.
            if place < groups.done || groups[group].written.has(place) {
                twice.push(slot);
            } else {
                groups[group].written.insert(place, slot);
            }
        }
        for slot in twice {
            self.close_open(group, slot);
        }
    }
}

/// The border after all blocks that a lease has room for.
pub(in crate::manager::request) fn path_room(lease: &Lease) -> u32 {
    let blocks = lease.path.len() + lease.groups[0].written.len();
    u32::try_from(blocks).expect("fewer than 2^32 blocks")
}
