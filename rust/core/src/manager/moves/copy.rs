//! Copies of a slot: all layers of a group in a single move, between tiers or within the first
//! tier.
//!
//! The alternatives are batches (`batch.rs`) and moves of single layers (`load.rs`, `store`). All
//! go through `enter` and end in `end`. Invariant: both ends are busy until the move has ended, and
//! its destination residency is arriving. Cost: O(log moves).

use crate::arrival::MoveIds;
use crate::block::{BlockId, LeaseId, MoveId, Place, TierId};
use crate::manager::Manager;
use crate::manager::moves::NewMove;
use crate::time::Nanos;
use crate::transfer::{End, Endpoint, MoveKind};

/// Order to copy a slot of a group.
#[derive(Clone, Copy, Debug)]
pub(in crate::manager) struct CopyOrder {
    pub(in crate::manager) kind: MoveKind,
    pub(in crate::manager) lease: LeaseId,
    /// `None` for tokens still being written by a lease.
    pub(in crate::manager) block: Option<BlockId>,
    pub(in crate::manager) tokens: u32,
}

impl Manager {
    /// Starts to copy all layers of a group from `src` to the reserved slot `dst`.
    pub(in crate::manager) fn copy_slot(
        &mut self,
        order: CopyOrder,
        src: Endpoint,
        dst: Endpoint,
        now: Nanos,
    ) -> MoveId {
        let CopyOrder { kind, lease, block, tokens } = order;
        let layers = self.points.layers(dst.place.group);
        let mut deps = MoveIds::new();
        // The engine names its slot later, and orders access to it itself.
        if !matches!(dst.end, End::PrivateSlot(_)) {
            deps = self.blocks.waits(dst.place, dst.slot);
        }
        if let (End::Resident, Some(block)) = (src.end, block) {
            deps.extend(self.bringing(src.place, block, layers));
        }
        let arrives = block.filter(|_| dst.end == End::Resident);
        if let Some(block) = arrives {
            self.blocks.alter(dst.place, block, |residency| residency.slot = dst.slot);
        }
        let id = self.add_move(NewMove { kind, lease, block, src, dst, layers, tokens, deps }, now);
        if let Some(block) = arrives {
            self.expect(dst.place, block, layers, &[id]);
        }
        id
    }

    /// Starts to copy a block in a group after the first to a second tier with a free slot of the
    /// group.
    pub(in crate::manager) fn copy_part(
        &mut self,
        order: CopyOrder,
        from: Place,
        to: TierId,
        now: Nanos,
    ) -> MoveId {
        let (block, into) = (order.block.expect("a block"), Place::new(to, from.group));
        let src = Endpoint::resident(from, self.residency(from, block).slot);
        let dst = Endpoint::resident(into, self.blocks.take_slot(into).slot);
        self.copy_slot(order, src, dst, now)
    }

    /// Order to copy all tokens of a block.
    pub(in crate::manager) fn whole(
        &self,
        kind: MoveKind,
        lease: LeaseId,
        block: BlockId,
    ) -> CopyOrder {
        CopyOrder { kind, lease, block: Some(block), tokens: self.settings.block_tokens }
    }
}
