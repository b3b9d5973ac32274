//! Stores of resume points to a shared tier, part by part.
//!
//! A point waits as a whole. The executor requests a number of stores: the parts of the point on
//! the tier above. The shared tier holds each part until all parts are there or expected, and then
//! has the point. A lost part ends the store and releases the held parts. Invariant: only the
//! oldest store holds parts, and its point is on its source tier. Cost: O(path) per step, and room
//! for a slot.

use crate::block::{BlockId, NO_SLOT, Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::moves::shared_stores::{SharedStore, SharedStores, Step};
use crate::manager::request::matching::path::path_border;
use crate::tier::ResidencyState;
use crate::time::{Nanos, Stamp};
use crate::transfer::MoveKind;

impl SharedStores {
    /// Whether the store of a resume point waits.
    pub(crate) fn contains_point(&self, tier: TierId, block: BlockId) -> bool {
        self.numbers.contains_key(&(tier, block, true))
    }

    /// Parts held by the shared tier for the first point.
    pub(crate) fn held(&self) -> &[Part] {
        &self.held
    }

    /// Removes the store of a point. Returns the parts held for it.
    pub(crate) fn remove_point(&mut self, tier: TierId, block: BlockId) -> Vec<Part> {
        let first = self.first().map(|first| (first.tier, first.block, first.point));
        let Some(number) = self.numbers.remove(&(tier, block, true)) else { return Vec::new() };
        self.waiting.remove(&number);
        if first == Some((tier, block, true)) { std::mem::take(&mut self.held) } else { Vec::new() }
    }
}

impl Manager {
    /// Queues the store of a resume point to the shared tier below, and then of the blocks of its
    /// path missing there.
    pub(in crate::manager) fn store_point_shared(&mut self, tier: TierId, block: BlockId) {
        let (below, younger) = (tier + 1, Stamp::MAX);
        let path = self.path_to(Some(block));
        if path.iter().any(|&block| !self.may_leave(tier, block)) {
            return;
        }
        if self.points.has_on(tier, block) && !self.points.has_on(below, block) {
            if self.can_resume(below, &path, path_border(&path)) {
                self.hold_point(below, &path, path_border(&path));
            } else {
                self.shared_stores.add(SharedStore { tier, block, point: true, younger });
            }
        }
        if !self.points.has_on(below, block) && !self.shared_stores.contains_point(tier, block) {
            return;
        }
        for block in path {
            if self.residency(below, block).state == ResidencyState::Absent
                && self.expected(tier, block) == self.all_layers()
            {
                self.shared_stores.add(SharedStore { tier, block, point: false, younger });
            }
        }
    }

    /// Starts the store of the next missing part of a point. With its last part, the point is on
    /// the shared tier.
    pub(super) fn begin_point_store(&mut self, store: &SharedStore, now: Nanos) -> Step {
        let SharedStore { tier, block, .. } = *store;
        let (below, path) = (tier + 1, self.path_to(Some(block)));
        if self.points.has_on(below, block) || !self.refused.may_write(block, below) {
            return Step::Over;
        }
        let border = path_border(&path);
        let needs = self.points.needs(&path, border);
        self.hold_expected(below, &needs);
        let held = self.shared_stores.held();
        let lacking: Vec<Part> =
            needs.iter().copied().filter(|part| !held.contains(part)).collect();
        let Some(&part) = lacking.first() else {
            self.hold_point(below, &path, border);
            return Step::Over;
        };
        let mut slots = vec![0; self.points.groups.len()];
        slots[part.group] = 1;
        let stay: Vec<_> = self.runs(&path).into_iter().map(|run| (below, run)).collect();
        let (source, place_below) = (Place::new(tier, part.group), Place::new(below, part.group));
        let fits = self.make_soft_room(Wanted { tier: below, slots: &slots }, &stay, now);
        // Room may have ended the point. Unreadable parts and parts that a failed move may still
        // write have a slot.
        let begins = fits
            && self.shared_stores.contains_point(tier, block)
            && self.residency(place_below, part.block).slot == NO_SLOT
            && self.blocks.expects(source, part.block);
        if begins {
            let order = self.whole(MoveKind::Store, 0, part.block);
            self.copy_part(order, source, below, now);
            self.hold_expected(below, &[part]);
            if lacking.len() == 1 {
                self.hold_point(below, &path, border);
                self.end_point_store(tier, block);
            }
        }
        self.refresh_stay(stay);
        match (begins, fits) {
            (true, _) => Step::Begun,
            (false, true) => Step::Over,
            (false, false) => Step::NoRoom,
        }
    }

    /// Holds the parts of the first point that the shared tier has or expects.
    fn hold_expected(&mut self, below: TierId, parts: &[Part]) {
        for &part in parts {
            let place = Place::new(below, part.group);
            if !self.shared_stores.held.contains(&part) && self.blocks.expects(place, part.block) {
                self.blocks.hold(place, [part.block]);
                self.shared_stores.held.push(part);
            }
        }
    }
}
