//! Move: a row of the columns.

use kvtrie_core::MoveKind;
use pyo3::prelude::*;

/// Handle in a move of a partial block, not in the trie.
const NO_BLOCK: u64 = u64::MAX;

/// Numbers of the move kinds.
pub(super) const LOAD: u8 = 0;
pub(super) const STORE: u8 = 1;
pub(super) const COPY: u8 = 2;

/// Columns of moves in the order of the binary format, for a macro.
macro_rules! columns {
    ($used:ident $($more:tt)*) => {
        $used! {
            {
                /// Move id, never reused.
                id: u64;
                /// 0 load (to a faster tier), 1 store (to a slower tier), 2 copy (within the first
                /// tier).
                kind: u8;
                /// Lease requesting it or waiting for it, or 0.
                lease: u64;
                /// Block handle. 2**64 - 1 for a partial block.
                block: u64;
                /// Content hash of the block, 32 bytes. Zeros unless a disk, remote or kept tier is
                /// involved.
                key: [u8; 32];
                /// Index of the source tier.
                src: u8;
                /// Index of the destination tier.
                dst: u8;
                /// Source slot.
                src_slot: u32;
                /// Destination slot.
                dst_slot: u32;
                /// Layer group.
                group: u8;
                /// First layer.
                layer_lo: u16;
                /// End of the layers, exclusive.
                layer_hi: u16;
                /// Move to complete before this move starts, or 0.
                after: u64;
                /// Number of valid tokens of the block.
                tokens: u32;
            }
            $($more)*
        }
    };
}

pub(super) use columns;

macro_rules! row {
    ({ $($(#[$doc:meta])* $name:ident: $type:ty;)* }) => {
        /// A move: copy `layer_lo..layer_hi` of a block between slots.
        #[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
        #[derive(Clone, Default, PartialEq, Eq, Hash)]
        pub(crate) struct Move {
            $($(#[$doc])* pub(super) $name: $type,)*
            /// Record of the block, only for a disk or remote destination.
            pub(super) label: Vec<u8>,
        }
    };
}

columns!(row);

/// Number of a move kind.
pub(crate) fn number_of(kind: MoveKind) -> u8 {
    match kind {
        MoveKind::Load => LOAD,
        MoveKind::Store => STORE,
        MoveKind::Copy => COPY,
    }
}

impl Move {
    /// Convert an issued move with its lease.
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
