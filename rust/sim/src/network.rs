//! The network between machines: a lane for each ordered pair of them, or one queue for all.
//!
//! Invariant: transmissions enter a lane in order. Cost: O(log machines) per
//! transmission.

use std::collections::BTreeMap;

use kvtrie_core::lane::{LaneId, LaneSpec, Lanes, Transmission};
use kvtrie_core::time::Nanos;

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
    /// The queue that all pairs of machines stand in; each ordered pair has its own if `None`.
    pub shares: Option<String>,
}

/// The network and what it has carried.
#[derive(Debug)]
pub struct Network {
    spec: PeerSpec,
    lanes: Lanes,
    pairs: BTreeMap<(MachineId, MachineId), LaneId>,
}

impl Network {
    /// A network that has carried nothing.
    #[must_use]
    pub fn new(spec: PeerSpec) -> Self {
        Self { spec, lanes: Lanes::default(), pairs: BTreeMap::new() }
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
        (start, self.lanes.transmit(lane, bytes, now, layers).end)
    }

    /// The lane from one machine to another.
    fn lane(&mut self, way: (MachineId, MachineId)) -> LaneId {
        let (spec, lanes) = (&self.spec, &mut self.lanes);
        *self.pairs.entry(way).or_insert_with(|| {
            let own = || format!("{LANE} {} {}", way.0, way.1);
            lanes.add(LaneSpec {
                name: LANE.into(),
                bytes_per_s: spec.bytes_per_s,
                latency_ns: spec.latency_ns,
                shares: Some(spec.shares.clone().unwrap_or_else(own)),
            })
        })
    }
}
