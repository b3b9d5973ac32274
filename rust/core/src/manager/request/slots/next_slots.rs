//! Next slots: room that a lease takes for the tokens after its path, in all groups.
//!
//! ```text
//!   prompt               end                    last block that a reservation fills
//!   |---------------------|----------|----------|--------|
//!    slots that borders    windows: as far as a token attends
//!    need                  states: the next one [1], and one more that takes its place [2]
//! ```
//!
//! A commit gives the slot of the next state to its block. The one before is free then, unless a
//! resume point stays at the end that the lease leaves: a second slot is for that.
//! Invariant: a lease has a slot for its next state as long as it has room for tokens after its prompt. Cost:
//! O(slots taken).

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, GroupId, LeaseId, Place, Slot};
use crate::error::Result;
use crate::group::{Group, GroupKind};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::request::life::lease::Lease;
use crate::manager::request::slots::window_slots::{LATER, Windows, path_border};
use crate::time::Nanos;

impl Manager {
    /// Takes room again for blocks that a lease has lost: `lost` blocks after its path, or as many as
    /// its prompt lacks. Without room in all groups it has none, and has to reserve.
    pub(crate) fn reopen_groups(&mut self, id: LeaseId, lost: usize, now: Nanos) {
        let lease = &self.leases[&id];
        let prompt = lease.windows.as_ref().map_or(0, |windows| windows.end as usize);
        let more = lost.max(prompt.saturating_sub(lease.path.len() + lease.open.len()));
        let written = (lease.open.len() + more) * self.block_tokens();
        let places = self.unopened(lease, written);
        if self.reserve_groups(id, more, places, now).is_ok() {
            let open = self.new_open_slots(more);
            self.lease_mut(id).open.extend(open);
            return;
        }
        // With one group it keeps those that it has.
        let lease = self.lease_mut(id);
        let Some(windows) = &mut lease.windows else { return };
        let slots = windows.take_slots();
        let open = std::mem::take(&mut lease.open);
        for open in open {
            self.close_open(open);
        }
        for (group, slot) in slots {
            self.blocks.give_slot(Place::new(0, group), slot);
        }
    }

    /// Places for which a lease takes slots if its next tokens fill the last block up to `written`
    /// tokens, without those that have one, by group.
    pub(crate) fn unopened(&self, lease: &Lease, written: usize) -> Vec<Vec<u32>> {
        let Some(windows) = &lease.windows else { return Vec::new() };
        if !self.tiers.writes_bytes() {
            return Vec::new();
        }
        let path = lease.path.blocks();
        let first = path_border(path);
        let most = u32::try_from(written.div_ceil(self.block_tokens())).unwrap_or(u32::MAX);
        let end = first.saturating_add(most);
        let prompt = first..windows.end.clamp(first, end);
        let lacks = |(number, group): (GroupId, &Group)| {
            let state = group.kind == GroupKind::State;
            let more = if state { 0 } else { end - prompt.end };
            let mut places = self.window_places(group, &windows.borders, prompt.clone(), more);
            places.retain(|&place| !windows.open[number].has(place));
            if state {
                let next = self.state_place(windows, first, written);
                places.extend(self.lacking_states(number, windows, path, prompt.end..end, next));
            }
            places
        };
        std::iter::once(Vec::new()).chain(self.points.others().map(lacks)).collect()
    }

    /// The place on a path of the next state that a lease writes: that of the last block which the
    /// next tokens fill, or of the one which they begin. Inside the prompt passes end at borders only, so
    /// it is after the prompt.
    fn state_place(&self, windows: &Windows, first: u32, written: usize) -> u32 {
        let full = u32::try_from(written / self.block_tokens()).unwrap_or(u32::MAX);
        first.saturating_add(full.saturating_sub(1)).max(windows.end)
    }

    /// Places for the slots of next states that a lease lacks, if it is to write the blocks `after` its
    /// prompt and its path, the `next` state at the end of one of them.
    fn lacking_states(
        &self,
        group: GroupId,
        windows: &Windows,
        path: &[BlockId],
        after: Range<u32>,
        next: u32,
    ) -> impl Iterator<Item = u32> {
        let end = windows.held[group]
            .last()
            .filter(|&&place| place >= windows.end && place + 1 == path_border(path));
        // No point holds it: its slot is free once the next state is written.
        let here = Place::new(0, group);
        let own = end.is_some_and(|&end| self.blocks.holds(here, path[end as usize]) == 1);
        let open = &windows.open[group];
        let has = open.iter().filter(|&(place, _)| place >= after.start).count();
        let wanted = after.len().min(if own { 1 } else { 2 }).saturating_sub(has);
        [next, LATER].into_iter().filter(|&place| !open.has(place)).take(wanted)
    }

    /// Moves the slot of the next state of a lease to the block at whose end it is written.
    pub(crate) fn place_states(&mut self, id: LeaseId, written: usize) {
        if !self.tiers.writes_bytes() {
            return;
        }
        let Some(mut windows) = self.lease_mut(id).windows.take() else { return };
        let first = path_border(self.leases[&id].path.blocks());
        let next = self.state_place(&windows, first, written);
        let begin = first.max(windows.end);
        let groups = &self.points.groups;
        for (_, open) in
            groups.iter().zip(&mut windows.open).filter(|(group, _)| group.kind == GroupKind::State)
        {
            let mut slots: SmallVec<[Slot; 2]> = SmallVec::new();
            while let Some(slot) = open.next_from(begin).and_then(|place| open.remove(place)) {
                slots.push(slot);
            }
            for (place, slot) in [next, LATER].into_iter().zip(slots) {
                open.insert(place, slot);
            }
        }
        self.lease_mut(id).windows = Some(windows);
    }

    /// Makes room for more blocks of a lease in all groups, and takes slots at these places in the
    /// groups after the first.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing has changed then.
    pub(crate) fn reserve_groups(
        &mut self,
        id: LeaseId,
        more: usize,
        places: Vec<Vec<u32>>,
        now: Nanos,
    ) -> Result<()> {
        let mut wanted: Vec<u64> = places.iter().map(|places| places.len() as u64).collect();
        wanted.resize(wanted.len().max(1), 0);
        wanted[0] = self.tiers.units(0, self.all_layers()) * more as u64;
        self.make_room(&[Wanted { tier: 0, slots: &wanted }], &[], now)?;
        for (group, places) in places.into_iter().enumerate() {
            for place in places {
                let slot = self.blocks.take_slot(Place::new(0, group)).slot;
                let windows = self.lease_mut(id).windows.as_mut().expect("several groups");
                windows.open[group].insert(place, slot);
            }
        }
        Ok(())
    }

    /// Takes slots for the block after a path, into which the next tokens are written.
    pub(crate) fn open_next(&mut self, id: LeaseId) {
        if !self.tiers.writes_bytes() {
            return;
        }
        // Without room to grow they have no block in the first group either.
        if self.leases[&id].open.is_empty() {
            return;
        }
        self.place_states(id, 0);
        let Some(mut windows) = self.lease_mut(id).windows.take() else { return };
        for group in self.points.other_numbers() {
            for place in self.next_places(id, group, &windows) {
                if let Some(slot) = self.take_unheld_slot(group) {
                    windows.open[group].insert(place, slot);
                }
            }
        }
        self.lease_mut(id).windows = Some(windows);
    }

    /// Places after the path of a lease for whose slots in a group it takes what is free.
    fn next_places(&self, id: LeaseId, group: GroupId, windows: &Windows) -> SmallVec<[u32; 2]> {
        let end = windows.done;
        if self.points.groups[group].kind != GroupKind::State {
            return std::iter::once(end).filter(|&end| !windows.open[group].has(end)).collect();
        }
        let lease = &self.leases[&id];
        let (first, room) = (end.max(windows.end), path_room(lease));
        let path = lease.path.blocks();
        self.lacking_states(group, windows, path, first..room.max(first), first).collect()
    }
}

/// The border after all blocks that a lease has room for.
pub(in crate::manager::request) fn path_room(lease: &Lease) -> u32 {
    let blocks = lease.path.len() + lease.open.len();
    u32::try_from(blocks).expect("fewer than 2^32 blocks")
}
