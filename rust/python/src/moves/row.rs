//! Move: one row of the columns.

use kvtrie_core::manager::{self, MoveKind};
use pyo3::prelude::*;

/// Handle in a move of a partial block, which is not in the trie.
const NO_BLOCK: u64 = u64::MAX;

/// The numbers of the kinds of move.
pub(super) const LOAD: u8 = 0;
pub(super) const STORE: u8 = 1;
pub(super) const COPY: u8 = 2;

/// One move: copy `layer_lo..layer_hi` of a block from slot to slot.
#[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Move {
    /// Its id, never used twice.
    pub(super) id: u64,
    /// 0 load (towards a faster tier), 1 store (towards a slower one), 2 copy (within the first).
    pub(super) kind: u8,
    /// The lease that requested it or waits for it; 0 if none does.
    pub(super) lease: u64,
    /// Handle of the block; 2**64 - 1 for a partial one.
    pub(super) block: u64,
    /// Content hash of the block, 32 bytes; zeros unless a disk or remote tier takes part.
    pub(super) key: [u8; 32],
    /// Index of the tier to read.
    pub(super) src: u8,
    /// Index of the tier to write.
    pub(super) dst: u8,
    /// Slot to read.
    pub(super) src_slot: u32,
    /// Slot to write.
    pub(super) dst_slot: u32,
    /// Layer group.
    pub(super) group: u8,
    /// First layer.
    pub(super) layer_lo: u16,
    /// One behind the last layer.
    pub(super) layer_hi: u16,
    /// The move that must complete before this one starts; 0 if none.
    pub(super) after: u64,
    /// Tokens of the block that are valid.
    pub(super) tokens: u32,
    /// The block's record for a disk or remote tier; empty unless that is the destination.
    pub(super) label: Vec<u8>,
}

impl Move {
    /// The move as the manager hands it out, with its lease.
    pub(crate) fn handed_out(given: &manager::Move, lease: u64) -> Self {
        let tier = |tier: usize| u8::try_from(tier).unwrap_or(u8::MAX);
        Self {
            id: given.id,
            kind: match given.kind {
                MoveKind::Load => LOAD,
                MoveKind::Store => STORE,
                MoveKind::Copy => COPY,
            },
            lease,
            block: given.block.map_or(NO_BLOCK, |block| block.0),
            key: given.key,
            src: tier(given.src),
            dst: tier(given.dst),
            src_slot: given.src_slot,
            dst_slot: given.dst_slot,
            group: 0,
            layer_lo: given.layers.lo,
            layer_hi: given.layers.hi,
            after: given.after,
            tokens: given.tokens,
            label: given.label.as_ref().map(|label| label.encode()).unwrap_or_default(),
        }
    }
}

#[pymethods]
impl Move {
    fn __repr__(&self) -> String {
        let kind = ["load", "store", "copy"][usize::from(self.kind)];
        format!(
            "Move(id={}, {kind}, tier {} slot {} -> tier {} slot {}, layers={}..{}, after={})",
            self.id,
            self.src,
            self.src_slot,
            self.dst,
            self.dst_slot,
            self.layer_lo,
            self.layer_hi,
            self.after
        )
    }
}
