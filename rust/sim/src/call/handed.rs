//! A move as a manager hands it out.
//!
//! Invariant: what an executor needs of it, and nothing that changes later. Cost: plain values.

use kvtrie_core::{BlockKey, Handle, Layers, LeaseId, Move, MoveId, MoveKind, Nanos, Slot, TierId};

/// A move as it was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// Its id.
    pub id: MoveId,
    /// Its purpose.
    pub kind: MoveKind,
    /// The lease that it is for; 0 if none.
    pub lease: LeaseId,
    /// Its block, if that is committed.
    pub block: Option<Handle>,
    /// Content key of the block; zeros unless a disk or a remote tier takes part.
    pub key: BlockKey,
    /// Where from.
    pub src: TierId,
    /// Where to.
    pub dst: TierId,
    /// The source's slot.
    pub src_slot: Slot,
    /// The destination's slot.
    pub dst_slot: Slot,
    /// Group of layers.
    pub group: u8,
    /// Which layers.
    pub layers: Layers,
    /// The move that must have ended before it starts.
    pub after: MoveId,
    /// Number of valid tokens of its block.
    pub tokens: u32,
    /// Predicted end of its first layer.
    pub first: Nanos,
    /// Predicted end.
    pub ready: Nanos,
}

impl Handed {
    pub(super) fn of(order: &Move, lease: LeaseId) -> Self {
        Self {
            id: order.id,
            kind: order.kind,
            lease,
            block: order.block,
            key: order.key,
            src: order.src,
            dst: order.dst,
            src_slot: order.src_slot,
            dst_slot: order.dst_slot,
            group: order.group,
            layers: order.layers,
            after: order.after,
            tokens: order.tokens,
            first: order.first,
            ready: order.ready,
        }
    }

    /// The key that moves of one transmission have in common.
    #[must_use]
    pub fn way(&self) -> (MoveKind, LeaseId, TierId, TierId, u8, Layers) {
        (self.kind, self.lease, self.src, self.dst, self.group, self.layers)
    }
}
