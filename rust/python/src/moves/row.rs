//! Move: one row of the columns.

use kvtrie_core::MoveKind;
use pyo3::prelude::*;

/// Handle in a move of a partial block, which is not in the trie.
const NO_BLOCK: u64 = u64::MAX;

/// The numbers of the kinds of move.
pub(super) const LOAD: u8 = 0;
pub(super) const STORE: u8 = 1;
pub(super) const COPY: u8 = 2;

/// The columns of moves in the order of the binary format, for a macro.
macro_rules! columns {
    ($used:ident $($more:tt)*) => {
        $used! {
            {
                /// Its id, never used twice.
                id: u64;
                /// 0 load (towards a faster tier), 1 store (towards a slower one), 2 copy (within the first).
                kind: u8;
                /// The lease that requested it or waits for it; 0 if none does.
                lease: u64;
                /// Handle of the block; 2**64 - 1 for a partial one.
                block: u64;
                /// Content hash of the block, 32 bytes; zeros unless a disk, remote or kept tier takes part.
                key: [u8; 32];
                /// Index of the tier to read.
                src: u8;
                /// Index of the tier to write.
                dst: u8;
                /// Slot to read.
                src_slot: u32;
                /// Slot to write.
                dst_slot: u32;
                /// Layer group.
                group: u8;
                /// First layer.
                layer_lo: u16;
                /// End of the layers, exclusive.
                layer_hi: u16;
                /// The move that must complete before this one starts; 0 if none.
                after: u64;
                /// Tokens of the block that are valid.
                tokens: u32;
            }
            $($more)*
        }
    };
}

pub(super) use columns;

macro_rules! row {
    ({ $($(#[$doc:meta])* $name:ident: $type:ty;)* }) => {
        /// One move: copy `layer_lo..layer_hi` of a block from slot to slot.
        #[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
        #[derive(Clone, Default, PartialEq, Eq, Hash)]
        pub(crate) struct Move {
            $($(#[$doc])* pub(super) $name: $type,)*
            /// The block's record for a disk or remote tier; empty unless that is the destination.
            pub(super) label: Vec<u8>,
        }
    };
}

columns!(row);

/// The number of a kind of move.
pub(crate) fn number_of(kind: MoveKind) -> u8 {
    match kind {
        MoveKind::Load => LOAD,
        MoveKind::Store => STORE,
        MoveKind::Copy => COPY,
    }
}

impl Move {
    /// The move as the manager hands it out, with its lease.
    pub(crate) fn handed_out(given: &kvtrie_core::Move, lease: u64) -> Self {
        let tier = |tier: usize| u8::try_from(tier).unwrap_or(u8::MAX);
        Self {
            id: given.id,
            kind: number_of(given.kind),
            lease,
            block: given.block.map_or(NO_BLOCK, |block| block.0),
            key: given.key,
            src: tier(given.src),
            dst: tier(given.dst),
            src_slot: given.src_slot,
            dst_slot: given.dst_slot,
            group: given.group,
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
        let Self { id, src, src_slot, dst, dst_slot, layer_lo, layer_hi, after, .. } = self;
        let kind = ["load", "store", "copy"][usize::from(self.kind)];
        format!(
            "Move(id={id}, {kind}, tier {src} slot {src_slot} -> tier {dst} slot {dst_slot}, \
             layers={layer_lo}..{layer_hi}, after={after})"
        )
    }
}
