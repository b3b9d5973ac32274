//! Result of a commit.

use kvtrie_core::manager;
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;

use crate::arrays::handles;
use crate::record::record;

record! {
    /// Result of a commit.
    Committed(manager::Committed) |done, py| {
        /// Handles of the blocks that entered the trie, `uint64[n]`.
        new: Bound<'py, PyArray1<u64>> = handles(py, &done.new);
        /// Private slots whose block another lease had committed already, `uint32[k]`; the lease
        /// keeps them until release.
        duplicate: Bound<'py, PyArray1<u32>> = done.duplicate.to_pyarray(py);
        /// Handles of the earlier blocks, one for each duplicate, `uint64[k]`.
        canonical: Bound<'py, PyArray1<u64>> = handles(py, &done.canonical);
        /// How many of the new blocks had been stored ahead: their copies were taken over.
        ahead: usize = done.ahead;
    }
    repr format!("Committed(new={}, duplicate={})", done.new.len(), done.duplicate.len());
}
