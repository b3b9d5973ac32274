//! Records as tuples.

use kvtrie_sim::record::Record;

/// `(id, machine, arrival, first token, end, hits by tier, peer, computed, stalled, saved by tier and
/// by peers, suspended, tokens of the answer)`.
pub(super) type Row =
    (u64, usize, u64, Option<u64>, Option<u64>, Vec<u64>, u64, u64, u64, Vec<u64>, u64, u64);

pub(super) fn row(record: &Record) -> Row {
    (
        record.id,
        record.machine,
        record.arrival,
        record.first_token,
        record.end,
        record.hits.clone(),
        record.peer,
        record.computed,
        record.stalled,
        record.saved.clone(),
        record.suspended,
        record.output,
    )
}
