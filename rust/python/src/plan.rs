//! How a request's prefix comes to stand on the first tier.

use kvtrie_core::block::Layers;
use kvtrie_core::manager::{self, Action};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::error::bad;
use crate::number::small;

/// What happens to some layers of consecutive tokens.
#[pyclass(frozen, get_all, eq, skip_from_py_object, module = "kvtrie")]
#[derive(Clone, PartialEq)]
pub(crate) struct Span {
    /// First token.
    start: u64,
    /// One behind the last token.
    stop: u64,
    /// First layer.
    layer_lo: u16,
    /// One behind the last layer.
    layer_hi: u16,
    /// "reuse", "load" or "recompute".
    action: &'static str,
    /// Index of the tier where the bytes are.
    tier: usize,
    /// Predicted time at which the first layer is there, in nanoseconds.
    first_ready: u64,
    /// Predicted time at which all of it is there, in nanoseconds.
    ready: u64,
}

impl Span {
    fn new(span: &manager::Span, block_tokens: u32) -> Self {
        let tokens = |block: u32| u64::from(block) * u64::from(block_tokens);
        Self {
            start: tokens(span.start),
            stop: tokens(span.stop),
            layer_lo: span.layers.lo,
            layer_hi: span.layers.hi,
            action: match span.action {
                Action::Reuse => "reuse",
                Action::Load => "load",
                Action::Recompute => "recompute",
            },
            tier: span.tier,
            first_ready: span.first_ready,
            ready: span.ready,
        }
    }
}

#[pymethods]
impl Span {
    fn __repr__(&self) -> String {
        format!(
            "Span({}..{}, layers={}..{}, {}, tier={}, ready={})",
            self.start, self.stop, self.layer_lo, self.layer_hi, self.action, self.tier, self.ready
        )
    }
}

/// How a request's match comes to stand on the first tier. The rest of the prompt is not part of
/// it: the engine computes that behind the positions to recompute.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Plan {
    plan: manager::Plan,
    compute: Vec<(u32, Layers)>,
    block_tokens: u32,
    layers: u16,
}

impl Plan {
    pub(crate) fn new(lease: &manager::Lease, block_tokens: u32, layers: u16) -> Self {
        let compute = lease.recompute().collect();
        Self { plan: lease.plan().clone(), compute, block_tokens, layers }
    }

    fn layer(&self, layer: &Bound<'_, PyAny>) -> PyResult<u16> {
        let found = small(layer, "layer", u16::MAX)?;
        if found >= self.layers {
            return Err(bad(format!("layer is {found}, the model has {}", self.layers)));
        }
        Ok(found)
    }
}

#[pymethods]
impl Plan {
    /// What happens to which tokens and layers, in logical order.
    #[getter]
    fn spans(&self) -> Vec<Span> {
        self.plan.spans.iter().map(|span| Span::new(span, self.block_tokens)).collect()
    }

    /// Predicted time at which all of the match is there, in nanoseconds.
    #[getter]
    fn finish(&self) -> u64 {
        self.plan.finish
    }

    /// Whether no plan can finish earlier under the lanes' and the cost model's predictions.
    #[getter]
    fn exact(&self) -> bool {
        self.plan.exact
    }

    /// Positions whose KV the engine must write at `layer` (None: at any layer), ascending.
    #[pyo3(signature = (layer=None))]
    fn recompute<'py>(
        &self,
        py: Python<'py>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let layer = layer.map(|layer| self.layer(layer)).transpose()?;
        let size = i64::from(self.block_tokens);
        let mut positions = Vec::new();
        for &(block, layers) in &self.compute {
            if layer.is_none_or(|layer| layers.contains(layer)) {
                positions.extend(i64::from(block) * size..(i64::from(block) + 1) * size);
            }
        }
        Ok(positions.into_pyarray(py))
    }

    /// Predicted time at which what is reused and loaded of `layer` is there, in nanoseconds; 0
    /// if nothing of it is.
    ///
    /// A span of `n` blocks and `l` layers is taken as `n` equal transmissions in a row, so that
    /// layer `i` of it is there at `ready - (l - 1 - i) * (ready - first_ready) / (n * l - 1)`.
    fn ready(&self, layer: &Bound<'_, PyAny>) -> PyResult<u64> {
        let layer = self.layer(layer)?;
        let there = |span: &manager::Span| {
            let parts = u64::from(span.stop - span.start) * u64::from(span.layers.len());
            let step = (span.ready - span.first_ready.min(span.ready)) / (parts - 1).max(1);
            span.ready - u64::from(span.layers.hi - 1 - layer) * step
        };
        let spans = self.plan.spans.iter();
        let awaited = spans
            .filter(|span| span.action != Action::Recompute && span.layers.contains(layer))
            .filter(|span| span.start < span.stop);
        Ok(awaited.map(there).max().unwrap_or(0))
    }

    fn __repr__(&self) -> String {
        let tokens = |action| {
            let spans = self.plan.spans.iter().filter(move |span| span.action == action);
            spans.map(|span| u64::from(span.stop - span.start)).sum::<u64>()
                * u64::from(self.block_tokens)
        };
        format!(
            "Plan(reuse={}, load={}, recompute={}, finish={}, exact={})",
            tokens(Action::Reuse),
            tokens(Action::Load),
            tokens(Action::Recompute),
            self.plan.finish,
            if self.plan.exact { "True" } else { "False" }
        )
    }
}
