//! Event batches: a manager's block events as messages for readers of KV events.
//!
//! Invariants: at most one object per manager at a time. A reader of all batches knows all copies
//! complete at the last batch. Cost: a lock per batch, and the encoding, without the interpreter's
//! lock.

mod wire;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtrie_core::{BlockEvent, BlockEventKind, GroupKind, Handle, Manager};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustc_hash::FxHashMap;

use crate::error::bad;
use crate::event_batches::wire::{Batch, Counts, EventGroup, Form, Hashes, Wire};
use crate::manager::BlockManager;
use crate::number::small;
use crate::shared::Shared;
use crate::text::choice;

/// Medium kept as a tree by Dynamo's indexer: a block without its parent is dropped there.
const TREE: &str = "GPU";

/// Event payload, contents payload, counts of stored, removed and withheld blocks, and whether
/// events were lost.
type Taken<'py> = (Option<Bound<'py, PyBytes>>, Option<Bound<'py, PyBytes>>, (u64, u64, u64), bool);

/// Encoder of a manager's block events.
#[pyclass(frozen, module = "kvtrie._kvtrie")]
pub(crate) struct EventBatches {
    shared: Shared,
    wire: Wire,
    /// Number of the next event.
    next: Mutex<u64>,
    closed: AtomicBool,
}

/// Batches of a call.
struct Made {
    events: Option<Vec<u8>>,
    contents: Option<Vec<u8>>,
    counts: Counts,
    lost: bool,
}

#[pymethods]
impl EventBatches {
    #[new]
    #[pyo3(signature = (manager, mediums, *, hashes, form, rank))]
    fn new(
        manager: &Bound<'_, BlockManager>,
        mediums: Vec<Option<String>>,
        hashes: &Bound<'_, PyAny>,
        form: &Bound<'_, PyAny>,
        rank: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let hashes = choice(hashes, "hashes", &[("int", Hashes::Int), ("bytes", Hashes::Bytes)])?;
        let form = choice(form, "form", &[("map", Form::Map), ("array", Form::Array)])?;
        let rank = small(rank, "dp_rank", u32::MAX)?;
        let (py, shared) = (manager.py(), manager.get().shared.clone());
        if mediums.len() != shared.tiers() {
            let tiers = shared.tiers();
            return Err(bad(format!("{} mediums for {tiers} tiers", mediums.len())));
        }
        let (events, block_tokens, groups) = shared.call(py, |manager| {
            manager.open()?;
            let settings = manager.settings();
            let groups = settings.groups.iter().flat_map(|of| &of.groups);
            let groups = groups.map(|group| event_group(group.kind)).collect();
            Ok((settings.block_events, settings.block_tokens, groups))
        })?;
        if events == 0 {
            let wanted = "BlockManager(events=n, events_of='residency')";
            return Err(bad(format!("the manager keeps no events of residency: {wanted} does")));
        }
        if !shared.publish() {
            return Err(bad("the manager has a publisher: close it first, or use that one"));
        }
        let tree = mediums.iter().position(|medium| medium.as_deref() == Some(TREE));
        let wire = Wire { form, hashes, rank, block_tokens, mediums, tree, groups };
        Ok(Self { shared, wire, next: Mutex::new(0), closed: AtomicBool::new(false) })
    }

    /// Take the events since the last call as a batch. After a loss, or with `contents`, also take
    /// the contents as a batch.
    #[pyo3(signature = (ts, *, contents))]
    fn take<'py>(&self, py: Python<'py>, ts: f64, contents: bool) -> PyResult<Taken<'py>> {
        let made = self.shared.long(py, |manager| self.make(manager, ts, contents))?;
        let bytes = |payload: Option<Vec<u8>>| payload.map(|payload| PyBytes::new(py, &payload));
        let Counts { stored, removed, withheld } = made.counts;
        let counts = (stored, removed, withheld);
        Ok((bytes(made.events), bytes(made.contents), counts, made.lost))
    }

    /// Allow a new object to encode the manager's events.
    fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.shared.end_publishing();
        }
    }

    fn __repr__(&self) -> String {
        format!("EventBatches({} tiers)", self.wire.mediums.len())
    }
}

impl EventBatches {
    fn make(&self, manager: &mut Manager, ts: f64, contents: bool) -> kvtrie_core::Result<Made> {
        let events = manager.take_block_events()?;
        let mut next = self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let lost = events.first().is_some_and(|event| event.number != *next);
        let mut made = Made { events: None, contents: None, counts: Counts::default(), lost };
        if let Some(last) = events.last() {
            *next = last.number + 1;
        }
        if !lost {
            let mut batch = Batch::new(&self.wire);
            self.add_events(&mut batch, manager, &events);
            (made.events, made.counts) = batch.end(ts);
        }
        if lost || contents {
            let mut batch = Batch::new(&self.wire);
            batch.clear();
            let (number, copies) = manager.block_contents()?;
            *next = number;
            for event in copies {
                batch.add(&event);
            }
            let (payload, counts) = batch.end(ts);
            made.contents = payload;
            if lost {
                made.counts = counts;
            }
        }
        Ok(made)
    }
}

impl Drop for EventBatches {
    fn drop(&mut self) {
        self.close();
    }
}

impl EventBatches {
    /// Add events in order. After a block filling a hole of the tree, its descendants are removed
    /// and stored again, because indexers drop blocks without a parent.
    fn add_events(&self, batch: &mut Batch<'_>, manager: &Manager, events: &[BlockEvent]) {
        let in_tree = |event: &BlockEvent| {
            event.kind == BlockEventKind::Stored
                && event.whole
                && event.group == 0
                && Some(event.tier) == self.wire.tree
                && !event.private
        };
        let mut last: Option<FxHashMap<Handle, usize>> = None;
        for (at, event) in events.iter().enumerate() {
            batch.add(event);
            if !in_tree(event) {
                continue;
            }
            let child = |next: &BlockEvent| next.parent == event.key && in_tree(next);
            let next = events.get(at + 1).is_some_and(child);
            // In most cases its child is next, or it has none.
            if manager.ways_after(event.block) <= usize::from(next) {
                continue;
            }
            let last = last.get_or_insert_with(|| {
                let stored = events.iter().enumerate().filter(|(_, event)| in_tree(event));
                stored.map(|(at, event)| (event.block, at)).collect()
            });
            let comes = |block: Handle| last.get(&block).is_some_and(|&last| last > at);
            let mut after = manager.copies_after(event.block, event.tier, comes);
            after.retain(|copy| !copy.private);
            for copy in after.iter().rev() {
                let kind = BlockEventKind::Removed;
                batch.add(&BlockEvent { kind, ..copy.clone() });
            }
            for copy in &after {
                batch.add(copy);
            }
        }
    }
}

/// Layer group with vLLM's names.
fn event_group(kind: GroupKind) -> EventGroup {
    let (kind, window) = match kind {
        GroupKind::Full => ("full_attention", None),
        GroupKind::Sliding { window, .. } => ("sliding_window", Some(window)),
        GroupKind::Chunked { .. } => ("chunked_local_attention", None),
        GroupKind::State => ("mamba", None),
    };
    EventGroup { kind, window }
}
