//! Decisions of a router, and what each machine still has to do.
//!
//! Invariant: a backlog counts a request from when it was sent until it has ended. Cost: O(1) per
//! request; of a decision that is reported also O(machines) exact lookups.

use kvtrie_core::Nanos;
use rustc_hash::FxHashMap;

use crate::event::MachineId;

/// One machine that a request could be sent to, with the expected cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Which machine.
    pub machine: MachineId,
    /// Tokens of the prompt that it has.
    pub hit: u64,
    /// Tokens of the prompts there that have not ended.
    pub queued: u64,
    /// Estimated time to the first token: computing the missing tokens, after those of the requests
    /// there that have not ended.
    pub cost: Nanos,
}

/// One decision of a router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The request's place in the trace.
    pub id: u64,
    /// When it came in.
    pub arrival: Nanos,
    /// The machine it was sent to.
    pub chosen: Choice,
    /// The best of the others, by cost, then number.
    pub others: Vec<Choice>,
    /// The cost of the chosen one less that of the best of all.
    pub regret: Nanos,
}

impl Decision {
    /// The decision for one of some choices, with the best `count` others.
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
    /// Tokens of its prompt.
    pub tokens: u64,
    /// Estimated time to compute what was not there.
    pub compute: Nanos,
}

/// The work of all requests that were sent and have not ended.
#[derive(Debug, Default)]
pub struct Backlog {
    machines: Vec<Work>,
    sent: FxHashMap<u64, (MachineId, Work)>,
}

impl Backlog {
    /// Machines without work.
    #[must_use]
    pub fn new(machines: usize) -> Self {
        Self { machines: vec![Work::default(); machines], sent: FxHashMap::default() }
    }

    /// The work of a machine.
    #[must_use]
    pub fn of(&self, machine: MachineId) -> Work {
        self.machines[machine]
    }

    /// A request was sent to a machine.
    pub fn sent(&mut self, id: u64, machine: MachineId, work: Work) {
        let all = &mut self.machines[machine];
        all.tokens = all.tokens.saturating_add(work.tokens);
        all.compute = all.compute.saturating_add(work.compute);
        self.sent.insert(id, (machine, work));
    }

    /// A request has ended.
    pub fn ended(&mut self, id: u64) {
        if let Some((machine, work)) = self.sent.remove(&id) {
            let all = &mut self.machines[machine];
            all.tokens = all.tokens.saturating_sub(work.tokens);
            all.compute = all.compute.saturating_sub(work.compute);
        }
    }
}
