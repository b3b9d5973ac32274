//! Records of an explained miss.
//!
//! The call itself copies what the answer needs; branches are compared when an attribute is read first,
//! without the manager's lock and the interpreter's. Invariant: the answer is that of the time of the
//! call. Cost: see `kvtrie_core::recurrence`, once.

use std::sync::{Mutex, OnceLock, PoisonError};

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::record::record;

/// Branches of a miss where the caller names no number.
pub(crate) const BRANCHES: usize = 8;

/// Bound of the branches of a miss.
pub(crate) const MOST_BRANCHES: usize = 64;

record! {
    /// Cached branch from which a prompt parted.
    MissBranch(kvtrie_core::MissBranch) |branch, py| {
        /// Its tokens from the parting on, at most 64, `uint32[n]`.
        tokens: Bound<'py, PyArray1<u32>> = branch.tokens.to_pyarray(py);
        /// Tokens cached after the parting, at most 131 072.
        cached: usize = branch.cached;
        /// Nanoseconds since the last use of its first block.
        idle: u64 = branch.idle;
        /// The session that ends with it.
        session: Option<&str> = branch.session.as_deref();
        /// Tokens of the prompt after the parting that recur in it.
        recurring: usize = branch.recurring;
    }
    repr format!("MissBranch(cached={}, recurring={})", branch.cached, branch.recurring);
}

/// Explanation of a miss.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Miss {
    open: Mutex<Option<kvtrie_core::OpenMiss>>,
    closed: OnceLock<kvtrie_core::Miss>,
}

impl Miss {
    pub(crate) fn new(open: kvtrie_core::OpenMiss) -> Self {
        Self { open: Mutex::new(Some(open)), closed: OnceLock::new() }
    }

    /// The answer; the first call compares the branches.
    fn answer(&self, py: Python<'_>) -> &kvtrie_core::Miss {
        self.closed.get().unwrap_or_else(|| {
            py.detach(|| {
                self.closed.get_or_init(|| {
                    let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
                    open.take().expect("it is closed once").close()
                })
            })
        })
    }
}

#[pymethods]
impl Miss {
    /// Tokens of the prompt.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> usize {
        self.answer(py).tokens
    }

    /// Tokens found, per tier.
    #[getter]
    fn found(&self, py: Python<'_>) -> Vec<usize> {
        self.answer(py).found.clone()
    }

    /// Index of the first token that differs from the cached branches; None if none does.
    #[getter]
    fn parted_at(&self, py: Python<'_>) -> Option<usize> {
        self.answer(py).parted_at
    }

    /// Content key of the last block in common with the branches; None at a first block.
    #[getter]
    fn parting<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.answer(py).parting.map(|key| PyBytes::new(py, &key))
    }

    /// The branches there.
    #[getter]
    fn branches(&self, py: Python<'_>) -> Vec<MissBranch> {
        self.answer(py).branches.iter().cloned().map(MissBranch).collect()
    }

    /// Tokens after the match that were cached once.
    #[getter]
    fn evicted(&self, py: Python<'_>) -> usize {
        self.answer(py).evicted
    }

    /// Tokens that are known and have no complete copy yet.
    #[getter]
    fn in_flight(&self, py: Python<'_>) -> usize {
        self.answer(py).in_flight
    }

    /// Tokens after the match that another scope of the tenant has.
    #[getter]
    fn other_scope(&self, py: Python<'_>) -> usize {
        self.answer(py).other_scope
    }

    /// Tokens of the match that are expected to be computed faster than loaded.
    #[getter]
    fn recomputed(&self, py: Python<'_>) -> usize {
        self.answer(py).recomputed
    }

    /// Ranges of computed tokens and their causes.
    #[getter]
    fn causes(&self, py: Python<'_>) -> Vec<(usize, usize, &'static str)> {
        let name =
            |&(from, to, cause): &(usize, usize, kvtrie_core::MissCause)| (from, to, cause.name());
        self.answer(py).causes.iter().map(name).collect()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let miss = self.answer(py);
        let parted = miss.parted_at.map_or_else(|| "None".to_owned(), |at| at.to_string());
        let causes =
            miss.causes.iter().map(|(from, to, why)| format!("{from}..{to} {}", why.name()));
        let causes: Vec<String> = causes.collect();
        format!("Miss(tokens={}, parted_at={parted}, causes=[{}])", miss.tokens, causes.join(", "))
    }
}
