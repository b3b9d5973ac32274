//! Simulated executor of a machine: moves take time instead of copying.
//!
//! A transmission enters its lane after the move it waits for. Transmissions ready at the same time
//! enter by urgency: moves of leases, then prefetches, then stores. Invariant: every move ends
//! exactly once, with its transmission. Cost: O(1) per move, plus sorting the jobs ready together.

mod job;
mod prefetched;

use std::collections::BTreeMap;

use kvtrie_core::{
    Kind, LaneId, Lanes, Layers, MoveId, MoveKind, NO_MOVE, Nanos, Settings, TierId, Transmission,
};
use rustc_hash::FxHashMap;

use crate::call::Handed;
use crate::event::MachineId;
use crate::network::SharedQueue;
use crate::timeline::{Span, Track};
use job::{Job, Urgency};
use prefetched::Prefetched;

/// Timing of moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Simulated lanes of the executor.
    #[default]
    Executor,
    /// Predictions of the manager, as in `kvtrie replay`.
    Predicted,
}

/// Transfer settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Timing of moves.
    pub mode: Mode,
    /// Maximum number of moves per transmission.
    pub moves_per_job: usize,
    /// Whether all loads of a lease are a single transmission of any size, because the engine loads
    /// layer by layer.
    pub layerwise: bool,
}

/// A move in its lane.
#[derive(Clone, Copy, Debug)]
pub struct Entered {
    /// Move id.
    pub id: MoveId,
    /// Its layers.
    pub layers: Layers,
    /// Arrival times of its layers.
    pub times: Transmission,
}

/// Simulated executor of a machine.
#[derive(Debug)]
pub struct Executor {
    transfer: Transfer,
    lanes: Lanes,
    /// Shared queue of each lane, if any.
    shared: Vec<Option<SharedQueue>>,
    /// Recorded transmissions, if enabled.
    spans: Option<Vec<Span>>,
    /// Read and store lane of each tier.
    read: Vec<LaneId>,
    store: Vec<LaneId>,
    /// Whether each tier is memory.
    memory: Vec<bool>,
    layer_bytes: u64,
    /// Slot bytes by layer group, with several groups.
    slot_bytes: Vec<u64>,
    block_tokens: u32,
    /// Waiting jobs by number.
    waiting: FxHashMap<u64, Job>,
    /// Waiting job of each move.
    carried: FxHashMap<MoveId, u64>,
    /// Jobs waiting for each move, in order.
    dependents: FxHashMap<MoveId, Vec<u64>>,
    /// Moves in a lane.
    under_way: FxHashMap<MoveId, Entered>,
    /// Moves of each running transmission, by number.
    running: FxHashMap<u64, Vec<(MoveId, Layers)>>,
    /// Moves by predicted end.
    predicted: BTreeMap<Nanos, Vec<MoveId>>,
    next_job: u64,
    /// Prefetched copies before their first use.
    prefetched: Prefetched,
    /// Moves entered since the last `take_entered`, and pairs of end time and number of new
    /// transmissions.
    entered: Vec<Entered>,
    ends: Vec<(Nanos, u64)>,
}

impl Executor {
    /// Create an idle executor for a manager with these settings.
    #[must_use]
    pub fn new(settings: &Settings, transfer: Transfer) -> Self {
        let mut lanes = Lanes::default();
        let (mut read, mut store) = (Vec::new(), Vec::new());
        for tier in &settings.tiers {
            read.push(lanes.add(tier.read.clone()));
            store.push(lanes.add(tier.store.clone()));
        }
        let memory = |kind| matches!(kind, Kind::Gpu | Kind::Host);
        Self {
            transfer,
            shared: vec![None; lanes.len()],
            lanes,
            spans: None,
            read,
            store,
            memory: settings.tiers.iter().map(|tier| memory(tier.kind)).collect(),
            layer_bytes: settings.layer_bytes,
            slot_bytes: settings
                .groups
                .iter()
                .flat_map(|all| &all.groups)
                .map(|one| one.slot_bytes)
                .collect(),
            block_tokens: settings.block_tokens,
            waiting: FxHashMap::default(),
            carried: FxHashMap::default(),
            dependents: FxHashMap::default(),
            under_way: FxHashMap::default(),
            running: FxHashMap::default(),
            predicted: BTreeMap::new(),
            next_job: 0,
            prefetched: Prefetched::default(),
            entered: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Lanes and their traffic.
    #[must_use]
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Attach all lanes with this queue name to a shared queue. Returns whether there are any.
    pub(crate) fn share(&mut self, name: &str, queue: &SharedQueue) -> bool {
        let mut any = false;
        for (lane, shared) in self.shared.iter_mut().enumerate() {
            let spec = self.lanes.spec(lane);
            if spec.shares.as_ref().unwrap_or(&spec.name) == name {
                *shared = Some(queue.clone());
                any = true;
            }
        }
        any
    }

    /// Queue a peer's read of `bytes` bytes from a tier. Returns its end.
    pub fn read_for_peer(&mut self, tier: usize, bytes: u64, now: Nanos, layers: u16) -> Nanos {
        self.transmit(self.read[tier], bytes, now, layers).end
    }

    /// Record all transmissions from now on.
    pub(crate) fn keep_spans(&mut self) {
        self.spans = Some(Vec::new());
    }

    /// Recorded transmissions, with this machine's number.
    pub(crate) fn spans(&self, machine: MachineId) -> impl Iterator<Item = Span> {
        self.spans.iter().flatten().map(move |span| Span { machine, ..*span })
    }

    fn transmit(&mut self, lane: LaneId, bytes: u64, now: Nanos, layers: u16) -> Transmission {
        if let Some(queue) = &self.shared[lane] {
            self.lanes.hold(lane, queue.free_at());
        }
        let start = now.max(self.lanes.free_at(lane));
        let times = self.lanes.transmit(lane, bytes, now, layers);
        if let Some(queue) = &self.shared[lane] {
            queue.take_until(times.end);
        }
        if let Some(spans) = &mut self.spans {
            spans.push(Span { machine: 0, track: Track::Lane(lane), start, end: times.end, bytes });
        }
        times
    }

    /// Take issued moves, and start them together with the `freed` jobs.
    pub fn take(&mut self, handed: &[Handed], freed: Vec<u64>, now: Nanos) {
        for order in handed {
            let bytes = self.bytes(order);
            self.prefetched.handed(order, bytes, now);
        }
        if self.transfer.mode == Mode::Predicted {
            for order in handed {
                self.predict(order, now);
            }
            return;
        }
        let mut free = freed;
        for job in self.group(handed) {
            let number = self.next_job;
            self.next_job += 1;
            let waits = job.after != NO_MOVE && self.alive(job.after);
            self.carried.extend(job.moves.iter().map(|&(id, _)| (id, number)));
            let (after, urgency) = (job.after, job.urgency);
            self.waiting.insert(number, job);
            if waits {
                self.dependents.entry(after).or_default().push(number);
                self.raise_urgency(after, urgency);
            } else {
                free.push(number);
            }
        }
        free.sort_by_key(|number| self.waiting[number].urgency);
        for number in free {
            self.enter(number, now);
        }
    }

    /// End a transmission. Returns its moves and the jobs waiting for them.
    pub fn end(&mut self, number: u64, now: Nanos) -> (Vec<MoveId>, Vec<u64>) {
        let moves: Vec<MoveId> = match self.transfer.mode {
            Mode::Executor => {
                let moves = self.running.remove(&number).unwrap_or_default();
                moves.into_iter().map(|(id, _)| id).collect()
            }
            Mode::Predicted => self.predicted.remove(&now).unwrap_or_default(),
        };
        let mut freed = Vec::new();
        for id in &moves {
            self.prefetched.arrived(*id, now);
            self.under_way.remove(id);
            freed.extend(self.dependents.remove(id).unwrap_or_default());
        }
        (moves, freed)
    }

    /// Byte-seconds of prefetched copies on a tier before their first use.
    pub(crate) fn prefetched(&self, tier: TierId, now: Nanos) -> u64 {
        self.prefetched.byte_seconds(tier, now)
    }

    /// Whether no move is pending.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.under_way.is_empty() && self.waiting.is_empty()
    }

    /// Lower bound of the number of future move ends. At least 1 while moves are pending.
    #[must_use]
    pub fn unfinished(&self) -> u64 {
        (self.under_way.len() + self.waiting.len()) as u64
    }

    /// Layer arrival times of a move in its lane.
    #[must_use]
    pub fn times(&self, id: MoveId) -> Option<Entered> {
        self.under_way.get(&id).copied()
    }

    /// Take the moves entered since the last call.
    pub fn take_entered(&mut self) -> Vec<Entered> {
        std::mem::take(&mut self.entered)
    }

    /// Take the ends and numbers of transmissions started since the last call.
    pub fn take_ends(&mut self) -> Vec<(Nanos, u64)> {
        std::mem::take(&mut self.ends)
    }

    fn alive(&self, id: MoveId) -> bool {
        self.under_way.contains_key(&id) || self.carried.contains_key(&id)
    }

    /// Group moves into jobs: moves ready to run between two memory tiers by way, then a job per
    /// remaining move.
    fn group(&self, handed: &[Handed]) -> Vec<Job> {
        let job = |order| Job::of(order, self.lane(order), self.bytes(order));
        let mut jobs: Vec<Job> = Vec::new();
        let mut others = Vec::new();
        let mut open: FxHashMap<_, usize> = FxHashMap::default();
        for order in handed {
            if order.after != NO_MOVE || !self.memory[order.src] || !self.memory[order.dst] {
                others.push(order);
                continue;
            }
            let claimed =
                self.transfer.layerwise && order.kind == MoveKind::Load && order.lease != 0;
            let at = open.get(&order.way()).copied().filter(|&at| {
                let job: &Job = &jobs[at];
                claimed || job.moves.len() < self.transfer.moves_per_job
            });
            if let Some(at) = at {
                jobs[at].add(order, self.bytes(order));
            } else {
                open.insert(order.way(), jobs.len());
                jobs.push(job(order));
            }
        }
        // Single-layer stores of a block to a disk are written together.
        let mut objects: FxHashMap<_, usize> = FxHashMap::default();
        for order in others {
            let store = order.kind == MoveKind::Store && !self.memory[order.dst];
            let object = (order.src, order.dst, order.group, order.dst_slot, order.after);
            let known = objects.get(&object).copied().filter(|_| store);
            if let Some(at) = known.filter(|&at: &usize| jobs[at].adjoins(order.layers)) {
                jobs[at].add(order, self.bytes(order));
                continue;
            }
            objects.insert(object, jobs.len());
            jobs.push(job(order));
        }
        jobs
    }

    /// Priority inheritance: a job and its dependencies get the urgency of the waiting move.
    fn raise_urgency(&mut self, mut id: MoveId, urgency: Urgency) {
        while let Some(job) = self.carried.get(&id).and_then(|number| self.waiting.get_mut(number))
        {
            if job.urgency <= urgency {
                break;
            }
            job.urgency = urgency;
            id = job.after;
        }
    }

    /// Lane of a move.
    fn lane(&self, order: &Handed) -> LaneId {
        match order.kind {
            MoveKind::Load | MoveKind::Copy => self.read[order.src],
            MoveKind::Store => self.store[order.dst],
        }
    }

    /// Bytes of a move.
    fn bytes(&self, order: &Handed) -> u64 {
        let whole = match order.group {
            0 => self.layer_bytes * u64::from(order.layers.len()),
            group => self.slot_bytes[usize::from(group)],
        };
        whole * u64::from(order.tokens) / u64::from(self.block_tokens)
    }

    /// Enter a job into its lane.
    fn enter(&mut self, number: u64, now: Nanos) {
        let Some(job) = self.waiting.remove(&number) else { return };
        let (_, first) = job.moves[0];
        let times = self.transmit(job.lane, job.bytes, now, first.len());
        self.entered.reserve(job.moves.len());
        for &(id, layers) in &job.moves {
            self.carried.remove(&id);
            let entered = Entered { id, layers, times };
            self.under_way.insert(id, entered);
            self.entered.push(entered);
        }
        self.running.insert(number, job.moves);
        self.ends.push((times.end, number));
    }

    /// Schedule the end of a move at its predicted time.
    fn predict(&mut self, order: &Handed, now: Nanos) {
        let (first, end) = (order.first.max(now), order.ready.max(now));
        let steps = u64::from(order.layers.len()).saturating_sub(1).max(1);
        let times = Transmission { end, first, per_layer: (end - first) / steps };
        let entered = Entered { id: order.id, layers: order.layers, times };
        self.under_way.insert(order.id, entered);
        self.entered.push(entered);
        let together = self.predicted.entry(end).or_default();
        if together.is_empty() {
            self.ends.push((end, 0));
        }
        together.push(order.id);
    }
}
