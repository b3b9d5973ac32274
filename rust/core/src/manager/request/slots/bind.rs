//! Bind: names the slots of an engine's first tier, by place on a lease's path.
//!
//! Invariant: all errors are found before the first change. The engine may name a slot taken back
//! from a different lease or group: the stores that read it are issued before any write. Cost:
//! O(slots) per call, and O(moves in flight).

use rustc_hash::FxHashMap;

use crate::block::{GroupId, LeaseId, NO_SLOT, Slot};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::request::life::lease::Lease;
use crate::manager::request::slots::lease_slots::OpenSlot;
use crate::private_slots::PrivateSlotId;
use crate::transfer::End;

impl Manager {
    /// Names the slots of an engine's tier: `slots[i]` has block `first + i` of the lease's path.
    /// Queues loads that waited for a name.
    ///
    /// # Errors
    /// [`Error::Config`] if the first tier is not the engine's or a slot is bound already.
    pub fn bind(&mut self, id: LeaseId, first: usize, slots: &[Slot]) -> Result<()> {
        self.bind_group(id, first, slots, 0)
    }

    /// Names the slots of an engine's tier in a group of layers.
    ///
    /// # Errors
    /// The errors of [`Manager::bind`]. [`Error::Config`] for a nonexistent group.
    pub fn bind_group(
        &mut self,
        id: LeaseId,
        first: usize,
        slots: &[Slot],
        group: usize,
    ) -> Result<()> {
        let lease = self.active(id)?;
        if !self.tiers.engine_owned() {
            return Err(Error::config("bind on a first tier whose owner is not 'engine'"));
        }
        let end = first
            .checked_add(slots.len())
            .ok_or_else(|| Error::config(format!("bind from block {first}")))?;
        let next = lease.path.len() + lease.groups[0].written.len();
        if first > next {
            return Err(Error::config(format!(
                "bind from block {first}, lease {id} has {next} blocks"
            )));
        }
        if let Some(at) = slots.iter().position(|&slot| slot == NO_SLOT) {
            return Err(Error::config(format!("slot {at} of bind is {NO_SLOT}, which names none")));
        }
        self.check_group(group)?;
        let mut new = 0;
        for (at, &slot) in (first..).zip(slots) {
            let private = Self::private_of(lease, group, at);
            let known = private.map_or(NO_SLOT, |private| self.private_slots[private].slot);
            if known != NO_SLOT && known != slot {
                let of = if group > 0 { format!(" in group {group}") } else { String::new() };
                return Err(Error::config(format!(
                    "block {at} of lease {id} is bound to slot {known}{of}, not {slot}"
                )));
            }
            new += usize::from(private.is_none());
        }
        self.check_memory(new)?;
        let mut bound: FxHashMap<PrivateSlotId, Slot> = FxHashMap::default();
        for (at, &slot) in (first..end).zip(slots) {
            let private = self.private_at(id, group, at);
            self.private_slots.set_slot(private, slot);
            bound.insert(private, slot);
        }
        self.name_moves(&bound);
        Ok(())
    }

    /// Forgets the slots of blocks before a place in a group after the first: the engine may have
    /// taken some of them back, so no later commit stores them.
    ///
    /// # Errors
    /// [`Error::Config`] if the first tier is not the engine's, or `group` is the first group or
    /// nonexistent.
    pub fn unbind(&mut self, id: LeaseId, before: usize, group: usize) -> Result<()> {
        self.active(id)?;
        if !self.tiers.engine_owned() {
            return Err(Error::config("unbind on a first tier whose owner is not 'engine'"));
        }
        self.check_group(group)?;
        if group == 0 {
            return Err(Error::config("unbind in group 0, whose blocks a lease keeps"));
        }
        let slots = &mut self.lease_mut(id).groups[group];
        for open in slots.written.take_unless(|place| place as usize >= before) {
            self.close_open(group, open);
        }
        Ok(())
    }

    /// Names the slots of planned moves, which know only the private slot.
    fn name_moves(&mut self, bound: &FxHashMap<PrivateSlotId, Slot>) {
        let named = |end: End| match end {
            End::PrivateSlot(private) => bound.get(&private).copied(),
            End::Resident | End::Leaving | End::Open => None,
        };
        for known in self.moves.values_mut() {
            known.dst_slot = named(known.to).unwrap_or(known.dst_slot);
            known.src_slot = named(known.from).unwrap_or(known.src_slot);
        }
        self.moves.unpark(self.clock.last());
    }

    /// The private slot of a place on a lease's path or after it, or `None`.
    fn private_of(lease: &Lease, group: GroupId, at: usize) -> Option<PrivateSlotId> {
        match lease.path.get(at) {
            Some(step) if group == 0 => step.private,
            _ => lease.groups[group].written.get(u32::try_from(at).ok()?)?.private(),
        }
    }

    /// The private slot of a place on a lease's path or after it. Makes it if necessary.
    fn private_at(&mut self, id: LeaseId, group: GroupId, at: usize) -> PrivateSlotId {
        if let Some(known) = Self::private_of(&self.leases[&id], group, at) {
            return known;
        }
        let private = self.new_bound(group);
        let lease = self.lease_mut(id);
        if group == 0 && at < lease.path.len() {
            lease.path.change(at, |step| step.private = Some(private));
        } else {
            let place = u32::try_from(at).expect("fewer than 2^32 blocks");
            lease.groups[group].written.insert(place, OpenSlot::Private(private));
        }
        private
    }

    /// A slot of a group, to be named by the engine.
    pub(in crate::manager::request) fn new_bound(&mut self, group: GroupId) -> PrivateSlotId {
        self.private_slots.add(0, NO_SLOT, self.points.layers(group))
    }
}
