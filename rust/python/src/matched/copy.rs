//! Copy of a block on a tier.

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

use crate::record::record;

record! {
    /// Copy of a block on a tier.
    Copy((kvtrie_core::Copy, Vec<u32>)) |copy, py| {
        /// Index of the tier.
        tier: usize = copy.0.tier;
        /// Layer group.
        group: u8 = copy.0.group;
        /// Slot. With layer slots, the slot of the first layer of `coming`.
        slot: u32 = copy.0.slot;
        /// Slots. With layer slots, a slot for each layer of `coming`.
        slots: Bound<'py, PyArray1<u32>> = copy.1.to_pyarray(py);
        /// First currently valid layer.
        layer_lo: u16 = copy.0.layers.lo;
        /// End of the currently valid layers, exclusive.
        layer_hi: u16 = copy.0.layers.hi;
        /// First layer valid at `ready`.
        coming_lo: u16 = copy.0.coming.lo;
        /// End of the layers valid at `ready`, exclusive.
        coming_hi: u16 = copy.0.coming.hi;
        /// Expected arrival of the first coming layer, in nanoseconds. The current time if
        /// resident.
        first: u64 = copy.0.first;
        /// Expected arrival of all layers, in nanoseconds. The current time if resident.
        ready: u64 = copy.0.ready;
        /// Whether it is a victim. It stays valid until the store reading it has ended.
        leaving: bool = copy.0.leaving;
    }
    repr format!(
        "Copy(tier={}, group={}, slot={}, layers={}, coming={}, ready={})",
        copy.0.tier, copy.0.group, copy.0.slot, copy.0.layers, copy.0.coming, copy.0.ready
    );
}
