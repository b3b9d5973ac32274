//! Span of a plan: layers of consecutive tokens with the same action.

use kvtrie_core::Action;
use pyo3::prelude::*;

/// Layers of consecutive tokens with the same action.
#[pyclass(frozen, get_all, eq, hash, module = "kvtrie")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    /// First token.
    start: u64,
    /// End of the tokens, exclusive.
    stop: u64,
    /// First layer.
    layer_lo: u16,
    /// End of the layers, exclusive.
    layer_hi: u16,
    /// "reuse", "load" or "recompute".
    action: &'static str,
    /// Index of the source tier.
    tier: usize,
    /// Predicted residency time of the first layer, in nanoseconds.
    first_ready: u64,
    /// Predicted residency time of all layers, in nanoseconds.
    ready: u64,
}

impl Span {
    pub(super) fn new(span: &kvtrie_core::Span, block_tokens: u32) -> Self {
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
