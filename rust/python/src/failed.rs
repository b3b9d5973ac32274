//! Failure report: tokens of a lease's plan that will not arrive.

use kvtrie_core::manager;
use pyo3::prelude::*;

/// Tokens of a lease's plan that will not arrive.
#[pyclass(frozen, get_all, module = "kvtrie")]
pub(crate) struct Failed {
    /// The lease concerned; 0 if none is.
    lease: u64,
    /// Handle of the block; None for a partial one.
    block: Option<u64>,
    /// First token on the lease's path.
    start: u64,
    /// One behind the last token.
    stop: u64,
    /// The executor's message.
    reason: String,
}

impl From<manager::Failed> for Failed {
    fn from(failed: manager::Failed) -> Self {
        let manager::Failed { lease, block, start, stop, reason } = failed;
        Self { lease, block: block.map(|block| block.0), start, stop, reason }
    }
}

#[pymethods]
impl Failed {
    fn __repr__(&self) -> String {
        let block = self.block.map_or_else(|| "None".to_owned(), |block| format!("{block:#x}"));
        format!(
            "Failed(lease={}, block={block}, start={}, stop={}, reason={:?})",
            self.lease, self.start, self.stop, self.reason
        )
    }
}
