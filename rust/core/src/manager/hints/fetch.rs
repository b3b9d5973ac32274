//! Prefetch hints: load blocks to a tier before a request needs them.
//!
//! After all blocks of a path, the windows and states of its resume border are loaded. Room is made
//! as for a request. A block in flight cannot be evicted, so at most a quarter of a tier's blocks
//! are in flight. Invariant: no block of the path is evicted for a later block. Cost: the cost of a
//! request's loads.

use crate::block::{BlockId, Layers, LeaseId, NO_MOVE, NO_SLOT, Part, Place, TierId};
use crate::hint::{Answer, HintCode, HintReply};
use crate::tier::ResidencyState;
use crate::time::Nanos;

use super::rejected;
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::moves::NewMove;
use crate::manager::request::matching::path::{PathBlock, path_border};
use crate::manager::request::matching::residency_scan::Prefill;
use crate::transfer::{Endpoint, MoveKind};

/// At most 1 / `ARRIVING_SHARE` of a tier's blocks may be in flight for prefetches.
const ARRIVING_SHARE: u64 = 4;

/// Lease id of moves without a waiting lease.
const NO_LEASE: LeaseId = NO_MOVE;

/// Result of a prefetch for a single block.
enum Fetched {
    /// Resident or in flight.
    Yes,
    /// Not loaded, with the reason.
    No(HintCode, &'static str),
}

impl Manager {
    /// Loads the blocks of a path, first to last.
    pub(super) fn fetch_path(
        &mut self,
        path: &[BlockId],
        tier: TierId,
        deadline: Option<Nanos>,
        now: Nanos,
    ) -> HintReply {
        if path.is_empty() {
            return rejected("no block of the path is cached");
        }
        let mut fetched = 0;
        let (mut code, mut why) = (HintCode::Accepted, "");
        // Pinned, so that no block is evicted for a later block.
        self.pin(path);
        for &block in path {
            let one = if tier == 0 {
                self.fetch_first(block, deadline, now)
            } else {
                self.fetch(block, tier, deadline, now)
            };
            match one {
                Fetched::Yes => fetched += 1,
                Fetched::No(kind, reason) => {
                    (code, why) = (kind, reason);
                    // Blocks after a hole of a leaf-only path would be useless.
                    if self.breaks(block) {
                        break;
                    }
                }
            }
        }
        if fetched == path.len() as u64 {
            self.fetch_windows(path, tier, now);
        }
        self.unpin(path, None);
        let left = path.len() as u64 - fetched;
        let answer = match (fetched, left) {
            (_, 0) => Answer::Accepted,
            (0, _) => Answer::Rejected,
            _ => Answer::Clipped,
        };
        let reason = if left > 0 { format!("{left} blocks stay: {why}") } else { String::new() };
        HintReply { answer, blocks: fetched, not_applied: left, code, reason }
    }

    /// Whether too many blocks are already in flight to a tier.
    fn crowded(&self, tier: TierId) -> bool {
        let arrivals = self.blocks.table(tier).arrivals() as u64;
        (arrivals + 1) * ARRIVING_SHARE > u64::from(self.tiers[tier].spec.blocks)
    }

    /// Whether layers loaded from a tier would miss a deadline.
    fn late(&self, from: TierId, layers: Layers, deadline: Option<Nanos>, now: Nanos) -> bool {
        let bytes = self.settings.layer_bytes * u64::from(layers.len());
        let ready = self.lanes.preview(self.tiers[from].read, bytes, now, layers.len()).end;
        deadline.is_some_and(|deadline| ready > deadline)
    }

    /// Starts the loads of a block to the first tier, as a request would.
    fn fetch_first(&mut self, block: BlockId, deadline: Option<Nanos>, now: Nanos) -> Fetched {
        if self.fully_resident(block) {
            return Fetched::Yes;
        }
        let mut missing = [self.find_missing(0, block, now)];
        // All of it is in flight for an earlier request.
        if missing[0].lacks.is_empty() {
            return Fetched::Yes;
        }
        self.decide_loads(&mut missing, now, Prefill::ALL);
        let [miss] = &missing;
        // Prefetches compute nothing, so all layers must be resident below.
        if !miss.load || !miss.compute.is_empty() {
            return Fetched::No(HintCode::Incomplete, "they cannot be loaded");
        }
        if miss.loads().any(|(from, layers)| self.late(from, layers, deadline, now)) {
            return Fetched::No(HintCode::Late, "they would arrive too late");
        }
        if self.crowded(0) {
            return Fetched::No(HintCode::Crowded, "a quarter of the tier is in flight already");
        }
        let units = self.tiers.units(0, miss.lacks);
        let Ok(mut transit) = self.open_transit(&missing, &[units], now) else {
            return Fetched::No(HintCode::NoRoom, "there is no room");
        };
        let mut step = PathBlock::shared(block);
        self.begin_load(&missing[0], &mut step, NO_LEASE, &mut transit, now);
        self.close_transit(transit);
        Fetched::Yes
    }

    /// Starts the loads of a full block to a lower tier, from the nearest tier below.
    fn fetch(
        &mut self,
        block: BlockId,
        tier: TierId,
        deadline: Option<Nanos>,
        now: Nanos,
    ) -> Fetched {
        let all = self.all_layers();
        // A copy above serves requests better than a copy here.
        if (0..=tier).any(|upper| self.expected(upper, block) == all) {
            return Fetched::Yes;
        }
        let full = |from: &TierId| {
            let residency = self.residency(*from, block);
            residency.state == ResidencyState::Resident
                && residency.have == all
                && self.transit(tier, *from).is_none()
        };
        let Some(from) = (tier + 1..self.tiers.len()).find(full) else {
            return Fetched::No(
                HintCode::Incomplete,
                "no tier that it reads from has them in full",
            );
        };
        // Completing a part could need layers from two tiers.
        if self.residency(tier, block).state != ResidencyState::Absent {
            return Fetched::No(HintCode::Incomplete, "a part of them is resident there");
        }
        if self.late(from, all, deadline, now) {
            return Fetched::No(HintCode::Late, "they would arrive too late");
        }
        if self.crowded(tier) {
            return Fetched::No(HintCode::Crowded, "a quarter of the tier is in flight already");
        }
        let units = self.tiers.units(tier, all);
        let wanted = Wanted { tier, slots: &[units] };
        if self.make_room(&[wanted], &[(from, block..block + 1)], now).is_err() {
            return Fetched::No(HintCode::NoRoom, "there is no room");
        }
        let row = self.blocks.take_slots(tier, self.residency(tier, block).slot, all);
        self.blocks.alter(tier, block, |residency| residency.slot = row);
        let mut moves = Vec::new();
        for layers in self.pieces(from, tier, None, all) {
            let dst = self.slot_of(tier, block, layers.lo);
            let new = NewMove {
                kind: MoveKind::Load,
                lease: NO_LEASE,
                block: Some(block),
                src: Endpoint::resident(from, self.slot_of(from, block, layers.lo)),
                dst: Endpoint::resident(tier, dst),
                layers,
                tokens: self.settings.block_tokens,
                deps: self.blocks.waits(tier, dst),
            };
            moves.push(self.add_move(new, now));
        }
        self.expect(tier, block, all, &moves);
        Fetched::Yes
    }

    /// Loads the needs of a path's longest border to a tier, if there is room. If the border is a
    /// resume point on any tier, it then becomes a point on this tier.
    fn fetch_windows(&mut self, path: &[BlockId], tier: TierId, now: Nanos) {
        let path = &path[..self.longest_border(path, self.tiers.len()) as usize];
        let border = path_border(path);
        let needs = self.points.needs(path, border);
        let (lacking, resident): (Vec<_>, Vec<_>) =
            needs.into_iter().partition(|&part| self.nearest(part) > tier);
        // The slot has unreadable bytes, or a failed move may still write it.
        let free = |&Part { group, block }: &Part| {
            self.residency(Place::new(tier, group), block).slot == NO_SLOT
        };
        if !lacking.iter().all(free) {
            return;
        }
        let groups = self.points.other_numbers().end;
        let mut slots = vec![0; groups];
        let mut holds: Vec<(Place, BlockId)> = Vec::new();
        for &part in lacking.iter().chain(&resident) {
            holds.push((Place::new(self.nearest(part), part.group), part.block));
        }
        for &(from, block) in &holds {
            self.blocks.hold(from, [block]);
            slots[from.group] += u64::from(from.tier > tier);
        }
        let wanted = Wanted { tier, slots: &slots };
        let fits = if lacking.is_empty() {
            true
        } else if tier == 0 {
            self.make_room(&[wanted], &[], now).is_ok()
        } else {
            self.make_soft_room(wanted, &[], now)
        };
        if fits {
            for &(from, block) in holds.iter().filter(|&&(from, _)| from.tier > tier) {
                self.copy_part(self.whole(MoveKind::Load, NO_LEASE, block), from, tier, now);
            }
            self.raise_point(tier, path);
        }
        for (from, block) in holds {
            self.blocks.unhold(from, [block]);
        }
    }
}
