//! Placing: assigns slots to blocks at their commit, in all groups.
//!
//! ```text
//!   match   border          branch            end of the prompt
//!   |-------|----------------|-----------------|------ answer
//!    [held ]            [ window of a point ]  [ window of a point ]   the rest: free slots
//! ```
//!
//! Invariant: a lease holds the needs of its border on the first tier. Cost: O(committed blocks ·
//! groups).

use crate::block::{BlockId, GroupId, LeaseId, Place, Slot, TierId};
use crate::group::GroupKind;
use crate::manager::Manager;
use crate::manager::points::Stay;
use crate::manager::request::life::commit::Committed;
use crate::manager::request::matching::path::path_border;
use crate::manager::request::slots::lease_slots::{LeaseGroups, OpenSlot};
use crate::manager::request::slots::next_slots::path_room;
use crate::private_slots::{PrivateSlot, PrivateSlotId};
use crate::tier::{Residency, ResidencyState};
use crate::time::Nanos;

impl Manager {
    /// Makes open slots the residencies of new blocks. New blocks are pinned, so they have no entry
    /// to refresh. Stops at the first private slot. Returns the number of slots before it.
    pub(in crate::manager::request) fn place_open(
        &mut self,
        blocks: &[BlockId],
        open: &[OpenSlot],
        now: Nanos,
    ) -> usize {
        let settled = self.blocks.put_in(blocks, open.iter().map_while(|open| open.plain()));
        self.on_resident(0, &blocks[..settled]);
        if self.tiers.writes_through(0) {
            for run in self.runs(&blocks[..settled]) {
                self.write_run(0, run, now);
            }
        }
        settled
    }

    /// Offers a private slot to the trie as the block's residency. Returns the slot if the lease
    /// keeps it: an engine's slot, or a reported duplicate.
    pub(in crate::manager::request) fn offer_private(
        &mut self,
        block: BlockId,
        private: PrivateSlotId,
        now: Nanos,
        out: &mut Committed,
    ) -> Option<PrivateSlotId> {
        // The engine keeps its slot, so only the tiers below are managed here.
        if self.tiers.engine_owned() {
            self.forget_bad_copies(block);
            if self.ahead.is_empty() || !self.adopt_ahead(block, private, now) {
                self.write_through(0, block, Some(private), now);
            } else {
                out.ahead += 1;
            }
            Some(private)
        } else if self.install(0, block, private) {
            self.write_through(0, block, None, now);
            None
        } else {
            let held = self.private_slots[private];
            out.duplicate.push(self.private_slot(private, held.layers.lo));
            out.canonical.push(self.trie().handle(block));
            self.meter.requested.duplicates += 1;
            Some(private)
        }
    }

    /// Makes a private slot the block's residency if the layers are absent on the tier.
    ///
    /// Also replaces an idle residency on the first tier used only by this lease, so that a lease
    /// takes no more slots than its tokens need.
    pub(crate) fn install(&mut self, tier: TierId, block: BlockId, private: PrivateSlotId) -> bool {
        let PrivateSlot { slot, layers, refs, busy, .. } = self.private_slots[private];
        let residency = self.residency(tier, block);
        let idle = residency.state == ResidencyState::Resident && residency.busy == 0;
        let replaces = idle && tier == 0 && self.node(block).refs == 1;
        let full =
            layers == self.all_layers() && (residency.state == ResidencyState::Absent || replaces);
        // With layer slots the two ranges may join.
        let grows = idle
            && self.tiers[tier].spec.layer_slots
            && !residency.have.covers(layers)
            && residency.have.join(layers).is_some();
        // A slot used by a fork or a move cannot change its owner.
        if refs > 1 || busy > 0 || !(full || grows) {
            return false;
        }
        self.private_slots.take(private);
        if full {
            if replaces {
                self.blocks.give_slots(tier, residency.slot, residency.have, true);
            }
            let state = ResidencyState::Resident;
            let residency = Residency { slot, have: layers, busy: 0, state };
            self.blocks.alter(tier, block, |known| *known = residency);
        } else {
            self.blocks.join_rows(tier, slot, residency.slot, layers, residency.have);
            let joined = residency.have.join(layers).expect("no gap");
            self.blocks.alter(tier, block, |residency| residency.have = joined);
        }
        self.forget_bad_copies(block);
        self.residency_changed(tier, block);
        true
    }

    /// Assigns slots in the groups after the first to the computed blocks within a request's match,
    /// and releases holds no longer needed.
    pub(crate) fn place_computed(&mut self, id: LeaseId) {
        if self.tiers.engine_owned() || !self.points.several() {
            return;
        }
        let lease = self.lease_mut(id);
        let room = path_room(lease);
        let mut groups = std::mem::take(&mut *lease.groups);
        let path = lease.path.blocks().to_vec();
        let end = groups.done;
        for group in self.points.other_numbers() {
            let places = groups[group].written.iter().map(|(place, _)| place);
            let places: Vec<u32> = places.take_while(|&place| place < end).collect();
            self.place_in_group(group, &mut groups, &path, places, end, room);
            groups[group].held.sort_unstable();
            self.slide(group, &mut groups, &path, end);
        }
        self.raise_point(0, &path[..end as usize]);
        if let Some(stay) = groups.match_stay {
            self.add_point(0, &path, end, stay);
        }
        *self.lease_mut(id).groups = groups;
    }

    /// Assigns slots in the groups after the first to the committed blocks of a lease.
    ///
    /// Then makes its borders resume points, and releases blocks that no later token attends to. An
    /// engine keeps its slots: the points are stored from there.
    pub(crate) fn place_committed(&mut self, id: LeaseId) {
        if !self.points.several() {
            return;
        }
        let lease = self.lease_mut(id);
        let room = path_room(lease);
        let mut groups = std::mem::take(&mut *lease.groups);
        let path = lease.path.blocks().to_vec();
        let end = path_border(&path);
        if !self.tiers.engine_owned() {
            let new = groups.done..end;
            for group in self.points.other_numbers() {
                self.place_in_group(group, &mut groups, &path, new.clone(), end, room);
            }
        }
        let reached = groups.borders.partition_point(|&(border, _)| border <= end);
        let mut kept: Vec<_> = groups.borders.drain(..reached).collect();
        // An engine takes back slots needed by the end before the lease ends there.
        let mut next = end;
        if self.tiers.engine_owned() {
            if self.points.every == 0 && kept.last().is_none_or(|&(border, _)| border < end) {
                kept.push((end, Stay::Newest));
            }
            next += 1;
        }
        for (border, stay) in kept {
            self.keep_border(&groups, &path, border, stay);
        }
        self.store_while_free(&groups, &path, groups.done..end);
        for group in self.points.other_numbers() {
            self.slide(group, &mut groups, &path, next);
        }
        groups.done = end;
        *self.lease_mut(id).groups = groups;
        self.carry_out();
    }

    /// Assigns slots in a single group: a slot for each new block needed by a border or the end,
    /// and for further blocks while room is free.
    fn place_in_group(
        &mut self,
        number: GroupId,
        groups: &mut LeaseGroups,
        path: &[BlockId],
        places: impl IntoIterator<Item = u32>,
        end: u32,
        room: u32,
    ) {
        let (group, group_place) = (self.points.groups[number], Place::new(0, number));
        let needed = group.needed_at(groups.ends(end), self.points.block_tokens, 0..end);
        for place in places {
            let block = path[place as usize];
            let wanted = needed.contains(place);
            let slots = &mut groups[number];
            let own = slots.written.remove(place).or_else(|| slots.spare.remove(place));
            let own = own.and_then(OpenSlot::plain);
            match (self.residency(group_place, block).state, own) {
                (ResidencyState::Absent, own) => {
                    let slot = own.or_else(|| self.late_slot(number, groups, path, end, wanted));
                    let Some(slot) = slot else { continue };
                    self.blocks.put(group_place, block, slot);
                }
                // The same bytes are resident, so a later block of the answer gets the slot.
                (ResidencyState::Resident, Some(slot)) => {
                    let next = (end..room).find(|&place| !groups[number].written.has(place));
                    let next = next.filter(|_| place >= groups.end && self.tiers.writes_bytes());
                    if let Some(next) = next {
                        groups[number].written.insert(next, OpenSlot::Plain(slot));
                    } else {
                        self.blocks.give_slot(group_place, slot);
                    }
                }
                // Moves may still write the block's slot, so the lease keeps its own slot.
                (_, Some(slot)) if self.tiers.writes_bytes() => {
                    groups[number].written.insert(place, OpenSlot::Plain(slot));
                    continue;
                }
                (_, Some(slot)) => self.blocks.give_slot(group_place, slot),
                (_, None) => {}
            }
            if wanted && self.blocks.expects(group_place, block) {
                self.blocks.hold(group_place, [block]);
                groups[number].held.push(place);
            }
        }
    }

    /// A slot for a committed block without a slot, if no bytes are written: a slot the lease no
    /// longer needs, or, if `wanted`, a free or released slot.
    fn late_slot(
        &mut self,
        number: GroupId,
        groups: &mut LeaseGroups,
        path: &[BlockId],
        end: u32,
        wanted: bool,
    ) -> Option<Slot> {
        // A state exists only at the end of a pass.
        let state = self.points.groups[number].kind == GroupKind::State;
        if self.tiers.writes_bytes() || (state && !wanted) {
            return None;
        }
        if !wanted {
            return self.blocks.try_take(Place::new(0, number));
        }
        self.slide(number, groups, path, end);
        self.take_unheld_slot(number)
    }

    /// Releases the blocks of a path that neither the border `end` nor any border of a lease needs.
    fn slide(&mut self, number: GroupId, groups: &mut LeaseGroups, path: &[BlockId], end: u32) {
        let size = self.points.block_tokens;
        let needed = self.points.groups[number].needed_at(groups.ends(end), size, 0..u32::MAX);
        let slots = &mut groups[number];
        let passed = slots.held.extract_if(.., |place| !needed.contains(*place));
        self.blocks.unhold(Place::new(0, number), passed.map(|place| path[place as usize]));
        let end = path_border(path);
        for open in slots.written.take_unless(|place| place >= end || needed.contains(place)) {
            self.close_open(number, open);
        }
    }
}
