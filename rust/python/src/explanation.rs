//! Explanation of a block's rank.

use kvtrie_core::manager;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::record::record;

record! {
    /// Price of a block on a tier at a time.
    Explanation(manager::Explanation) |found, py| {
        /// The product of all terms and weights.
        cost: f64 = found.terms.cost;
        /// `base`, the cost of computing a token of the block again, and `uses`, its discounted
        /// number of uses. Terms that the policy does not use are 1.
        terms: PyResult<Bound<'py, PyDict>> =
            [("base", found.terms.base), ("uses", f64::from(found.terms.uses))].into_py_dict(py);
        /// `layer` and `position`; 1 if the policy does not use them.
        weights: PyResult<Bound<'py, PyDict>> = [
            ("layer", found.terms.layer_weight),
            ("position", found.terms.position_weight),
        ].into_py_dict(py);
        /// Nanoseconds since the last use.
        idle: u64 = found.idle;
        /// Retention value: cost per second of idle time; infinite at zero idle time.
        value: f64 = found.value;
        /// Its priority on the tier, 35 without a hint; lower ones are evicted first.
        priority: u8 = found.priority;
        /// Number of entries of the tier evicted before it; None while it cannot be a victim.
        rank: Option<usize> = found.rank;
        /// The layers that would be evicted next, as `(first, one behind the last)`.
        layers: (u16, u16) = (found.layers.lo, found.layers.hi);
        /// The value in words, under a policy that learns it; None under any other.
        words: Option<&str> = found.words.as_deref();
    }
    repr format!(
        "Explanation(cost={}, idle={}, value={}, priority={}, rank={}, layers={})",
        found.terms.cost, found.idle, found.value, found.priority,
        found.rank.map_or_else(|| "None".to_owned(), |rank| rank.to_string()), found.layers
    );
}
