//! Room of a request: the held blocks of its match and its new slots, in all groups.
//!
//! A request matches up to a border resumable in every group. The path pins the blocks of the first
//! group. In the later groups the lease holds the needs of the border, and loads missing parts from
//! tiers below. Invariant: all slots are available before the first is taken. Cost: O(blocks of the
//! match), and O(log n) per victim.

use std::ops::Range;

use crate::arrival::MoveIds;
use crate::block::{BlockId, LeaseId, MoveId, Part, Place};
use crate::error::Result;
use crate::group::Places;
use crate::manager::Manager;
use crate::manager::evict::leased::Matched;
use crate::manager::kinds::LoadMode;
use crate::manager::moves::load::{Load, Transit};
use crate::manager::request::life::acquire::Acquire;
use crate::manager::request::life::lease::Plan;
use crate::manager::request::matching::path::{LeasePath, PathBlock, blocks_at, path_border};
use crate::manager::request::matching::residency_scan::MissingBlock;
use crate::manager::request::slots::lease_slots::{LeaseGroups, NewPlaces, OpenSlot};
use crate::private_slots::PrivateSlotId;
use crate::time::Nanos;
use crate::transfer::{Endpoint, MoveKind};

/// Planned load of a block in a group after the first, by its place on the path.
#[derive(Clone, Copy, Debug)]
struct PlannedLoad {
    from: Place,
    place: u32,
}

/// New slots of a request.
#[derive(Debug)]
pub(in crate::manager::request) struct RequestSlots {
    /// Places of the blocks it writes.
    pub(in crate::manager::request) places: NewPlaces,
    loads: Vec<PlannedLoad>,
}

impl Manager {
    /// Holds the needs of a request's match in the groups after the first. Returns its new slots,
    /// for `open` blocks after its match.
    pub(in crate::manager::request) fn hold_match(
        &mut self,
        groups: &mut LeaseGroups,
        path: &[BlockId],
        open: usize,
        missing: &[MissingBlock],
    ) -> RequestSlots {
        let (from, open) =
            (path_border(path), u32::try_from(open).expect("fewer than 2^32 blocks"));
        let mut slots = RequestSlots {
            places: NewPlaces { first: from..from + open, others: Vec::new() },
            loads: Vec::new(),
        };
        if !self.points.several() {
            return slots;
        }
        // The engine makes room for itself.
        let end = if self.tiers.engine_owned() { from } else { groups.end.max(from) };
        let of = |(_, group)| self.places_of(group, &groups.borders, from..end, from + open - end);
        slots.places.others = self.points.others().map(of).collect();
        // An engine computes front to back: its match has no holes, only loads that it requests
        // later.
        let holes = missing.iter().filter(|miss| !miss.compute.is_empty());
        let holes = holes.filter(|_| !self.tiers.engine_owned());
        let holes = holes.map(|miss| u32::try_from(miss.at).expect("fewer than 2^32 blocks"));
        let holes: Vec<u32> = holes.collect();
        let needed = self.points.needed_over(&holes, path).into_iter().enumerate().skip(1);
        for (group, needed) in needed {
            let mut own = Vec::new();
            groups[group].held.reserve(needed.count());
            for place in needed.iter() {
                // The request writes the block in a new slot, because other leases may read the
                // copy on a tier.
                if holes.binary_search(&place).is_ok() {
                    own.push(place..place + 1);
                    continue;
                }
                let block = path[place as usize];
                let from = Place::new(self.nearest(Part { group, block }), group);
                // The source of a load stays below until the load has started.
                self.blocks.hold(from, [block]);
                if from.tier == 0 {
                    groups[group].held.push(place);
                } else {
                    slots.loads.push(PlannedLoad { from, place });
                }
            }
            let places = &mut slots.places.others[group - 1];
            own.extend(places.ranges());
            *places = Places::of(own);
        }
        slots
    }

    /// Ends the holds of a refused request.
    pub(in crate::manager::request) fn release_match(
        &mut self,
        groups: &mut LeaseGroups,
        slots: &RequestSlots,
        path: &[BlockId],
    ) {
        self.end_holds(groups, path);
        for &PlannedLoad { from, place } in &slots.loads {
            self.blocks.unhold(from, [path[place as usize]]);
        }
    }

    /// Makes room for the planned loads and computation and for further blocks, or changes nothing.
    /// Returns the transit slots for loads through host.
    pub(in crate::manager::request) fn room_for(
        &mut self,
        missing: &[MissingBlock],
        slots: &RequestSlots,
        groups: &LeaseGroups,
        path: &[BlockId],
        now: Nanos,
    ) -> Result<Transit> {
        let mut wanted = self.slots_for(&slots.places);
        // An engine provides the destination slots of its loads.
        if !self.tiers.engine_owned() {
            let lacking = missing.iter().filter(|miss| !miss.lacks.is_empty());
            wanted[0] += lacking.map(|miss| self.tiers.units(0, miss.lacks)).sum::<u64>();
            slots.loads.iter().for_each(|load| wanted[load.from.group] += 1);
        }
        let reclaimed = missing.iter().filter(|miss| miss.reclaim).count() as u64;
        let reclaimed = reclaimed * self.tiers.units(0, self.all_layers());
        wanted[0] += reclaimed;
        self.check_growth(&wanted, Matched { path, groups: groups.all() })?;
        wanted[0] -= reclaimed;
        // These slots look free to `make_room`: they drain.
        self.withhold(missing, true);
        let transit = self.open_transit(missing, &wanted, now);
        // Refused: the leaving copies may be promised again.
        if transit.is_err() {
            self.withhold(missing, false);
        }
        transit
    }

    /// Starts the loads needed by a match in groups after the first.
    ///
    /// Delays the plan until they end. The border of the match becomes a resume point on the first
    /// tier again if it is a point below, or if the prompt leaves a known path or ends there.
    /// Returns all moves that bring the needs of the match.
    pub(in crate::manager::request) fn load_match(
        &mut self,
        groups: &mut LeaseGroups,
        slots: &RequestSlots,
        path: &[BlockId],
        (id, load): (LeaseId, LoadMode),
        plan: &mut Plan,
        now: Nanos,
    ) -> Vec<MoveId> {
        let mut moves = Vec::new();
        if !self.points.several() {
            return moves;
        }
        let engine = self.tiers.engine_owned();
        for &PlannedLoad { from, place } in &slots.loads {
            let (block, group_place) = (path[place as usize], Place::new(0, from.group));
            if engine {
                let private = self.new_bound(from.group);
                groups[from.group].written.insert(place, OpenSlot::Private(private));
                if load == LoadMode::None {
                    groups.deferred.push((from.group, place));
                } else {
                    moves.push(self.load_part(id, (from, block), private, now));
                }
            } else {
                let own = &mut groups[from.group];
                self.copy_part(self.whole(MoveKind::Load, id, block), from, 0, now);
                self.blocks.hold(group_place, [block]);
                own.held.push(place);
                own.held.sort_unstable();
            }
            self.blocks.unhold(from, [block]);
        }
        moves.extend(self.bringing_held(groups, path));
        let ready = moves.iter().filter_map(|&id| self.moves.get(id)).map(|known| known.ready);
        plan.wait_until(ready.max().unwrap_or(0));
        if !engine {
            self.raise_point(0, path);
            if let Some(stay) = groups.match_stay {
                self.add_point(0, path, path_border(path), stay);
            }
        }
        moves
    }

    /// Starts to load a block of a group after the first into a slot named by the engine, now or
    /// later.
    fn load_part(
        &mut self,
        id: LeaseId,
        (from, block): (Place, BlockId),
        private: PrivateSlotId,
        now: Nanos,
    ) -> MoveId {
        let src = Endpoint::resident(from, self.residency(from, block).slot);
        let slot = self.private_slots[private].slot;
        let dst = Endpoint::private(Place::new(0, from.group), slot, private);
        self.copy_slot(self.whole(MoveKind::Load, id, block), src, dst, now)
    }

    /// Starts the deferred loads of a lease in groups after the first, for the blocks within a
    /// range of its match. Returns `None`, and starts no load, if a block has left all tiers.
    pub(in crate::manager::request) fn load_deferred(
        &mut self,
        id: LeaseId,
        within: &Range<usize>,
        now: Nanos,
    ) -> Option<MoveIds> {
        let lease = &self.leases[&id];
        let (path, deferred) = (lease.path.blocks(), &lease.groups.deferred);
        let mut parts = Vec::new();
        for &(group, place) in deferred.iter().filter(|at| within.contains(&(at.1 as usize))) {
            let block = path[place as usize];
            let mut places = (1..self.tiers.len()).map(|tier| Place::new(tier, group));
            let from = places.find(|&place| self.blocks.expects(place, block))?;
            let private = lease.groups[group].written.get(place).and_then(OpenSlot::private)?;
            parts.push((from, block, private));
        }
        self.lease_mut(id).groups.deferred.retain(|at| !within.contains(&(at.1 as usize)));
        let begin = |(from, block, private)| self.load_part(id, (from, block), private, now);
        let moves: MoveIds = parts.into_iter().map(begin).collect();
        self.awaits.add(id, moves.iter().copied());
        Some(moves)
    }

    /// The moves that bring a lease's held blocks in groups after the first to the first tier.
    pub(in crate::manager::request) fn bringing_held(
        &self,
        groups: &LeaseGroups,
        path: &[BlockId],
    ) -> Vec<MoveId> {
        let mut moves = Vec::new();
        for (group, slots) in groups.all().iter().enumerate() {
            let (group_place, layers) = (Place::new(0, group), self.points.layers(group));
            if self.blocks.table(group_place).arrivals() > 0 {
                let held = blocks_at(path, &slots.held);
                moves.extend(held.flat_map(|block| self.bringing(group_place, block, layers)));
            }
        }
        moves
    }

    /// Starts to load or compute the missing blocks of a path. Returns the moves of each block.
    pub(in crate::manager::request) fn begin_missing(
        &mut self,
        ask: &Acquire<'_>,
        id: LeaseId,
        missing: &[MissingBlock],
        path: &mut LeasePath,
        transit: &mut Transit,
        now: Nanos,
    ) -> Vec<MoveIds> {
        let mut moves = vec![MoveIds::new(); missing.len()];
        // Loads take the immediately free slots, because computation can wait for draining slots.
        let mut at = 0;
        while let Some(miss) = missing.get(at) {
            // A run from a single tier is loaded in a batch.
            if let Some(batch) = self.batch(&missing[at..], id) {
                for (id, moves) in self.start_batch(&batch, now).zip(&mut moves[at..]) {
                    moves.push(id);
                }
                at += batch.blocks.len();
                continue;
            }
            if miss.load {
                let begin = |step: &mut PathBlock| self.begin_load(miss, step, id, transit, now);
                moves[at] = path.change(miss.at, begin);
            }
            at += 1;
        }
        for at in
            (0..missing.len()).filter(|&at| !missing[at].load && !missing[at].lacks.is_empty())
        {
            let begin = |step: &mut PathBlock| {
                step.deferred = ask.load == LoadMode::None;
                self.begin_compute(&missing[at], step, id, transit, now)
            };
            moves[at] = path.change(missing[at].at, begin);
        }
        moves
    }

    /// Starts the loads of a block into its residency on the first tier, or into a private slot
    /// that the engine will name.
    pub(crate) fn begin_load(
        &mut self,
        miss: &MissingBlock,
        step: &mut PathBlock,
        id: LeaseId,
        transit: &mut Transit,
        now: Nanos,
    ) -> MoveIds {
        if self.tiers.engine_owned() {
            let private = self.new_private(0, miss.lacks);
            step.private = Some(private);
            step.fresh = true;
            return self.load_private(miss, miss.lacks, private, id, transit, now);
        }
        let row = self.blocks.take_slots(0, self.residency(0, miss.block).slot, miss.lacks);
        self.blocks.alter(0, miss.block, |residency| residency.slot = row);
        let mut moves = MoveIds::new();
        for (tier, layers) in miss.loads() {
            let load = Load { block: miss.block, from: tier, layers, lease: id };
            moves.extend(self.load_layers(load, transit, now, |manager, layer| {
                Endpoint::resident(0, manager.slot_of(0, miss.block, layer))
            }));
        }
        let bring: MoveIds = moves.iter().copied().filter(|&id| self.moves[id].dst == 0).collect();
        self.expect(0, miss.block, miss.lacks, &bring);
        moves
    }

    /// Gives a block to compute a private slot, and starts the loads of the layers above the last
    /// computed layer.
    fn begin_compute(
        &mut self,
        miss: &MissingBlock,
        step: &mut PathBlock,
        id: LeaseId,
        transit: &mut Transit,
        now: Nanos,
    ) -> MoveIds {
        let private = self.new_private(0, miss.lacks);
        step.private = Some(private);
        step.fresh = true;
        step.compute = miss.compute;
        self.load_private(miss, miss.lacks, private, id, transit, now)
    }
}
