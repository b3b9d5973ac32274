//! Late hits: blocks that `load` brings after an `acquire` that loads nothing.
//!
//! Invariant: a block of a request counts once, as a hit or as a miss; until it is loaded, or its
//! lease lets go of it, it counts as neither, so that both counters only grow. Cost: O(runs of the
//! path) per such acquire, O(1) per block loaded.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, LeaseId, TierId};
use crate::time::{Stamp, stamp};

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::request::matching::path::LeasePath;

/// Blocks of a lease that are neither hits nor misses yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Undecided {
    /// Number of these blocks.
    blocks: u64,
    /// Ends of stretches of the path, ascending, each with the time of its blocks' last use before
    /// this request.
    last_used: SmallVec<[(usize, Stamp); 1]>,
}

impl Manager {
    /// Leaves the blocks of a new request undecided that `load` may bring, before `touch`.
    pub(crate) fn count_undecided(&mut self, path: &LeasePath) -> Undecided {
        let blocks = path.exceptions().filter(|(_, step)| step.deferred).count() as u64;
        if blocks == 0 {
            return Undecided::default();
        }
        self.meter.requested.undecided += blocks;
        let mut end = 0;
        let stretch = |(run, node): (Range<BlockId>, &Node)| {
            end += (run.end - run.start) as usize;
            (end, node.access)
        };
        Undecided { blocks, last_used: self.trie().along(path.blocks()).map(stretch).collect() }
    }

    /// Counts block `at` of a lease's path, of which `load` brings the last layers, as found on a
    /// tier, with the age that it had at `acquire`. Later loads of it, and all of a lease that was
    /// suspended, count nothing: that is the same request.
    pub(crate) fn count_late_hit(&mut self, id: LeaseId, at: usize, tier: TierId) {
        let lease = self.lease_mut(id);
        let undecided = &mut lease.undecided;
        let stretch = undecided.last_used.partition_point(|&(end, _)| end <= at);
        let Some(&(_, access)) = undecided.last_used.get(stretch) else { return };
        undecided.blocks -= 1;
        let age = stamp(lease.acquired).saturating_sub(access);
        self.meter.requested.undecided -= 1;
        self.meter.count_hits(tier, age, 1, self.settings.block_tokens);
    }

    /// Counts what a lease has not loaded as missed.
    pub(crate) fn count_unloaded(&mut self, undecided: &Undecided) {
        self.meter.requested.undecided -= undecided.blocks;
    }

    /// The undecided blocks are those of all leases.
    pub(crate) fn audit_undecided(&self, broken: &mut Vec<String>) {
        let of_leases: u64 = self.leases.values().map(|lease| lease.undecided.blocks).sum();
        let counted = self.meter.requested.undecided;
        if counted != of_leases {
            broken.push(format!("{counted} blocks are undecided, {of_leases} of leases"));
        }
    }
}
