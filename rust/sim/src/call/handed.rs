//! An issued move.
//!
//! Invariant: has the fields an executor needs, all fixed when the move is issued. Cost: plain
//! values.

use kvtrie_core::{BlockKey, Handle, Layers, LeaseId, Move, MoveId, MoveKind, Nanos, Slot, TierId};

/// Snapshot of an issued move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// Move id.
    pub id: MoveId,
    /// Its purpose.
    pub kind: MoveKind,
    /// Lease of the move, or 0.
    pub lease: LeaseId,
    /// Its block, if committed.
    pub block: Option<Handle>,
    /// Content key of the block. Zeros unless the move uses a disk or remote tier.
    pub key: BlockKey,
    /// Source tier.
    pub src: TierId,
    /// Destination tier.
    pub dst: TierId,
    /// Slot on the source tier.
    pub src_slot: Slot,
    /// Slot on the destination tier.
    pub dst_slot: Slot,
    /// Layer group.
    pub group: u8,
    /// Layers of the move.
    pub layers: Layers,
    /// Move to wait for.
    pub after: MoveId,
    /// Number of valid tokens in the block.
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

    /// Key shared by the moves of a transmission.
    #[must_use]
    pub fn way(&self) -> (MoveKind, LeaseId, TierId, TierId, u8, Layers) {
        (self.kind, self.lease, self.src, self.dst, self.group, self.layers)
    }
}
