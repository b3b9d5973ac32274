//! Copy of a block on one tier.

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

use crate::record::record;

record! {
    /// Copy of a block on one tier.
    Copy((kvtrie_core::Copy, Vec<u32>)) |copy, py| {
        /// Index of the tier.
        tier: usize = copy.0.tier;
        /// Group of layers.
        group: u8 = copy.0.group;
        /// Its slot; with layer slots that of the first layer of `coming`.
        slot: u32 = copy.0.slot;
        /// Its slots: one, or with layer slots one for each layer of `coming`.
        slots: Bound<'py, PyArray1<u32>> = copy.1.to_pyarray(py);
        /// First layer that is valid now.
        layer_lo: u16 = copy.0.layers.lo;
        /// End of the layers that are valid now, exclusive.
        layer_hi: u16 = copy.0.layers.hi;
        /// First layer that will be valid at `ready`.
        coming_lo: u16 = copy.0.coming.lo;
        /// End of the layers that will be valid at `ready`, exclusive.
        coming_hi: u16 = copy.0.coming.hi;
        /// When the first of the coming layers is expected, in nanoseconds; now if it is resident.
        first: u64 = copy.0.first;
        /// When all of it is expected, in nanoseconds; now if it is resident.
        ready: u64 = copy.0.ready;
        /// Whether it is a victim: it stays valid until the store that reads it has ended.
        leaving: bool = copy.0.leaving;
    }
    repr format!(
        "Copy(tier={}, group={}, slot={}, layers={}, coming={}, ready={})",
        copy.0.tier, copy.0.group, copy.0.slot, copy.0.layers, copy.0.coming, copy.0.ready
    );
}
