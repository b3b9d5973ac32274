//! Late hits: blocks loaded by `load` after an `acquire` without loads.
//!
//! Invariant: a block of a request counts once, as a hit or as a miss. Until it is loaded or its
//! lease releases it, it counts as neither, so both counters only grow. Cost: O(runs of the path)
//! for each such acquire, O(1) per loaded block.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, LeaseId, TierId};
use crate::time::{Stamp, stamp};

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::request::matching::path::LeasePath;

/// Blocks of a lease before they count as hits or misses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Undecided {
    /// Number of undecided blocks.
    blocks: u64,
    /// Ends of stretches of the path, ascending, each with the last use of its blocks before this
    /// request.
    last_used: SmallVec<[(usize, Stamp); 1]>,
}

impl Manager {
    /// Counts the blocks of a new request that `load` may bring as undecided. Call it before
    /// `touch`.
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

    /// Counts block `at` of a lease's path as a hit on a tier, with its age at `acquire`.
    ///
    /// Called when `load` brings its last layers. Later loads of the block and loads of a resumed
    /// lease count nothing, because they belong to the same request.
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

    /// Counts the unloaded blocks of a lease as missed.
    pub(crate) fn count_unloaded(&mut self, undecided: &Undecided) {
        self.meter.requested.undecided -= undecided.blocks;
    }

    /// Checks the undecided count against the sum over all leases.
    pub(crate) fn audit_undecided(&self, broken: &mut Vec<String>) {
        let of_leases: u64 = self.leases.values().map(|lease| lease.undecided.blocks).sum();
        let counted = self.meter.requested.undecided;
        if counted != of_leases {
            broken.push(format!("{counted} blocks are undecided, {of_leases} of leases"));
        }
    }
}
