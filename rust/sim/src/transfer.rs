//! The simulated executor of one machine: it carries moves by taking the time they need.
//!
//! A transmission enters its lane when the move that it waits for has ended; of those that can enter
//! at one time the most urgent goes first: what a lease waits for, then other loads, then stores.
//! Invariant: every move handed to it ends once, with its transmission. Cost: O(1) per move, and a
//! sort of what enters together.

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

/// How moves take their time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// As the executor carries them.
    #[default]
    Executor,
    /// Each ends when the manager predicted, as `kvtrie replay` has it.
    Predicted,
}

/// Settings of a run's transfers.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// How moves take their time.
    pub mode: Mode,
    /// The most moves of one transmission.
    pub moves_per_job: usize,
    /// Whether the loads of a lease go together, however many they are: its engine carries them
    /// out itself, layer by layer.
    pub layerwise: bool,
}

/// A move that has entered its lane.
#[derive(Clone, Copy, Debug)]
pub struct Entered {
    /// Which move.
    pub id: MoveId,
    /// Its layers.
    pub layers: Layers,
    /// When each of its layers is there.
    pub times: Transmission,
}

/// Moves under way on one machine.
#[derive(Debug)]
pub struct Executor {
    transfer: Transfer,
    lanes: Lanes,
    /// By lane: its queue, if lanes of other machines or the network enter it too.
    shared: Vec<Option<SharedQueue>>,
    /// Transmissions, if they are kept.
    spans: Option<Vec<Span>>,
    /// Per tier, the lanes up from it and down to it.
    read: Vec<LaneId>,
    store: Vec<LaneId>,
    /// Per tier, whether it is memory.
    memory: Vec<bool>,
    layer_bytes: u64,
    /// Bytes of a slot of each group of layers, if there are several.
    slot_bytes: Vec<u64>,
    block_tokens: u32,
    /// Jobs that wait for a move, by their number.
    waiting: FxHashMap<u64, Job>,
    /// Which waiting job carries a move.
    carried: FxHashMap<MoveId, u64>,
    /// By move: the jobs that wait for it, in order.
    behind: FxHashMap<MoveId, Vec<u64>>,
    /// Moves in a lane.
    under_way: FxHashMap<MoveId, Entered>,
    /// Transmissions by number.
    running: FxHashMap<u64, Vec<MoveId>>,
    /// Predicted ends.
    predicted: BTreeMap<Nanos, Vec<MoveId>>,
    next_job: u64,
    /// Prefetched copies that wait for their first use.
    prefetched: Prefetched,
    /// Moves that entered a lane since the last `take_entered`, and the transmissions that end,
    /// with their number.
    entered: Vec<Entered>,
    ends: Vec<(Nanos, u64)>,
}

impl Executor {
    /// An executor without a move, for managers of these settings.
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
            behind: FxHashMap::default(),
            under_way: FxHashMap::default(),
            running: FxHashMap::default(),
            predicted: BTreeMap::new(),
            next_job: 0,
            prefetched: Prefetched::default(),
            entered: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// The lanes and what they have carried.
    #[must_use]
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Lanes whose queue has a name enter a queue of all machines. Returns whether there are any.
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

    /// A read of `bytes` bytes from a tier by another machine: it queues like any other.
    pub fn read_for_peer(&mut self, tier: usize, bytes: u64, now: Nanos, layers: u16) -> Nanos {
        self.transmit(self.read[tier], bytes, now, layers).end
    }

    /// Keeps each transmission from now on.
    pub(crate) fn keep_spans(&mut self) {
        self.spans = Some(Vec::new());
    }

    /// The transmissions that were kept, each with this machine's number.
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

    /// Takes over moves; `freed` are jobs whose wait has just ended.
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
            self.carried.extend(job.moves.iter().map(|order| (order.id, number)));
            let (after, urgency) = (job.after, job.urgency);
            self.waiting.insert(number, job);
            if waits {
                self.behind.entry(after).or_default().push(number);
                self.hurry(after, urgency);
            } else {
                free.push(number);
            }
        }
        free.sort_by_key(|number| self.waiting[number].urgency);
        for number in free {
            self.enter(number, now);
        }
    }

    /// The moves of a transmission that ends now, and the jobs that they set free.
    pub fn end(&mut self, number: u64, now: Nanos) -> (Vec<MoveId>, Vec<u64>) {
        let moves = match self.transfer.mode {
            Mode::Executor => self.running.remove(&number).unwrap_or_default(),
            Mode::Predicted => self.predicted.remove(&now).unwrap_or_default(),
        };
        let mut freed = Vec::new();
        for id in &moves {
            self.prefetched.arrived(*id, now);
            self.under_way.remove(id);
            freed.extend(self.behind.remove(id).unwrap_or_default());
        }
        (moves, freed)
    }

    /// Byte-seconds that prefetched copies have waited on a tier for their first use.
    pub(crate) fn prefetched(&self, tier: TierId, now: Nanos) -> u64 {
        self.prefetched.byte_seconds(tier, now)
    }

    /// Whether no move is under way or waits.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.under_way.is_empty() && self.waiting.is_empty()
    }

    /// Moves that have not ended: at least this number of ends will come, and one if there are any.
    #[must_use]
    pub fn unfinished(&self) -> u64 {
        (self.under_way.len() + self.waiting.len()) as u64
    }

    /// When the layers of a move are there, if it has entered its lane and not ended.
    #[must_use]
    pub fn times(&self, id: MoveId) -> Option<Entered> {
        self.under_way.get(&id).copied()
    }

    /// Moves that have entered a lane since the last call.
    pub fn take_entered(&mut self) -> Vec<Entered> {
        std::mem::take(&mut self.entered)
    }

    /// The ends, with their numbers, of what has entered since the last call.
    pub fn take_ends(&mut self) -> Vec<(Nanos, u64)> {
        std::mem::take(&mut self.ends)
    }

    fn alive(&self, id: MoveId) -> bool {
        self.under_way.contains_key(&id) || self.carried.contains_key(&id)
    }

    /// Turns moves into jobs: those that are free to run between two memories by their way, then
    /// each of the others.
    fn group(&self, handed: &[Handed]) -> Vec<Job> {
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
                jobs[at].moves.push(*order);
            } else {
                open.insert(order.way(), jobs.len());
                jobs.push(Job::of(*order));
            }
        }
        // Single layers of one block that go to a disk are written at once.
        let mut objects: FxHashMap<_, usize> = FxHashMap::default();
        for order in others {
            let store = order.kind == MoveKind::Store && !self.memory[order.dst];
            let object = (order.src, order.dst, order.group, order.dst_slot, order.after);
            let known = objects.get(&object).copied().filter(|_| store);
            if let Some(at) = known.filter(|&at: &usize| jobs[at].adjoins(order.layers)) {
                jobs[at].moves.push(*order);
                continue;
            }
            objects.insert(object, jobs.len());
            jobs.push(Job::of(*order));
        }
        jobs
    }

    /// Priority inheritance: a job and the jobs that it waits for get the urgency of the move that
    /// waits.
    fn hurry(&mut self, mut id: MoveId, urgency: Urgency) {
        while let Some(job) = self.carried.get(&id).and_then(|number| self.waiting.get_mut(number))
        {
            if job.urgency <= urgency {
                break;
            }
            job.urgency = urgency;
            id = job.after;
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

    /// A job enters its lane.
    fn enter(&mut self, number: u64, now: Nanos) {
        let Some(job) = self.waiting.remove(&number) else { return };
        let first = job.moves[0];
        let lane = match first.kind {
            MoveKind::Load | MoveKind::Copy => self.read[first.src],
            MoveKind::Store => self.store[first.dst],
        };
        let bytes = job.moves.iter().map(|order| self.bytes(order)).sum();
        let times = self.transmit(lane, bytes, now, first.layers.len());
        for order in &job.moves {
            self.carried.remove(&order.id);
            let entered = Entered { id: order.id, layers: order.layers, times };
            self.under_way.insert(order.id, entered);
            self.entered.push(entered);
        }
        self.running.insert(number, job.moves.iter().map(|order| order.id).collect());
        self.ends.push((times.end, number));
    }

    /// A move will end when the manager predicted.
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
