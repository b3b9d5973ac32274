//! Network between machines: a lane per ordered pair of machines, or a queue shared by all pairs
//! and by the tier lanes with the same queue name.
//!
//! Invariant: transmissions enter a lane in order. Cost: O(log machines) per transmission.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtrie_core::{LaneId, LaneSpec, Lanes, Nanos, Transmission};

use crate::event::MachineId;
use crate::record::LaneUse;

/// Name of the lanes between machines.
pub const LANE: &str = "peers";

/// Lanes between machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSpec {
    /// Bandwidth of each lane.
    pub bytes_per_s: u64,
    /// Latency of each transmission.
    pub latency_ns: u64,
    /// Queue shared by all pairs of machines and by all tier lanes with this name. `None` gives
    /// each ordered pair a separate queue.
    pub shares: Option<String>,
}

/// State of a queue of several machines: the end of its last transmission.
#[derive(Clone, Debug, Default)]
pub struct SharedQueue(Arc<AtomicU64>);

impl SharedQueue {
    /// Time from which the queue is idle.
    #[must_use]
    pub fn free_at(&self) -> Nanos {
        self.0.load(Ordering::Relaxed)
    }

    /// Occupy the queue until `end`, after all earlier transmissions.
    pub fn take_until(&self, end: Nanos) {
        self.0.store(end, Ordering::Relaxed);
    }
}

/// The network and its counters.
#[derive(Debug)]
pub struct Network {
    spec: PeerSpec,
    lanes: Lanes,
    pairs: BTreeMap<(MachineId, MachineId), LaneId>,
    queue: SharedQueue,
}

impl Network {
    /// Create an idle network. `queue` is the shared queue, if any.
    #[must_use]
    pub fn new(spec: PeerSpec, queue: SharedQueue) -> Self {
        let (lanes, pairs) = (Lanes::default(), BTreeMap::new());
        Self { spec, lanes, pairs, queue }
    }

    /// Latency of an empty answer.
    #[must_use]
    pub fn latency(&self) -> Nanos {
        self.spec.latency_ns
    }

    /// Total traffic.
    #[must_use]
    pub fn carried(&self) -> LaneUse {
        let all = 0..self.lanes.len();
        let busy = all.clone().map(|lane| self.lanes.predicted(lane)).sum();
        let waited = all.clone().map(|lane| self.lanes.waited(lane)).sum();
        let bytes = all.map(|lane| self.lanes.bytes(lane)).sum();
        LaneUse { bytes, busy, waited }
    }

    /// Predict the arrival of bytes, layer by layer, for a transmission starting now.
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

    /// Transmit bytes. Returns the start and end of the transmission.
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

    /// Lane between two machines, held until the shared queue is idle.
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
