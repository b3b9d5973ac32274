//! Handoffs of requests from prefill machines to decode machines.
//!
//! The machine with the fewest requests decodes, and ties go to the lowest number. The missing part
//! of the prompt is a single transmission, starting once there is room. Invariant: each request is
//! pulled once. Cost: O(machines) per request.

use kvtrie_core::Result;
use rustc_hash::FxHashMap;

use super::Simulation;
use crate::engine::Pull;
use crate::event::MachineId;
use crate::timeline::Track;

/// Requests between two machines.
#[derive(Debug)]
pub(super) struct Handoffs {
    /// Number of prefill machines, with the lowest numbers.
    pub(super) prefill: usize,
    /// Prefill machine of each request.
    from: FxHashMap<u64, MachineId>,
    /// Pulled requests by transmission number.
    pulls: FxHashMap<u64, u64>,
}

impl Handoffs {
    pub(super) fn new(prefill: usize) -> Self {
        Self { prefill, from: FxHashMap::default(), pulls: FxHashMap::default() }
    }
}

impl Simulation {
    /// Number of machines the router may choose.
    pub(super) fn fronts(&self) -> usize {
        self.handoffs.as_ref().map_or(self.servers.len(), |handoffs| handoffs.prefill)
    }

    /// Hand over the prefilled requests of a machine, and start its pulls.
    pub(super) fn hand_over(&mut self, machine_id: MachineId) -> Result<()> {
        let now = self.now;
        let (handed_over, pulls) = match (&self.handoffs, self.servers[machine_id].engine.relay()) {
            (Some(_), Some(engine)) => (engine.take_handoffs(), engine.take_pulls()),
            _ => return Ok(()),
        };
        for handoff in handed_over {
            let Some(handoffs) = &mut self.handoffs else { continue };
            handoffs.from.insert(handoff.request.id, machine_id);
            let all = handoffs.prefill..self.servers.len();
            let Some(to) = all.min_by_key(|&machine| self.servers[machine].engine.load()) else {
                continue;
            };
            if let Some(engine) = self.servers[to].engine.relay() {
                engine.take_over(handoff, now);
            }
            self.follow(to)?;
        }
        for pull in pulls {
            self.pull_begins(machine_id, pull);
        }
        Ok(())
    }

    fn pull_begins(&mut self, machine_id: MachineId, Pull { request, tokens }: Pull) {
        let settings = self.servers[machine_id].machine.calls.settings();
        let block = u64::from(settings.block_tokens) * u64::from(settings.token_weight);
        let whole = u128::from(settings.layer_bytes) * u128::from(settings.layers);
        let bytes = (whole * u128::from(tokens)).div_ceil(u128::from(block));
        let (bytes, layers) = (u64::try_from(bytes).unwrap_or(u64::MAX), settings.layers);
        let (Some(handoffs), Some(network)) = (&mut self.handoffs, &mut self.network) else {
            return;
        };
        let way = (handoffs.from[&request], machine_id);
        // An empty pull has no transmission.
        let end = if bytes == 0 {
            self.now
        } else {
            let times = network.transmit(way, bytes, self.now, layers);
            self.timeline.span(machine_id, Track::Peers, times, bytes);
            times.1
        };
        handoffs.pulls.insert(self.next_fetch, request);
        self.announce_fetch(machine_id, end);
    }

    /// End a pull. Returns false if the transmission is not a pull.
    pub(super) fn pull_ends(&mut self, machine_id: MachineId, number: u64) -> Result<bool> {
        let Some(handoffs) = &mut self.handoffs else { return Ok(false) };
        let Some(request) = handoffs.pulls.remove(&number) else { return Ok(false) };
        let from = handoffs.from.remove(&request);
        if let Some(engine) = self.servers[machine_id].engine.relay() {
            engine.pulled(request, self.now);
        }
        if let Some(from) = from {
            let source = &mut self.servers[from];
            if let Some(engine) = source.engine.relay() {
                engine.release_handed_over(request, &mut source.machine, self.now)?;
            }
            self.follow(from)?;
        }
        Ok(true)
    }
}
