//! The network between machines: a lane for each ordered pair of them, or one queue for all, which
//! lanes of tiers with the queue's name enter too.
//!
//! Invariant: transmissions enter a lane in order. Cost: O(log machines) per
//! transmission.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtrie_core::{LaneId, LaneSpec, Lanes, Nanos, Transmission};

use crate::event::MachineId;
use crate::record::LaneUse;

/// The name of the lanes between machines.
pub const LANE: &str = "peers";

/// Lanes between machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSpec {
    /// Bandwidth of each lane.
    pub bytes_per_s: u64,
    /// Latency of each transmission.
    pub latency_ns: u64,
    /// The queue of all pairs of machines, and of all lanes of their tiers with this queue; each
    /// ordered pair has its own if `None`.
    pub shares: Option<String>,
}

/// A queue of several machines: when it is free.
#[derive(Clone, Debug, Default)]
pub struct SharedQueue(Arc<AtomicU64>);

impl SharedQueue {
    /// Time from which on the queue is idle.
    #[must_use]
    pub fn free_at(&self) -> Nanos {
        self.0.load(Ordering::Relaxed)
    }

    /// A transmission has entered that ends at `end`, after all others.
    pub fn take_until(&self, end: Nanos) {
        self.0.store(end, Ordering::Relaxed);
    }
}

/// The network and what it has carried.
#[derive(Debug)]
pub struct Network {
    spec: PeerSpec,
    lanes: Lanes,
    pairs: BTreeMap<(MachineId, MachineId), LaneId>,
    queue: SharedQueue,
}

impl Network {
    /// A network that has carried nothing; `queue` is that of all pairs of machines, if they share one.
    #[must_use]
    pub fn new(spec: PeerSpec, queue: SharedQueue) -> Self {
        let (lanes, pairs) = (Lanes::default(), BTreeMap::new());
        Self { spec, lanes, pairs, queue }
    }

    /// How long an answer without bytes takes.
    #[must_use]
    pub fn latency(&self) -> Nanos {
        self.spec.latency_ns
    }

    /// Bytes and transmissions that it has carried.
    #[must_use]
    pub fn carried(&self) -> LaneUse {
        let all = 0..self.lanes.len();
        let busy = all.clone().map(|lane| self.lanes.predicted(lane)).sum();
        let waited = all.clone().map(|lane| self.lanes.waited(lane)).sum();
        let bytes = all.map(|lane| self.lanes.bytes(lane)).sum();
        LaneUse { bytes, busy, waited }
    }

    /// When bytes would be there, layer by layer, if they entered now.
    pub fn preview(
        &mut self,
        way: (MachineId, MachineId),
        bytes: u64,
        now: Nanos,
        layers: u16,
    ) -> Transmission {
        let lane = self.lane(way);
        self.lanes.preview(lane, bytes, now, layers)
    }

    /// Bytes enter. Returns when they begin to move and when they are there.
    pub fn transmit(
        &mut self,
        way: (MachineId, MachineId),
        bytes: u64,
        now: Nanos,
        layers: u16,
    ) -> (Nanos, Nanos) {
        let lane = self.lane(way);
        let start = now.max(self.lanes.free_at(lane));
        let end = self.lanes.transmit(lane, bytes, now, layers).end;
        self.queue.take_until(end);
        (start, end)
    }

    /// The lane from one machine to another, after all that is in its queue.
    fn lane(&mut self, way: (MachineId, MachineId)) -> LaneId {
        let (spec, lanes) = (&self.spec, &mut self.lanes);
        let lane = *self.pairs.entry(way).or_insert_with(|| {
            let own = || format!("{LANE} {} {}", way.0, way.1);
            lanes.add(LaneSpec {
                name: LANE.into(),
                bytes_per_s: spec.bytes_per_s,
                latency_ns: spec.latency_ns,
                shares: Some(spec.shares.clone().unwrap_or_else(own)),
            })
        });
        if spec.shares.is_some() {
            lanes.hold(lane, self.queue.free_at());
        }
        lane
    }
}
