//! Event: layers of a block were stored on a tier or removed from it.

use kvtrie_core::BlockEventKind;
use pyo3::prelude::*;

/// Layers of a block stored on a tier or removed from it.
#[pyclass(frozen, get_all, module = "kvtrie")]
#[derive(Default)]
pub(crate) struct Event {
    /// "stored" or "removed".
    kind: &'static str,
    /// Time in nanoseconds.
    at: u64,
    /// Handle of the block.
    block: u64,
    /// First layer.
    layer_lo: u16,
    /// End of the layers, exclusive.
    layer_hi: u16,
    /// Index of the tier.
    tier: usize,
    /// Layer group.
    group: u8,
    /// Whether a copy remains after an eviction: "clean", "demoted" or "dropped".
    reason: Option<&'static str>,
    /// Cause of an eviction.
    cause: Option<&'static str>,
    /// Index of the destination tier of evicted layers, or None.
    to: Option<usize>,
    /// Nanoseconds since the last use of an evicted block.
    idle: Option<u64>,
    /// Sequence number of a residency event.
    number: Option<u64>,
    /// Content key of the block.
    key: Option<[u8; 32]>,
    /// Content key of the preceding block, or of the scope.
    parent: Option<[u8; 32]>,
    /// Whether it is the first block of a sequence.
    first: Option<bool>,
    /// Tokens of the block.
    tokens: Option<Vec<u32>>,
}

impl From<kvtrie_core::Event> for Event {
    fn from(event: kvtrie_core::Event) -> Self {
        let kvtrie_core::Event { at, block, layers, tier, reason, cause, to, idle } = event;
        Self {
            kind: BlockEventKind::Removed.name(),
            at,
            block: block.0,
            layer_lo: layers.lo,
            layer_hi: layers.hi,
            tier,
            reason: Some(reason.name()),
            cause: Some(cause.name()),
            to,
            idle: Some(idle),
            ..Self::default()
        }
    }
}

impl From<kvtrie_core::BlockEvent> for Event {
    fn from(event: kvtrie_core::BlockEvent) -> Self {
        let kvtrie_core::BlockEvent {
            number,
            at,
            kind,
            block,
            key,
            parent,
            first,
            tokens,
            tier,
            group,
            layers,
            ..
        } = event;
        Self {
            kind: kind.name(),
            at,
            block: block.0,
            layer_lo: layers.lo,
            layer_hi: layers.hi,
            tier,
            group,
            number: Some(number),
            key: Some(key),
            parent: Some(parent),
            first: Some(first),
            tokens: Some(tokens.into_vec()),
            ..Self::default()
        }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        let Self { kind, at, block, layer_lo, layer_hi, tier, .. } = self;
        let shown = format!(
            "Event(kind='{kind}', at={at}, block={block:#x}, layers={layer_lo}..{layer_hi}, \
             tier={tier}"
        );
        match (self.reason, self.idle) {
            (Some(reason), Some(idle)) => {
                let to = self.to.map_or_else(|| "None".to_owned(), |to| to.to_string());
                format!("{shown}, reason='{reason}', to={to}, idle={idle})")
            }
            _ => format!("{shown})"),
        }
    }
}
