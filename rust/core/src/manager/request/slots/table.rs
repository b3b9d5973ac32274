//! Block tables: the slots of a lease in a group of layers, in logical order.
//!
//! Invariant: a slot of the first tier is held or written by the lease. Cost: O(path).

use crate::block::{BlockId, LeaseId, NO_SLOT, Place, Slot, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::request::life::lease::{Lease, TailFrom};
use crate::manager::request::matching::path::PathBlock;
use crate::tier::ResidencyState;

impl Manager {
    /// The block table of a lease on a tier, in logical order. With layer slots, it has a row per
    /// layer. An absent block has [`NO_SLOT`]. Open slots follow the path on the first tier.
    ///
    /// # Errors
    /// [`Error::Closed`]. [`Error::Config`] for a nonexistent tier.
    pub fn slots(&self, id: LeaseId, tier: TierId) -> Result<(usize, Vec<Slot>)> {
        let lease = self.lease(id)?;
        self.tiers.check(tier)?;
        let rows = if self.tiers[tier].spec.layer_slots { self.settings.layers } else { 1 };
        let mut table = Vec::new();
        for layer in 0..rows {
            table.extend(lease.path.steps().map(|step| self.step_slot(tier, step, layer)));
            if tier == 0 {
                table.extend(self.tail_slot(lease, layer));
                let open = lease.groups[0].written.slots();
                table.extend(open.map(|open| self.open_slot(open, layer)));
            }
        }
        Ok((usize::from(rows), table))
    }

    /// The slot used by a lease for a layer of a step of its path.
    fn step_slot(&self, tier: TierId, step: PathBlock, layer: u16) -> Slot {
        if let (0, Some(id)) = (tier, step.private) {
            let private = &self.private_slots[id];
            // With layer slots a private slot may complete the layers of the residency.
            if private.layers.contains(layer) || !self.tiers[0].spec.layer_slots {
                return self.private_slot(id, layer);
            }
        }
        // No request may read the bytes of a bad copy.
        if self.residency(tier, step.block).state == ResidencyState::Bad {
            return NO_SLOT;
        }
        self.slot_of(tier, step.block, layer)
    }

    /// The slot of the tail, unless it is the first open slot.
    fn tail_slot(&self, lease: &Lease, layer: u16) -> Option<Slot> {
        match lease.tail_from {
            TailFrom::OpenSlot => None,
            TailFrom::Shared(private) => Some(self.private_slot(private, layer)),
            TailFrom::Block(step) => Some(self.step_slot(0, step, layer)),
        }
    }

    /// The block table of a lease in a group of layers, in the layout of [`Manager::slots`]. Makes
    /// the lease's spare slots permanent.
    ///
    /// # Errors
    /// The errors of [`Manager::slots`]. [`Error::Config`] for a nonexistent group.
    pub fn group_table(
        &mut self,
        id: LeaseId,
        tier: TierId,
        group: usize,
    ) -> Result<(usize, Vec<Slot>)> {
        let first = self.slots(id, tier)?;
        self.check_group(group)?;
        if group == 0 {
            return Ok(first);
        }
        if tier == 0 {
            self.keep_spare(id, group);
        }
        let group_place = Place::new(tier, group);
        Ok((1, self.window_table(&self.leases[&id], group_place, first.1.len())))
    }

    /// Fails for a nonexistent group.
    pub(in crate::manager::request) fn check_group(&self, group: usize) -> Result<()> {
        let groups = self.points.groups.len();
        if group < groups {
            return Ok(());
        }
        Err(Error::config(format!("there is no group {group}, the manager keeps {groups} apart")))
    }

    fn window_table(&self, lease: &Lease, group_place: Place, blocks: usize) -> Vec<Slot> {
        let Place { tier, group } = group_place;
        let slots = &lease.groups[group];
        let slot = |(place, block): (u32, Option<&BlockId>)| {
            let has = tier > 0 || slots.held.binary_search(&place).is_ok();
            if let Some(&block) = block.filter(|_| has) {
                let part = self.residency(group_place, block);
                return if part.state == ResidencyState::Bad { NO_SLOT } else { part.slot };
            }
            let open = slots.written.get(place).filter(|_| tier == 0);
            open.map_or(NO_SLOT, |open| self.open_slot(open, 0))
        };
        let path = lease.path.blocks();
        let places = path.iter().map(Some).chain(std::iter::repeat(None)).take(blocks);
        (0..).zip(places).map(slot).collect()
    }
}
