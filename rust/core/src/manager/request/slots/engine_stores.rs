//! Stores from an engine's slots, before the engine takes them back.
//!
//! The first tier has no residency then, so blocks are written to the next tier at their commit or,
//! at the latest, at the end of their lease. Windows and states are written by the commit that
//! passes their block, since the engine takes back slots that no later token attends to:
//!
//! ```text
//!   commit           |<-------- new blocks -------->|
//!   window   .  .  . [ 4 ][ 5 ][ 6 ][ 7 ][ 8 ][ 9 ] |   2 blocks per border
//!                     free  free [border 8] [ end  ]    borders and end: room is made, they are
//!                                                       resume points; rest: while slots are free
//!   after it                                   [ 9 ]    needs of the next border stay named
//! ```
//!
//! The end is a point until a later point of the path replaces it. Invariant: a slot is read only
//! after the engine has named and written it, and before its reuse. Cost: O(path) per call.

use std::ops::Range;

use crate::block::{BlockId, LeaseId, NO_SLOT, Place, Slot};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::manager::request::slots::lease_slots::{LeaseGroups, OpenSlot};
use crate::private_slots::PrivateSlotId;
use crate::time::{Nanos, Stamp};
use crate::transfer::{Endpoint, MoveKind};

impl Manager {
    /// Writes blocks present only in the engine's slots to the next tier, before the engine takes
    /// them back.
    pub(crate) fn store_engine_blocks(&mut self, id: LeaseId, now: Nanos) {
        if !self.tiers.engine_owned() || !self.tiers.writes(0) || self.leases[&id].suspended() {
            return;
        }
        let exceptions: Vec<_> = self.leases[&id].path.exceptions().collect();
        for (_, step) in exceptions {
            // Slots still being written or not named yet have no valid bytes.
            let ready = !step.fresh && step.compute.is_empty();
            if let (Some(private), true) = (step.private, ready)
                && self.private_slots[private].slot != NO_SLOT
            {
                self.write_down(0, step.block, Some(private), Stamp::MAX, now);
            }
        }
    }

    /// Makes a committed border of a lease a resume point.
    pub(in crate::manager::request) fn keep_border(
        &mut self,
        groups: &LeaseGroups,
        path: &[BlockId],
        border: u32,
        stay: Stay,
    ) {
        if self.tiers.engine_owned() {
            self.store_border(groups, path, border, stay, self.clock.last());
        } else {
            self.add_point(0, path, border, stay);
        }
    }

    /// Makes a border a resume point on the tier below, if there is room and the engine has named
    /// all parts missing there.
    fn store_border(
        &mut self,
        groups: &LeaseGroups,
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
        let (mut resident, mut lacking) = (Vec::new(), Vec::new());
        for (number, group) in points.others() {
            for place in group.needed(border, points.block_tokens).iter() {
                let at = (Place::new(1, number), path[place as usize]);
                if self.blocks.expects(at.0, at.1) {
                    resident.push(at);
                    continue;
                }
                let Some(private) = self.storable(groups, at, place) else { return };
                lacking.push((at, private));
                wanted[number] += 1;
            }
        }
        // A block already there must not make room for the rest.
        for &(below, block) in &resident {
            self.blocks.hold(below, [block]);
        }
        if self.make_soft_room(Wanted { tier: 1, slots: &wanted }, &[], now) {
            let take = |&(at, _): &((Place, BlockId), _)| self.take_at_once(at.0);
            let slots: Vec<Slot> = lacking.iter().map_while(take).collect();
            if slots.len() == lacking.len() {
                for ((at, private), slot) in lacking.into_iter().zip(slots) {
                    self.store_part(at, private, slot, now);
                }
                self.add_point(1, path, border, stay);
            } else {
                for ((at, _), slot) in lacking.into_iter().zip(slots) {
                    self.blocks.give_slot(at.0, slot);
                }
            }
        }
        for (below, block) in resident {
            self.blocks.unhold(below, [block]);
        }
        let last = path[border as usize - 1];
        if self.tiers.writes_through(1) && self.points.has_on(1, last) {
            self.copy_point(1, last, now);
        }
    }

    /// The named slot of a block in a group after the first, for a store below.
    ///
    /// Returns `None` if the block has a slot on the tier below, also for unreadable bytes or bytes
    /// that a failed move may still write.
    fn storable(
        &self,
        groups: &LeaseGroups,
        (below, block): (Place, BlockId),
        place: u32,
    ) -> Option<PrivateSlotId> {
        let private = groups[below.group].written.get(place).and_then(OpenSlot::private);
        let named = private.filter(|&id| self.private_slots[id].slot != NO_SLOT);
        named.filter(|_| self.residency(below, block).slot == NO_SLOT)
    }

    /// Takes an immediately writable slot. A delayed store would read a slot the engine has already
    /// reused.
    fn take_at_once(&mut self, below: Place) -> Option<Slot> {
        let slot = self.blocks.try_take(below)?;
        if self.blocks.waits(below, slot).is_empty() {
            return Some(slot);
        }
        self.blocks.give_slot(below, slot);
        None
    }

    /// Starts to store a block of a group after the first in a slot of the tier below.
    fn store_part(
        &mut self,
        (below, block): (Place, BlockId),
        private: PrivateSlotId,
        slot: Slot,
        now: Nanos,
    ) {
        let from = self.private_slots[private].slot;
        let src = Endpoint::private(Place::new(0, below.group), from, private);
        let dst = Endpoint::resident(below, slot);
        self.copy_slot(self.whole(MoveKind::Store, 0, block), src, dst, now);
    }

    /// Stores the committed blocks of a path in groups after the first while the tier below has
    /// free slots: a prompt that later diverges here finds its windows there.
    pub(in crate::manager::request) fn store_while_free(
        &mut self,
        groups: &LeaseGroups,
        path: &[BlockId],
        new: Range<u32>,
    ) {
        if !self.tiers.engine_owned() || !self.tiers.writes(0) {
            return;
        }
        let now = self.clock.last();
        for group in self.points.other_numbers() {
            for place in new.clone() {
                let at = (Place::new(1, group), path[place as usize]);
                if self.blocks.expects(at.0, at.1) {
                    continue;
                }
                let Some(private) = self.storable(groups, at, place) else { continue };
                let Some(slot) = self.take_at_once(at.0) else { break };
                self.store_part(at, private, slot, now);
            }
        }
    }
}
