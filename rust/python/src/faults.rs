//! Fault-injecting disk, for tests.
//!
//! Invariant: faults are injected below the store, as if the device failed. Cost: a lock per device
//! call.

use std::path::PathBuf;
use std::sync::Arc;

use kvtrie_store::{self as store, Call, Chance, Fault, System};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::disk::{DiskStore, settings};
use crate::error::bad;
use crate::text::chosen;

/// Fault-injecting device.
#[pyclass(frozen, module = "kvtrie._kvtrie")]
pub(crate) struct Faults {
    device: Arc<store::Faults>,
}

fn fault(name: &str) -> PyResult<Fault> {
    Fault::ALL.into_iter().find(|fault| fault.name() == name).ok_or_else(|| {
        let known = Fault::ALL.map(Fault::name).join(", ");
        bad(format!("there is no fault '{name}', only {known}"))
    })
}

#[pymethods]
impl Faults {
    #[new]
    #[pyo3(signature = (seed=0, *, direct=true, queue="best"))]
    fn new(seed: u64, direct: bool, queue: &str) -> PyResult<Self> {
        let inner = Arc::new(System::new(direct, crate::disk::queue(queue)?));
        Ok(Self { device: Arc::new(store::Faults::new(inner, seed)) })
    }

    /// Open a store on this device. Arguments as for `DiskStore`.
    #[pyo3(signature = (
        folder, *, identity, about, layers, layer_bytes, block_tokens, blocks,
        durability="flush", **_device
    ))]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted, not lent")]
    fn open(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        identity: &[u8],
        about: String,
        layers: u16,
        layer_bytes: usize,
        block_tokens: u32,
        blocks: u32,
        durability: &str,
        _device: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<DiskStore> {
        let settings =
            settings(identity, about, layers, layer_bytes, block_tokens, blocks, durability)?;
        let device = Arc::clone(&self.device) as Arc<dyn store::Device>;
        DiskStore::open(py, device, &folder, settings)
    }

    /// Inject a fault in `per_mille` of a thousand calls, or once after `after` calls.
    #[pyo3(signature = (kind, *, per_mille=None, after=None))]
    fn inject(&self, kind: &str, per_mille: Option<u32>, after: Option<u64>) -> PyResult<()> {
        let chance = match (per_mille, after) {
            (Some(share), None) => Chance::PerMille(share),
            (None, Some(calls)) => Chance::After(calls),
            _ => {
                return Err(bad(
                    "a fault occurs in per_mille of the calls or once after a number: give one",
                ));
            }
        };
        self.device.inject(fault(kind)?, chance);
        Ok(())
    }

    /// End all faults.
    fn heal(&self) {
        self.device.heal();
    }

    /// Number of injected faults of a kind.
    fn injected(&self, kind: &str) -> PyResult<u64> {
        Ok(self.device.injected(fault(kind)?))
    }

    /// Maximum number of queued operations in flight since the last call, and of files with
    /// operations in flight.
    fn most_at_once(&self) -> (usize, usize) {
        self.device.most_at_once()
    }

    /// Stop calls of these kinds until the gate opens.
    fn close_gate(&self, calls: &Bound<'_, PyAny>) -> PyResult<()> {
        let calls: Vec<String> = calls.extract()?;
        let known = [("read", Call::Read), ("write", Call::Write), ("sync", Call::Sync)];
        let call = |name: &String| chosen(name, "a call that a gate stops", &known);
        let calls = calls.iter().map(call).collect::<PyResult<Vec<_>>>()?;
        self.device.close_gate(&calls);
        Ok(())
    }

    /// Release the stopped calls.
    fn open_gate(&self) {
        self.device.open_gate();
    }

    /// Wait until at least `hanging` calls are stopped.
    fn wait_for(&self, py: Python<'_>, hanging: usize) {
        py.detach(|| self.device.wait_for(hanging));
    }
}
