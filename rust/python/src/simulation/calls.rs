//! Records as tuples, and manager calls as tuples starting with a name.

use kvtrie_sim::call::{Call, Handed};
use kvtrie_sim::record::Record;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::moves::number_of;

/// Computed tokens, matched tokens, and recomputed blocks of the match.
type Computed = (u64, usize, Vec<u32>);

/// Nanoseconds in the queue, and waiting for copies.
type Waited = (u64, u64);

/// `(id, machine, arrival, first token, end, hits by tier, peer, computed, waited, saved by tier
/// and by peers, suspended, tokens of the answer)`.
pub(super) type Row = (
    u64,
    usize,
    u64,
    Option<u64>,
    Option<u64>,
    Vec<u64>,
    u64,
    Computed,
    Waited,
    Vec<u64>,
    u64,
    u64,
);

pub(super) fn row(record: &Record) -> Row {
    (
        record.id,
        record.machine,
        record.arrival,
        record.first_token,
        record.end,
        record.hits.clone(),
        record.peer,
        (record.computed, record.matched, record.holes.clone()),
        (record.queued, record.stalled),
        record.saved.clone(),
        record.suspended,
        record.output,
    )
}

/// `(id, kind, lease, src, dst, src_slot, dst_slot, layer_lo, layer_hi, after)`.
type MoveRow = (u64, u8, u64, usize, usize, u32, u32, u16, u16, u64);

fn move_row(order: &Handed) -> MoveRow {
    let Handed { id, lease, src, dst, src_slot, dst_slot, layers, after, .. } = *order;
    (id, number_of(order.kind), lease, src, dst, src_slot, dst_slot, layers.lo, layers.hi, after)
}

pub(super) fn call_row<'py>(py: Python<'py>, call: &Call) -> PyResult<Bound<'py, PyTuple>> {
    match call {
        Call::Acquire { tokens, keep, reserve, layerwise, session, lease, now, .. } => {
            ("acquire", tokens, keep, reserve, layerwise, session, lease, now).into_pyobject(py)
        }
        Call::Moves(moves) => {
            ("moves", moves.iter().map(move_row).collect::<Vec<_>>()).into_pyobject(py)
        }
        Call::Complete(moves, now) => ("complete", moves, now).into_pyobject(py),
        Call::Commit(lease, tokens, now) => ("commit", lease, tokens, now).into_pyobject(py),
        Call::Release(lease, now) => ("release", lease, now).into_pyobject(py),
        Call::End(session, now) => ("end", session, now).into_pyobject(py),
        Call::Progress(session, eta, now) => ("progress", session, eta, now).into_pyobject(py),
        Call::Bring(session, deadline, now) => ("bring", session, deadline, now).into_pyobject(py),
        Call::Demote(session, now) => ("demote", session, now).into_pyobject(py),
        Call::LoadsDue(now) => ("loads-due", now).into_pyobject(py),
        Call::Reserve(lease, tokens, fits, now) => {
            ("reserve", lease, tokens, fits, now).into_pyobject(py)
        }
        Call::Suspend(lease, kind, now) => ("suspend", lease, kind.name(), now).into_pyobject(py),
        Call::Resume(lease, fits, now) => ("resume", lease, fits, now).into_pyobject(py),
        Call::Prefetch(tokens, now) => ("prefetch", tokens, now).into_pyobject(py),
        Call::Mark { tokens, tier, skip, times: (first, ready), fits, now } => {
            ("mark", tokens, tier, skip, first, ready, fits, now).into_pyobject(py)
        }
        Call::Clear { tokens, tier, skip, fits, now } => {
            ("clear", tokens, tier, skip, fits, now).into_pyobject(py)
        }
        Call::Pin(blocks, tier, pin, now) => {
            let blocks: Vec<u64> = blocks.iter().map(|block| block.0).collect();
            ("pin", blocks, tier, pin, now).into_pyobject(py)
        }
        Call::Unpin(pin, now) => ("unpin", pin, now).into_pyobject(py),
    }
}
