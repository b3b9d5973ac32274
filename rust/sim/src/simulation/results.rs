//! Results of a run: spans, samples and lane traffic.
//!
//! Cost: O(recorded data).

use std::collections::BTreeMap;

use kvtrie_core::{Nanos, TierId};

use super::Simulation;
use crate::call::Call;
use crate::event::MachineId;
use crate::machine::Machine;
use crate::network::LANE;
use crate::record::LaneUse;
use crate::timeline::{Sample, Span};
use crate::transfer::Mode;

impl Simulation {
    /// Recorded spans, ordered by machine, track and start.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = self.timeline.spans.clone().unwrap_or_default();
        for machine in self.machines() {
            spans.extend(machine.executor.spans(machine.number));
        }
        spans.sort_by_key(|span| (span.machine, span.track, span.start, span.end));
        spans
    }

    /// Recorded samples, in time order.
    #[must_use]
    pub fn samples(&self) -> &[Sample] {
        &self.timeline.samples
    }

    /// Time of the last event.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Number of blocks evicted from the shared store, or `None` without a shared store.
    #[must_use]
    pub fn remote_evicted(&self) -> Option<u64> {
        self.remote.as_ref().map(|store| store.get().evicted())
    }

    /// Byte-seconds of prefetched blocks between arrival and first use on a tier, over all
    /// machines.
    #[must_use]
    pub fn prefetched(&self, tier: TierId) -> u64 {
        self.machines().map(|machine| machine.executor.prefetched(tier, self.now)).sum()
    }

    /// The machines, for reading.
    pub fn machines(&self) -> impl Iterator<Item = &Machine> {
        self.servers.iter().map(|server| &server.machine)
    }

    /// Logged calls to a machine's manager. Empty without a log.
    #[must_use]
    pub fn log(&self, machine: MachineId) -> &[Call] {
        self.servers[machine].machine.calls.log()
    }

    /// Traffic of all machines by lane name.
    #[must_use]
    pub fn lanes(&self) -> BTreeMap<String, LaneUse> {
        let mut all: BTreeMap<String, LaneUse> = BTreeMap::new();
        for server in &self.servers {
            let manager = server.machine.calls.manager();
            let lanes = match self.transfer.mode {
                Mode::Executor => server.machine.executor.lanes(),
                Mode::Predicted => manager.lanes(),
            };
            for lane in 0..lanes.len() {
                let of = all.entry(lanes.spec(lane).name.clone()).or_default();
                of.bytes = of.bytes.saturating_add(lanes.bytes(lane));
                of.busy = of.busy.saturating_add(lanes.predicted(lane));
                of.waited = of.waited.saturating_add(lanes.waited(lane));
            }
        }
        if let Some(network) = &self.network {
            all.insert(LANE.into(), network.carried());
        }
        all
    }
}
