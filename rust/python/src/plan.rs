//! Plan: how a request's prefix becomes resident on the first tier.

mod span;

use kvtrie_core::{Action, Layers};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::error::bad;
use crate::number::Layer;

pub(crate) use span::Span;

/// Plan of a request: how its match becomes resident on the first tier, and the predicted end of
/// the prompt.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct Plan {
    inner: kvtrie_core::Plan,
    compute: Vec<(u32, Layers)>,
    /// Block borders at which a pass should end.
    borders: Vec<u32>,
    block_tokens: u32,
    layers: u16,
}

impl Plan {
    pub(crate) fn new(lease: &kvtrie_core::Lease, block_tokens: u32, layers: u16) -> Self {
        let (compute, borders) = (lease.recompute().collect(), lease.resume_borders().collect());
        Self { inner: lease.plan().clone(), compute, borders, block_tokens, layers }
    }

    fn check(&self, layer: u16) -> PyResult<()> {
        if layer < self.layers {
            return Ok(());
        }
        Err(bad(format!("layer is {layer}, the model has {}", self.layers)))
    }
}

#[pymethods]
impl Plan {
    /// Spans of tokens and layers with their action, in logical order.
    #[getter]
    fn spans(&self) -> Vec<Span> {
        self.inner.spans.iter().map(|span| Span::new(span, self.block_tokens)).collect()
    }

    /// Predicted end of computing the whole prompt, in nanoseconds.
    #[getter]
    fn finish(&self) -> u64 {
        self.inner.finish
    }

    /// Whether no plan can finish earlier under the lanes' and the cost model's predictions.
    #[getter]
    fn exact(&self) -> bool {
        self.inner.exact
    }

    /// Token borders at which a pass should end, ascending.
    #[getter]
    fn resume(&self) -> Vec<u64> {
        let tokens = |&border: &u32| u64::from(border) * u64::from(self.block_tokens);
        self.borders.iter().map(tokens).collect()
    }

    /// Positions for the engine to write KV at `layer` (None: at any layer), ascending.
    #[pyo3(signature = (layer=None))]
    fn recompute<'py>(
        &self,
        py: Python<'py>,
        layer: Option<Layer>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let layer = layer.map(|layer| layer.0);
        layer.map_or(Ok(()), |layer| self.check(layer))?;
        let size = i64::from(self.block_tokens);
        let mut positions = Vec::new();
        for &(block, layers) in &self.compute {
            if layer.is_none_or(|layer| layers.contains(layer)) {
                positions.extend(i64::from(block) * size..(i64::from(block) + 1) * size);
            }
        }
        Ok(positions.into_pyarray(py))
    }

    /// Predicted residency time of the reused and loaded spans of `layer`, in nanoseconds. 0
    /// without spans.
    ///
    /// A span of `n` blocks and `l` layers counts as `n` consecutive equal transmissions, with
    /// layer `i` resident at `ready - (l - 1 - i) * (ready - first_ready) / (n * l - 1)`.
    fn ready(&self, layer: Layer) -> PyResult<u64> {
        let layer = layer.0;
        self.check(layer)?;
        let resident_at = |span: &kvtrie_core::Span| {
            let parts = u64::from(span.stop - span.start) * u64::from(span.layers.len());
            let step = (span.ready - span.first_ready.min(span.ready)) / (parts - 1).max(1);
            span.ready - u64::from(span.layers.hi - 1 - layer) * step
        };
        let spans = self.inner.spans.iter();
        let awaited = spans
            .filter(|span| span.action != Action::Recompute && span.layers.contains(layer))
            .filter(|span| span.start < span.stop);
        Ok(awaited.map(resident_at).max().unwrap_or(0))
    }

    fn __repr__(&self) -> String {
        let tokens = |action| {
            let spans = self.inner.spans.iter().filter(move |span| span.action == action);
            spans.map(|span| u64::from(span.stop - span.start)).sum::<u64>()
                * u64::from(self.block_tokens)
        };
        format!(
            "Plan(reuse={}, load={}, recompute={}, finish={}, exact={})",
            tokens(Action::Reuse),
            tokens(Action::Load),
            tokens(Action::Recompute),
            self.inner.finish,
            if self.inner.exact { "True" } else { "False" }
        )
    }
}
