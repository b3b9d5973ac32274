//! When a transmission on a lane ends, layer by layer.

use kvtrie_core::lane;
use pyo3::prelude::*;

/// When a transmission ends: layer `i` is there at `first + i * per_layer`.
#[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Transmission {
    /// When the last layer is there, in nanoseconds.
    end: u64,
    /// When the first layer is there, in nanoseconds.
    first: u64,
    /// Nanoseconds between two layers.
    per_layer: u64,
}

impl From<lane::Transmission> for Transmission {
    fn from(sent: lane::Transmission) -> Self {
        let lane::Transmission { end, first, per_layer } = sent;
        Self { end, first, per_layer }
    }
}

#[pymethods]
impl Transmission {
    fn __repr__(&self) -> String {
        let Self { end, first, per_layer } = self;
        format!("Transmission(end={end}, first={first}, per_layer={per_layer})")
    }
}
