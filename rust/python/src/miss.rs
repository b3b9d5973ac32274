//! Records of an explained miss.
//!
//! The call only copies its inputs. Branches are compared at the first attribute read, without the
//! manager's lock and the interpreter's lock. Invariant: the answer is of the time of the call.
//! Cost: see `kvtrie_core::recurrence`, once.

use std::sync::{Mutex, OnceLock, PoisonError};

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::record::record;

/// Default number of branches of a miss.
pub(crate) const BRANCHES: usize = 8;

/// Maximum number of branches of a miss.
pub(crate) const MOST_BRANCHES: usize = 64;

record! {
    /// Cached branch diverging from a prompt.
    MissBranch(kvtrie_core::MissBranch) |branch, py| {
        /// Its tokens after the divergence, at most 64, `uint32[n]`.
        tokens: Bound<'py, PyArray1<u32>> = branch.tokens.to_pyarray(py);
        /// Tokens cached after the divergence, at most 131 072.
        cached: usize = branch.cached;
        /// Nanoseconds since the last use of its first block.
        idle: u64 = branch.idle;
        /// Session ending with the branch.
        session: Option<&str> = branch.session.as_deref();
        /// Prompt tokens after the divergence recurring in the branch.
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

    /// Return the answer. The first call compares the branches.
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

    /// Found tokens per tier.
    #[getter]
    fn found(&self, py: Python<'_>) -> Vec<usize> {
        self.answer(py).found.clone()
    }

    /// Index of the first token different from all cached branches, or None.
    #[getter]
    fn diverged_at(&self, py: Python<'_>) -> Option<usize> {
        self.answer(py).diverged_at
    }

    /// Content key of the last block shared with the branches. None at a first block.
    #[getter]
    fn divergence<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.answer(py).divergence.map(|key| PyBytes::new(py, &key))
    }

    /// Branches at the divergence.
    #[getter]
    fn branches(&self, py: Python<'_>) -> Vec<MissBranch> {
        self.answer(py).branches.iter().cloned().map(MissBranch).collect()
    }

    /// Formerly cached tokens after the match.
    #[getter]
    fn evicted(&self, py: Python<'_>) -> usize {
        self.answer(py).evicted
    }

    /// Known tokens without a complete copy yet.
    #[getter]
    fn in_flight(&self, py: Python<'_>) -> usize {
        self.answer(py).in_flight
    }

    /// Tokens after the match cached in a different scope of the tenant.
    #[getter]
    fn other_scope(&self, py: Python<'_>) -> usize {
        self.answer(py).other_scope
    }

    /// Tokens of the match expected to be faster to compute than to load.
    #[getter]
    fn recomputed(&self, py: Python<'_>) -> usize {
        self.answer(py).recomputed
    }

    /// Ranges of computed tokens, with their causes.
    #[getter]
    fn causes(&self, py: Python<'_>) -> Vec<(usize, usize, &'static str)> {
        let name =
            |&(from, to, cause): &(usize, usize, kvtrie_core::MissCause)| (from, to, cause.name());
        self.answer(py).causes.iter().map(name).collect()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let miss = self.answer(py);
        let diverged = miss.diverged_at.map_or_else(|| "None".to_owned(), |at| at.to_string());
        let causes =
            miss.causes.iter().map(|(from, to, why)| format!("{from}..{to} {}", why.name()));
        let causes: Vec<String> = causes.collect();
        let causes = causes.join(", ");
        format!("Miss(tokens={}, diverged_at={diverged}, causes=[{causes}])", miss.tokens)
    }
}
