//! Transfer batches: consecutive blocks of a run moved between two tiers together, with a move per
//! block.
//!
//! Lookups, links and counts are made once per run, not once per block. Invariant: the state after
//! a batch equals the state after its moves individually, first to last, except for the choice of
//! free slots. Cost: O(1) per block.

use std::ops::Range;

use smallvec::smallvec;

use crate::arrival::Arrival;
use crate::block::{BlockId, LeaseId, MoveId, NO_MOVE, TierId};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::manager::moves::NewMove;
use crate::transfer::{End, Endpoint, Leaves, MoveKind};

/// Transfer batch: blocks fully resident and idle on the source tier, and absent on a destination
/// with room.
#[derive(Clone, Debug)]
pub(crate) struct TransferBatch {
    pub(crate) kind: MoveKind,
    pub(crate) lease: LeaseId,
    pub(crate) src: TierId,
    pub(crate) dst: TierId,
    pub(crate) blocks: Range<BlockId>,
}

/// Key of moves that may end together: kind, source and destination.
pub(crate) type MoveClass = (MoveKind, TierId, TierId);

impl Manager {
    /// Whether blocks can move in a batch between two tiers: each moves directly from slot to slot,
    /// and no policy or hint must see each block.
    pub(crate) fn can_batch(&self, src: TierId, dst: TierId) -> bool {
        let single = |tier: TierId| self.tiers[tier].spec.layer_slots;
        !single(src)
            && !single(dst)
            && !self.tiers.engine_owned()
            && !self.feed.arrivals
            && self.blocks.arena(src).is_none()
            && self.hints.all_normal()
            && self.transit(src, dst).is_none()
    }

    /// Starts the moves of a batch.
    pub(crate) fn start_batch(&mut self, batch: &TransferBatch, now: Nanos) -> Range<MoveId> {
        let TransferBatch { kind, lease, src, dst, ref blocks } = *batch;
        let (first, all) = (self.moves.latest() + 1, self.all_layers());
        // Blocks being read are no victims, and only blocks at the edge of the run have an entry.
        for block in self.edge(src, blocks.clone(), self.departures(blocks.start)) {
            self.tiers[src].eviction.unlink(block);
        }
        let route = self.route(kind, src, dst);
        for block in blocks.clone() {
            let from = self.blocks.begin_read(src, block);
            let grant = self.blocks.take_slot(dst);
            let waits = Some(grant.after).filter(|&after| after != NO_MOVE);
            let new = NewMove {
                kind,
                lease,
                block: Some(block),
                src: Endpoint::resident(src, from),
                dst: Endpoint::resident(dst, grant.slot),
                layers: all,
                tokens: self.settings.block_tokens,
                deps: waits.into_iter().collect(),
            };
            let (id, times) = self.enter(new, route, now);
            let arrival = Arrival::new(all, smallvec![id], times.first, times.end);
            self.blocks.begin_arrival(dst, block, grant.slot, arrival);
        }
        // Its child is arriving, so it is no victim any more.
        if let Some(parent) = self.trie().parent(blocks.start) {
            self.refresh_on(dst, parent);
        }
        let number = u64::from(blocks.end - blocks.start);
        match kind {
            MoveKind::Store => self.meter.tier(dst).demoted += number,
            MoveKind::Load | MoveKind::Copy => self.meter.tier(src).promoted += number,
        }
        first..self.moves.latest() + 1
    }

    /// Ends the successful moves at the front of `ids` that bring consecutive blocks of a run to
    /// the same tier. Returns their number.
    pub(crate) fn complete_batch(&mut self, ids: &[MoveId], now: Nanos) -> usize {
        let Some((class, first)) = self.move_class(ids[0], End::Resident) else {
            return self.complete_leaving(ids, now);
        };
        let (kind, src, dst) = class;
        // A hint given since the start may require a check of every block.
        if !self.can_batch(src, dst) {
            return 0;
        }
        let most = self.trie().run(first).end - first;
        let follow = (first..first + most).zip(ids);
        let number = follow
            .take_while(|&(block, &id)| self.move_class(id, End::Resident) == Some((class, block)))
            .count();
        self.end_moves(class, &ids[..number], now);
        self.moves.ended(&ids[..number], true);
        let blocks = first..first + u32::try_from(number).expect("no more than the run has");
        self.blocks.arrived(src, dst, blocks.clone());
        if kind == MoveKind::Store {
            self.refused.took(dst, number as u64);
        }
        let structure = self.departures(first);
        for tier in [src, dst] {
            for block in self.edge(tier, blocks.clone(), structure) {
                self.refresh_on(tier, block);
            }
        }
        // An earlier block may have lost its last copy while this batch was in flight.
        self.sweep_path(self.trie().parent(first));
        self.write_run(dst, blocks, now);
        number
    }

    /// Ends the successful stores at the front of `ids` that read the leaving slots of consecutive
    /// blocks of a run, the last block first as they were evicted. Returns their number.
    fn complete_leaving(&mut self, ids: &[MoveId], now: Nanos) -> usize {
        let Some((class, last)) = self.move_class(ids[0], End::Leaving) else { return 0 };
        let (_, src, dst) = class;
        // A block written further is written before the next block arrives.
        if !self.can_batch(src, dst) || self.tiers.writes_through(dst) {
            return 0;
        }
        let before = (self.trie().run(last).start..=last).rev().zip(ids);
        let next = |&(block, &id): &(BlockId, &MoveId)| {
            self.move_class(id, End::Leaving) == Some((class, block))
        };
        let number = before.take_while(next).count();
        for &id in &ids[..number] {
            // The slots of the victims are free to write from here on.
            if let Some(Leaves { tier, slot, .. }) = self.moves[id].leaves {
                self.blocks.drained(tier, slot);
            }
        }
        self.end_moves(class, &ids[..number], now);
        self.moves.ended(&ids[..number], true);
        let blocks = last + 1 - u32::try_from(number).expect("no more than the run has")..last + 1;
        self.blocks.stored(dst, blocks.clone());
        self.refused.took(dst, number as u64);
        for block in self.edge(dst, blocks.clone(), self.departures(last)) {
            self.refresh_on(dst, block);
        }
        // An earlier block may have lost its last copy while this batch was in flight.
        self.sweep_path(self.trie().parent(blocks.start));
        number
    }

    /// The class and the block of a move of a whole block out of a slot of this kind, if its
    /// destination awaits no further move.
    fn move_class(&self, id: MoveId, from: End) -> Option<(MoveClass, BlockId)> {
        // Partial, failed or depended-on moves end individually.
        let known = self.moves.get(id)?;
        let plain = (known.from, known.to) == (from, End::Resident)
            && known.layers == self.all_layers()
            && known.landed == 0
            && !known.failed
            && known.leaves.is_some() == (from == End::Leaving)
            && known.deps.is_empty();
        if !plain || !self.marked.is_empty() {
            return None;
        }
        // A block with a move in flight is not removed, so its id is valid.
        let block = known.block?.id();
        let alone = (from == End::Leaving || self.blocks.table(known.src).fully_resident(block))
            && self.blocks.table(known.dst).arrives_by(block, id);
        alone.then_some(((known.kind, known.src, known.dst), block))
    }
}
