//! The loads of a call, and the way that those from below host take through it.
//!
//! Transit slots are taken in turn: where there are fewer than loads, a later load waits until the
//! one before it has left the slot. Invariant: a transit slot lives until the last move through it
//! has ended. Cost: O(log moves) per move.

use std::ops::Range;

use crate::arrival::MoveIds;
use crate::block::{BlockId, Layers, LeaseId, NO_SLOT, Slot, TierId};
use crate::error::Result;
use crate::time::Nanos;

use super::Manager;
use super::convoy::Convoy;
use super::moves::{self, End, MoveKind};
use super::own::OwnId;
use super::survey::Need;

/// Transit slots, each with the moves that leave it last.
#[derive(Debug, Default)]
pub(super) struct Passage {
    slots: Vec<(OwnId, MoveIds)>,
    next: usize,
}

/// Layers of a block that a lease wants from a lower tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) block: BlockId,
    pub(super) from: TierId,
    pub(super) layers: Layers,
    pub(super) lease: LeaseId,
}

impl Manager {
    /// Makes room for `units` slots of the first tier and for what passes through host, and keeps
    /// the sources where they are; or changes nothing.
    pub(super) fn open_passage(
        &mut self,
        needs: &[Need],
        units: u64,
        now: Nanos,
    ) -> Result<Passage> {
        let mut stay: Vec<(TierId, Range<BlockId>)> = Vec::new();
        let mut run = 0..0;
        let mut passing: Vec<TierId> = Vec::new();
        for need in needs.iter().filter(|need| need.load || !need.compute.is_empty()) {
            for (tier, _) in need.loads() {
                match stay.last_mut() {
                    Some((at, blocks))
                        if *at == tier && blocks.end == need.block && run.contains(&need.block) =>
                    {
                        blocks.end += 1;
                    }
                    _ => {
                        run = self.trie.run(need.block);
                        stay.push((tier, need.block..need.block + 1));
                    }
                }
                passing.extend(self.transit(0, tier));
            }
        }
        let Some(&host) = passing.first() else {
            self.make_room(&[(0, units)], &stay, now)?;
            return Ok(Passage::default());
        };
        let each = self.units(host, self.all_layers());
        let mut count = passing.len();
        let many = [(host, each * count as u64), (0, units)];
        if self.make_room(&many, &stay, now).is_err() {
            count = 1;
            self.make_room(&[(host, each), (0, units)], &stay, now)?;
        }
        let slots = (0..count).map(|_| (self.new_own(host, self.all_layers()), MoveIds::new()));
        Ok(Passage { slots: slots.collect(), next: 0 })
    }

    /// The loads at the front of these that can travel together.
    pub(super) fn convoy(&self, needs: &[Need], lease: LeaseId) -> Option<Convoy> {
        let all = self.all_layers();
        let from = |need: &Need| match need.sources[..] {
            [(tier, layers)] if need.load && need.compute.is_empty() => {
                ((layers, need.lacks) == (all, all)).then_some(tier)
            }
            _ => None,
        };
        let (first, src) = (needs.first()?, from(needs.first()?)?);
        if !self.travels(src, 0) {
            return None;
        }
        let run = first.block..self.trie.run(first.block).end;
        let next = needs.iter().zip(run.clone()).zip(first.at..);
        let alike = |&((need, block), at): &((&Need, BlockId), usize)| {
            (need.block, need.at) == (block, at) && from(need) == Some(src)
        };
        let number = next.take_while(alike).count();
        let end = first.block + u32::try_from(number).expect("no more than the run has");
        let quiet = first.block..self.tiers[src].here.quiet_front(first.block..end);
        let blocks = first.block..self.tiers[0].here.bare_front(quiet);
        let kind = MoveKind::Load;
        (!blocks.is_empty()).then_some(Convoy { kind, lease, src, dst: 0, blocks })
    }

    /// Leaves the transit slots to the moves that pass through them.
    pub(super) fn close_passage(&mut self, passage: Passage) {
        for (own, _) in passage.slots {
            self.unref_own(own);
        }
    }

    /// Begins the loads of the layers `wanted` into a slot of the lease's own.
    pub(super) fn load_own(
        &mut self,
        need: &Need,
        wanted: Layers,
        own: OwnId,
        lease: LeaseId,
        passage: &mut Passage,
        now: Nanos,
    ) -> MoveIds {
        let mut moves = MoveIds::new();
        for (from, layers) in need.loads() {
            let load = Load { block: need.block, from, layers: layers.meet(wanted), lease };
            moves.extend(self.load_layers(load, passage, now, |manager, layer| {
                (manager.own_slot(&manager.owns[own], layer), End::Own(own))
            }));
        }
        moves
    }

    /// The moves of one load; `dest` names the slot and end of a layer on the first tier.
    pub(super) fn load_layers(
        &mut self,
        load: Load,
        passage: &mut Passage,
        now: Nanos,
        dest: impl Fn(&Self, u16) -> (Slot, End),
    ) -> MoveIds {
        let Load { block, from, layers, lease } = load;
        if layers.is_empty() {
            return MoveIds::new();
        }
        self.meter.tier(from).promoted += 1;
        let host = self.transit(0, from);
        let turn = passage.next % passage.slots.len().max(1);
        let mut moves = MoveIds::new();
        let mut leaving = MoveIds::new();
        for piece in self.pieces(from, 0, host, layers) {
            let copy = |src, dst, deps| moves::Draft {
                kind: MoveKind::Load,
                lease,
                block: Some(block),
                src,
                dst,
                layers: piece,
                tokens: self.settings.block_tokens,
                deps,
            };
            let mut src = (from, self.slot_of(from, block, piece.lo), End::Here);
            let mut deps = self.bringing(from, block, piece);
            let (slot, end) = dest(self, piece.lo);
            let mut hop = None;
            if let Some(host) = host {
                let (own, last) = &passage.slots[turn];
                let slot = self.own_slot(&self.owns[*own], piece.lo);
                deps.extend(self.own_waits(*own));
                deps.extend_from_slice(last);
                let through = (host, slot, End::Own(*own));
                hop = Some(copy(src, through, std::mem::take(&mut deps)));
                src = through;
            }
            if slot != NO_SLOT && !self.engine_owned() {
                deps.extend(self.tiers[0].space.drained_by(slot));
            }
            let mut up = copy(src, (0, slot, end), deps);
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
            passage.slots[turn].1 = leaving;
            passage.next += 1;
        }
        moves
    }
}
