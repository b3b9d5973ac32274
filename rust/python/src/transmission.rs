//! Transmission on a lane: the arrival time of each layer.

use kvtrie_core::lane;
use pyo3::prelude::*;

/// Arrival times of a transmission: layer `i` is there at `first + i * per_layer`.
#[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Transmission {
    /// Arrival of the last layer, in nanoseconds.
    end: u64,
    /// Arrival of the first layer, in nanoseconds.
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
