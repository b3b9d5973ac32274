//! Loads of a request, and the transit slots for loads from below host.
//!
//! Transit slots are used in turn: with fewer slots than loads, a later load waits until the
//! previous load has left the slot. Invariant: a transit slot lives until the last move through it
//! has ended. Cost: O(log moves) per move.

use std::ops::Range;

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, LeaseId, NO_SLOT, TierId};
use crate::error::Result;
use crate::private_slots::PrivateSlotId;
use crate::time::Nanos;

use crate::manager::evict::room::Wanted;
use crate::manager::moves::batch::TransferBatch;
use crate::manager::request::matching::residency_scan::MissingBlock;
use crate::manager::{Manager, moves};
use crate::transfer::{Endpoint, MoveKind};

/// Transit slots, each with its latest outgoing moves.
#[derive(Debug, Default)]
pub(crate) struct Transit {
    slots: Vec<(PrivateSlotId, MoveIds)>,
    next: usize,
}

/// Load of layers of a block from a lower tier, for a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) block: BlockId,
    pub(crate) from: TierId,
    pub(crate) layers: Layers,
    pub(crate) lease: LeaseId,
}

impl Manager {
    /// Makes room for the wanted slots of each group on the first tier and for transit through
    /// host, and keeps the sources resident. On failure, changes nothing.
    pub(crate) fn open_transit(
        &mut self,
        missing: &[MissingBlock],
        wanted: &[u64],
        now: Nanos,
    ) -> Result<Transit> {
        let mut stay: Vec<(TierId, Range<BlockId>)> = Vec::new();
        let mut run = 0..0;
        let mut passing: Vec<TierId> = Vec::new();
        for miss in missing.iter().filter(|miss| miss.load || !miss.compute.is_empty()) {
            for (tier, _) in miss.loads() {
                // Sources of one run are guarded as one range.
                match stay.last_mut() {
                    Some((at, blocks))
                        if *at == tier && blocks.end == miss.block && run.contains(&miss.block) =>
                    {
                        blocks.end += 1;
                    }
                    _ => {
                        run = self.trie().run(miss.block);
                        stay.push((tier, miss.block..miss.block + 1));
                    }
                }
                passing.extend(self.transit(0, tier));
            }
        }
        let first = Wanted { tier: 0, slots: wanted };
        // Without transit only the first tier needs room.
        let Some(&host) = passing.first() else {
            self.make_room(&[first], &stay, now)?;
            return Ok(Transit::default());
        };
        let each = self.tiers.units(host, self.all_layers());
        let mut count = passing.len();
        let many = [Wanted { tier: host, slots: &[each * count as u64] }, first];
        // A single transit slot is enough: the loads then follow each other through it.
        if self.make_room(&many, &stay, now).is_err() {
            count = 1;
            self.make_room(&[Wanted { tier: host, slots: &[each] }, first], &stay, now)?;
        }
        let slots = (0..count).map(|_| (self.new_private(host, self.all_layers()), MoveIds::new()));
        Ok(Transit { slots: slots.collect(), next: 0 })
    }

    /// The batch of loads at the front of `missing`, if any.
    pub(crate) fn batch(&self, missing: &[MissingBlock], lease: LeaseId) -> Option<TransferBatch> {
        let all = self.all_layers();
        let from = |miss: &MissingBlock| match miss.sources[..] {
            [(tier, layers)] if miss.load && miss.compute.is_empty() => {
                ((layers, miss.lacks) == (all, all)).then_some(tier)
            }
            _ => None,
        };
        let (first, src) = (missing.first()?, from(missing.first()?)?);
        if !self.can_batch(src, 0) {
            return None;
        }
        let run = first.block..self.trie().run(first.block).end;
        let next = missing.iter().zip(run.clone()).zip(first.at..);
        let alike = |&((miss, block), at): &((&MissingBlock, BlockId), usize)| {
            (miss.block, miss.at) == (block, at) && from(miss) == Some(src)
        };
        let number = next.take_while(alike).count();
        let end = first.block + u32::try_from(number).expect("no more than the run has");
        let idle = first.block..self.blocks.table(src).first_not_idle(first.block..end);
        let blocks = first.block..self.blocks.table(0).first_present(idle);
        let kind = MoveKind::Load;
        (!blocks.is_empty()).then_some(TransferBatch { kind, lease, src, dst: 0, blocks })
    }

    /// Releases the transit slots. Their moves keep them alive.
    pub(crate) fn close_transit(&mut self, transit: Transit) {
        for (private, _) in transit.slots {
            self.unref_copy(private);
        }
    }

    /// Starts the loads of the layers `wanted` into a private slot of the lease.
    pub(crate) fn load_private(
        &mut self,
        miss: &MissingBlock,
        wanted: Layers,
        private: PrivateSlotId,
        lease: LeaseId,
        transit: &mut Transit,
        now: Nanos,
    ) -> MoveIds {
        let mut moves = MoveIds::new();
        for (from, layers) in miss.loads() {
            let load = Load { block: miss.block, from, layers: layers.meet(wanted), lease };
            moves.extend(self.load_layers(load, transit, now, |manager, layer| {
                Endpoint::private(0, manager.private_slot(private, layer), private)
            }));
        }
        moves
    }

    /// Adds the moves of a load. `target` returns the end of a layer on the first tier.
    pub(crate) fn load_layers(
        &mut self,
        load: Load,
        transit: &mut Transit,
        now: Nanos,
        target: impl Fn(&Self, u16) -> Endpoint,
    ) -> MoveIds {
        let Load { block, from, layers, lease } = load;
        // All layers of this source are computed.
        if layers.is_empty() {
            return MoveIds::new();
        }
        self.meter.tier(from).promoted += 1;
        let host = self.transit(0, from);
        let turn = transit.next % transit.slots.len().max(1);
        let (mut moves, mut leaving) = (MoveIds::new(), MoveIds::new());
        for piece in self.pieces(from, 0, host, layers) {
            let copy = |src, dst, deps| moves::NewMove {
                kind: MoveKind::Load,
                lease,
                block: Some(block),
                src,
                dst,
                layers: piece,
                tokens: self.settings.block_tokens,
                deps,
            };
            let mut src = Endpoint::resident(from, self.slot_of(from, block, piece.lo));
            let mut deps = self.bringing(from, block, piece);
            let dst = target(self, piece.lo);
            let mut hop = None;
            if let Some(host) = host {
                let (private, last) = &transit.slots[turn];
                let slot = self.private_slot(*private, piece.lo);
                deps.extend(self.private_waits(*private));
                deps.extend_from_slice(last);
                let through = Endpoint::private(host, slot, *private);
                hop = Some(copy(src, through, std::mem::take(&mut deps)));
                src = through;
            }
            // A store may still read the destination slot.
            if dst.slot != NO_SLOT && !self.tiers.engine_owned() {
                deps.extend(self.blocks.waits(0, dst.slot));
            }
            let mut up = copy(src, dst, deps);
            if let Some(hop) = hop {
                let hop = self.add_move(hop, now);
                up.deps.push(hop);
                moves.push(hop);
            }
            let up = self.add_move(up, now);
            leaving.push(up);
            moves.push(up);
        }
        if host.is_some() {
            transit.slots[turn].1 = leaving;
            transit.next += 1;
        }
        moves
    }
}
