//! Counters as dictionaries.

use kvtrie_core::lane::Lanes;
use kvtrie_core::manager::{Manager, TierStats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Counters as they were at one moment, without a Python object in them.
pub(crate) struct Stats {
    tiers: Vec<(&'static str, Vec<(&'static str, u64)>)>,
    lanes: Vec<(String, [u64; 3])>,
    totals: [(&'static str, u64); 6],
}

impl Stats {
    /// Reads all counters.
    pub(crate) fn new(manager: &Manager) -> Self {
        let (blocks, leases, clamped) = manager.totals();
        let (queued, moves) = manager.pending();
        let specs = manager.settings().tiers.iter().enumerate();
        Self {
            tiers: specs.map(|(at, spec)| (spec.kind.name(), tier(manager, at))).collect(),
            lanes: lanes(manager.lanes()),
            totals: [
                ("blocks", blocks as u64),
                ("leases", leases as u64),
                ("moves", moves as u64),
                ("queued", queued as u64),
                ("clamped", clamped),
                ("now", manager.now()),
            ],
        }
    }

    /// The dictionary that users see.
    pub(crate) fn into_dict(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let stats = PyDict::new(py);
        let tiers = PyDict::new(py);
        for (name, counters) in self.tiers {
            let tier = PyDict::new(py);
            for (counter, value) in counters {
                tier.set_item(counter, value)?;
            }
            tiers.set_item(name, tier)?;
        }
        stats.set_item("tiers", tiers)?;
        let lanes = PyDict::new(py);
        for (name, [busy, bytes, free_at]) in self.lanes {
            let lane = PyDict::new(py);
            lane.set_item("busy_ns", busy)?;
            lane.set_item("bytes", bytes)?;
            lane.set_item("free_at", free_at)?;
            lanes.set_item(name, lane)?;
        }
        stats.set_item("lanes", lanes)?;
        for (name, value) in self.totals {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }
}

fn tier(manager: &Manager, at: usize) -> Vec<(&'static str, u64)> {
    let TierStats {
        hits,
        tokens_hit,
        tokens_wanted,
        inserted,
        evicted_clean,
        evicted_dirty,
        dropped,
        demoted,
        bytes_freed,
        bytes_read,
        bytes_written,
        moves,
        failed,
        move_ns,
    } = manager.stats(at);
    let now = manager.occupancy(at);
    vec![
        ("slots", now.slots),
        ("free", now.free),
        ("coming", now.coming),
        ("evictable", now.evictable),
        ("hits", hits),
        ("tokens_hit", tokens_hit),
        ("tokens_wanted", tokens_wanted),
        ("inserted", inserted),
        ("evicted_clean", evicted_clean),
        ("evicted_dirty", evicted_dirty),
        ("dropped", dropped),
        ("demoted", demoted),
        ("bytes_freed", bytes_freed),
        ("bytes_read", bytes_read),
        ("bytes_written", bytes_written),
        ("moves", moves),
        ("failed", failed),
        ("move_ns", move_ns),
    ]
}

fn lanes(lanes: &Lanes) -> Vec<(String, [u64; 3])> {
    let of =
        |id| (lanes.spec(id).name.clone(), [lanes.busy(id), lanes.bytes(id), lanes.free_at(id)]);
    (0..lanes.len()).map(of).collect()
}
