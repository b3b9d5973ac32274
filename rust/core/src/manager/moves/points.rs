//! Resume points on their way down: what they need is copied to the tier below.
//!
//! A resume point leaves the first tier as a whole: what the tier below lacks is stored there, and the
//! point is on that tier from then on. A request loads what its border needs in the same way.
//! Invariant: a point is on a tier only while all that it needs is there or arrives. Cost: O(slots of
//! the point), and room for them.

use std::cmp::Reverse;

use smallvec::SmallVec;

use crate::block::{BlockId, LeaseId, NO_SLOT, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::request::slots::window_slots::blocks_at;
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::transfer::MoveKind;

impl Manager {
    /// Takes a resume point from a tier, and to the one below if it is worth a store there.
    pub(in crate::manager) fn demote_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let worth = self.tiers.writes(tier)
            && self.node(block).uses >= self.tiers[tier].spec.admit_after
            && self.refused.may_write(block, tier + 1);
        // A point that is on another tier too is not lost; one above is stored when it leaves there.
        let alone = !(0..self.tiers.len()).any(|at| at != tier && self.has_point_on(at, block));
        if worth && alone {
            self.store_point(tier, block, now);
        }
        self.drop_point_on(tier, block);
    }

    /// Copies all resume points of a tier one tier down, the youngest first. Blocks of the tier that
    /// points below it still lack there follow those.
    pub(in crate::manager) fn flush_points(&mut self, tier: TierId, now: Nanos) {
        let there = |manager: &Self, block| {
            (tier..manager.tiers.len()).any(|at| manager.has_point_on(at, block))
        };
        let points = self.points.iter().flat_map(|points| points.all().map(|(block, _)| block));
        let mut points: Vec<BlockId> = points.filter(|&block| there(self, block)).collect();
        points.sort_by_key(|&block| (Reverse(self.node(block).access), block));
        for block in points {
            // Room for a younger point may have ended it.
            if there(self, block) {
                self.copy_point(tier, block, now);
            }
        }
    }

    /// Copies a resume point of a tier one tier down with all blocks before it, as far as there is
    /// room; they stay where they are. A tier below that writes through copies them further.
    pub(in crate::manager) fn copy_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        self.copy_point_down(tier, block, now);
        for below in tier + 1..self.tiers.len() {
            if !self.writes_through(below) || !self.has_point_on(below, block) {
                break;
            }
            self.copy_point_down(below, block, now);
        }
    }

    /// The same to the next tier alone.
    fn copy_point_down(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let below = tier + 1;
        if !self.tiers.writes(tier)
            || !self.worth_writing(tier, block)
            || !self.refused.may_write(block, below)
        {
            return;
        }
        let stored = |manager: &Self| {
            (below..manager.tiers.len()).any(|lower| manager.has_point_on(lower, block))
        };
        if !stored(self) {
            self.store_point(tier, block, now);
        }
        if !stored(self) {
            return;
        }
        let path = self.path_to(Some(block));
        let lacks = |manager: &Self| -> Vec<BlockId> {
            let absent = |&&block: &&BlockId| {
                let lower = |at| manager.residency(at, block).state != ResidencyState::Absent;
                !(below..manager.tiers.len()).any(lower)
                    && manager.expected(tier, block) == manager.all_layers()
            };
            path.iter().filter(absent).copied().collect()
        };
        // A block of the path has no child below yet, so it would make room for the next.
        let linked = |&&block: &&BlockId| self.tiers[below].eviction.get(block).is_some();
        let linked: Vec<BlockId> = path.iter().filter(linked).copied().collect();
        for &block in &linked {
            self.tiers[below].eviction.unlink(block);
        }
        let wanted = lacks(self).len() as u64;
        let fits = wanted > 0 && self.make_room_below(below, &[wanted], now);
        let lacking = lacks(self);
        // Room for the blocks may have ended the point.
        if fits && stored(self) && lacking.len() as u64 <= wanted {
            for block in lacking {
                self.copy_down(tier, block, self.all_layers(), None, now);
            }
        }
        for block in linked {
            self.refresh_on(below, block);
        }
    }

    /// Puts a resume point of a tier on the one below as well, if there is room.
    pub(in crate::manager) fn store_point(&mut self, tier: TierId, block: BlockId, now: Nanos) {
        let below = tier + 1;
        let path = self.path_to(Some(block));
        let border = u32::try_from(path.len()).expect("fewer than 2^32 blocks");
        let (there, lacking): (Vec<_>, Vec<_>) = self
            .needs(&path, border)
            .into_iter()
            .partition(|part| self.blocks.expects(Place::new(below, part.group), part.block));
        // Bytes that cannot be read, or a failed move that may still write them.
        let free = |&Part { group, block }: &Part| {
            self.residency(Place::new(below, group), block).slot == NO_SLOT
        };
        if !lacking.iter().all(free) {
            return;
        }
        let mut wanted = vec![0; self.other_groups().end];
        for part in &lacking {
            wanted[part.group] += 1;
        }
        // What is there must not make room for the rest.
        for &Part { group, block } in &there {
            self.blocks.hold(Place::new(below, group), [block]);
        }
        // Without a copy of its last block the point would end.
        let absent = |at: &TierId| self.residency(*at, block).state == ResidencyState::Absent;
        let copies = (1..self.tiers.len()).filter(|at| !absent(at));
        let copies: SmallVec<[_; 3]> = copies.map(|at| (at, block..block + 1)).collect();
        self.keep_sources(&copies, true);
        let fits = self.make_room_below(below, &wanted, now);
        self.keep_sources(&copies, false);
        if fits {
            for &Part { group, block } in &lacking {
                let store = self.whole(MoveKind::Store, 0, block);
                self.copy_part(store, Place::new(tier, group), below, now);
            }
            self.hold_point(below, &path, border);
        }
        for &Part { group, block } in &there {
            self.blocks.unhold(Place::new(below, group), [block]);
        }
    }

    /// Moves a lease's holds to the border of a path at which it goes on.
    pub(in crate::manager) fn move_windows(&mut self, id: LeaseId, path: &[BlockId], border: u32) {
        let lease = self.leases.get_mut(&id).expect("held");
        let Some(mut windows) = lease.windows.take() else { return };
        for (group, held) in windows.held.iter_mut().enumerate() {
            self.blocks.unhold(Place::new(0, group), blocks_at(path, held));
            held.clear();
        }
        for Part { group, block } in self.needs(&path[..border as usize], border) {
            self.blocks.hold(Place::new(0, group), [block]);
            windows.held[group].push(self.trie().depth(block));
        }
        windows.done = border;
        self.leases.get_mut(&id).expect("held").windows = Some(windows);
    }

    /// Ends the holds of all leases on a block of the first tier that a failed move was to bring.
    pub(in crate::manager) fn lose_window(&mut self, Part { group, block }: Part) {
        let place = self.trie().depth(block);
        let mut lost = 0;
        for lease in self.leases.values_mut() {
            let on = lease.path.blocks().get(place as usize) == Some(&block);
            if let (true, Some(windows)) = (on, &mut lease.windows) {
                let before = windows.held[group].len();
                windows.held[group].retain(|&held| held != place);
                lost += before - windows.held[group].len();
            }
        }
        self.blocks.unhold(Place::new(0, group), std::iter::repeat_n(block, lost));
    }
}
