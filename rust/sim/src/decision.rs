//! Routing decisions and the unfinished work of each machine.
//!
//! Invariant: a backlog counts a request from dispatch to end. Cost: O(1) per request, plus
//! O(machines) exact lookups per reported decision.

use kvtrie_core::Nanos;
use rustc_hash::FxHashMap;

use crate::event::MachineId;

/// Candidate machine of a request, with its expected cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Machine number.
    pub machine: MachineId,
    /// Prompt tokens cached there.
    pub hit: u64,
    /// Prompt tokens of its unfinished requests.
    pub queued: u64,
    /// Estimated time to the first token: computing the missing tokens, after the missing tokens of
    /// its unfinished requests.
    pub cost: Nanos,
}

/// Routing decision of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Position of the request in the trace.
    pub id: u64,
    /// Arrival time.
    pub arrival: Nanos,
    /// Chosen machine.
    pub chosen: Choice,
    /// Best alternatives, by cost, then by machine number.
    pub others: Vec<Choice>,
    /// Cost of the chosen machine less the lowest cost of all machines.
    pub regret: Nanos,
}

impl Decision {
    /// Record the choice of `machine`, with the best `count` alternatives.
    #[must_use]
    pub fn new(
        (id, arrival): (u64, Nanos),
        machine: MachineId,
        mut choices: Vec<Choice>,
        count: usize,
    ) -> Self {
        let chosen = choices.remove(machine);
        choices.sort_by_key(|choice| (choice.cost, choice.machine));
        let best = choices.first().map_or(chosen.cost, |choice| choice.cost);
        let regret = chosen.cost.saturating_sub(best);
        choices.truncate(count);
        Self { id, arrival, chosen, others: choices, regret }
    }
}

/// Work of a machine for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Estimated time to compute the missing tokens.
    pub compute: Nanos,
}

/// Work of all dispatched requests until they end.
#[derive(Debug, Default)]
pub struct Backlog {
    machines: Vec<Work>,
    sent: FxHashMap<u64, (MachineId, Work)>,
}

impl Backlog {
    /// Create an empty backlog.
    #[must_use]
    pub fn new(machines: usize) -> Self {
        Self { machines: vec![Work::default(); machines], sent: FxHashMap::default() }
    }

    /// Work of a machine.
    #[must_use]
    pub fn of(&self, machine: MachineId) -> Work {
        self.machines[machine]
    }

    /// Add a request sent to a machine.
    pub fn sent(&mut self, id: u64, machine: MachineId, work: Work) {
        let all = &mut self.machines[machine];
        all.tokens = all.tokens.saturating_add(work.tokens);
        all.compute = all.compute.saturating_add(work.compute);
        self.sent.insert(id, (machine, work));
    }

    /// Remove a request at its end.
    pub fn ended(&mut self, id: u64) {
        if let Some((machine, work)) = self.sent.remove(&id) {
            let all = &mut self.machines[machine];
            all.tokens = all.tokens.saturating_sub(work.tokens);
            all.compute = all.compute.saturating_sub(work.compute);
        }
    }
}
