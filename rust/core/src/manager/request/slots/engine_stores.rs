//! Stores from slots that an engine owns, before it takes them back.
//!
//! The first tier has no residency then, so blocks are written one tier down when they are committed or,
//! at the latest, when their lease ends. A resume point is on the tier below, too: it is stored when its
//! border is committed, since the engine takes slots back that no token attends to. Invariant: only slots
//! that the engine has named and written are read. Cost: O(path) per call.

use crate::block::{BlockId, LeaseId, NO_SLOT, Place};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::points::Stay;
use crate::manager::request::matching::path::path_border;
use crate::manager::request::slots::lease_slots::{LeaseGroups, OpenSlot};
use crate::time::{Nanos, Stamp};
use crate::transfer::{Endpoint, MoveKind};

impl Manager {
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
        // The end of the path becomes a resume point.
        let lease = &self.leases[&id];
        let end = path_border(lease.path.blocks());
        // Slots that loads still write have no valid bytes.
        let there = self.awaits.of(id).is_empty();
        if self.points.every == 0 && lease.groups.done == end && end > 0 && there {
            let (groups, path) = (lease.groups.clone(), lease.path.blocks().to_vec());
            self.store_border(&groups, &path, end, Stay::Newest, now);
        }
    }

    /// Makes a border that a lease has committed a resume point.
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

    /// Makes a border a resume point on the tier below, if the engine has named all that the tier
    /// lacks and there is room.
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
        let (mut there, mut lacking) = (Vec::new(), Vec::new());
        for (number, group) in points.others() {
            let below = Place::new(1, number);
            for place in group.needed(border, points.block_tokens).iter() {
                let block = path[place as usize];
                if self.blocks.expects(below, block) {
                    there.push((below, block));
                    continue;
                }
                let private = groups[number].written.get(place).and_then(OpenSlot::private);
                let named = private.filter(|&id| self.private_slots[id].slot != NO_SLOT);
                let free = self.residency(below, block).slot == NO_SLOT;
                // Bytes that cannot be read, or a failed move that may still write them.
                let Some(private) = named.filter(|_| free) else { return };
                lacking.push((below, block, private));
                wanted[number] += 1;
            }
        }
        // A block that is there must not make room for the rest.
        for &(below, block) in &there {
            self.blocks.hold(below, [block]);
        }
        if self.make_soft_room(Wanted { tier: 1, slots: &wanted }, &[], now) {
            for (below, block, private) in lacking {
                let slot = self.private_slots[private].slot;
                let src = Endpoint::private(Place::new(0, below.group), slot, private);
                let dst = Endpoint::here(below, self.blocks.take_slot(below).slot);
                self.copy_slot(self.whole(MoveKind::Store, 0, block), src, dst, now);
            }
            self.add_point(1, path, border, stay);
        }
        for (below, block) in there {
            self.blocks.unhold(below, [block]);
        }
        let last = path[border as usize - 1];
        if self.tiers.writes_through(1) && self.points.has_on(1, last) {
            self.copy_point(1, last, now);
        }
    }
}
