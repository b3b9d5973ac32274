//! The one facade: decides what is cached where, what to keep, what to move, what to recompute.
//!
//! Sans-IO and deterministic: time is an argument, copies are handed out as moves and reported
//! back by `complete`, the only point at which a copy counts. Invariants are those of `audit`;
//! an operation that fails has changed nothing. Cost: see each operation.

mod acquire;
mod audit;
mod branch;
mod commit;
mod complete;
mod draft;
mod evict;
mod explain;
mod index;
mod lease;
mod lookup;
mod moves;
mod own;
mod report;
mod session;
mod settings;
mod snapshot;
mod survey;
mod suspend;
mod write;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::block::{BlockId, Departure, Handle, Layers, LeaseId, MoveId, Structure, TierId, Token};
use crate::error::{Error, Result};
use crate::lane::{LaneId, Lanes};
use crate::policy::{self, Entry, Facts};
use crate::retention::Retention;
use crate::scope::{ScopeId, Scopes};
use crate::tier::{Owner, Residency, Space, State, TierSpec, Write};
use crate::time::{Clock, Nanos};
use crate::trie::Trie;

pub use acquire::{Acquire, LoadMode};
pub use commit::Committed;
pub use complete::{Failed, Outcome};
pub use explain::Explanation;
pub use index::{Mark, Row};
pub use lease::{Action, Lease, Plan, Span};
pub use lookup::{Copy, Match, MatchedBlock};
pub use moves::{Move, MoveKind};
pub use report::{Event, Reason, TierStats};
pub use settings::{DropOrder, Settings};

use moves::Arrival;
use own::{Own, OwnId};
use session::Sessions;

/// What every block carries beside its residencies.
#[derive(Clone, Copy, Debug, Default)]
struct Node {
    scope: ScopeId,
    /// Leases whose path goes through here.
    refs: u32,
    uses: u32,
    access: Nanos,
    /// A store of it failed: next time it is dropped instead of written.
    unwritable: bool,
}

#[derive(Debug)]
struct Tier {
    spec: TierSpec,
    space: Space,
    /// By block id.
    here: Vec<Residency>,
    retention: Retention,
    read: LaneId,
    store: LaneId,
    stats: TierStats,
    /// Slots known to be free or clean since the last look at `free_low`.
    credit: u64,
}

/// The block manager of one machine.
#[derive(Debug)]
pub struct Manager {
    settings: Settings,
    clock: Clock,
    trie: Trie,
    scopes: Scopes,
    nodes: Vec<Node>,
    tiers: Vec<Tier>,
    lanes: Lanes,
    owns: BTreeMap<OwnId, Own>,
    next_own: OwnId,
    leases: BTreeMap<LeaseId, Lease>,
    next_lease: LeaseId,
    moves: BTreeMap<MoveId, Move>,
    next_move: MoveId,
    /// Moves ready to be handed out, in topological order.
    queue: VecDeque<MoveId>,
    /// Moves that wait for more than one other.
    parked: BTreeSet<MoveId>,
    /// Copies under way, by tier and block.
    arriving: BTreeMap<(TierId, BlockId), Arrival>,
    /// Marked copies that no move brings, by ready time.
    marked: BTreeSet<(Nanos, TierId, BlockId)>,
    failed: Vec<Failed>,
    /// How recent moves ended.
    outcomes: BTreeMap<MoveId, bool>,
    sessions: Sessions,
    events: VecDeque<Event>,
    keys: BTreeMap<BlockId, [u8; 32]>,
    poison: Option<String>,
    closed: bool,
}

impl Manager {
    /// A manager without a block.
    ///
    /// # Errors
    /// [`Error::Config`] if the settings contradict each other.
    pub fn new(settings: Settings) -> Result<Self> {
        settings.check()?;
        let mut lanes = Lanes::default();
        let mut tiers = Vec::with_capacity(settings.tiers.len());
        for spec in &settings.tiers {
            let name = spec.policy.as_deref().unwrap_or(&settings.policy);
            tiers.push(Tier {
                space: Space::new(spec.blocks, settings.layers, spec.layer_slots),
                here: Vec::new(),
                retention: Retention::new(policy::by_name(name, settings.reuse)?),
                read: lanes.add(spec.read.clone()),
                store: lanes.add(spec.store.clone()),
                stats: TierStats::default(),
                credit: 0,
                spec: spec.clone(),
            });
        }
        Ok(Self {
            trie: Trie::new(settings.block_tokens as usize),
            settings,
            clock: Clock::default(),
            scopes: Scopes::default(),
            nodes: Vec::new(),
            tiers,
            lanes,
            owns: BTreeMap::new(),
            next_own: 1,
            leases: BTreeMap::new(),
            next_lease: 1,
            moves: BTreeMap::new(),
            next_move: 1,
            queue: VecDeque::new(),
            parked: BTreeSet::new(),
            arriving: BTreeMap::new(),
            marked: BTreeSet::new(),
            failed: Vec::new(),
            outcomes: BTreeMap::new(),
            sessions: Sessions::default(),
            events: VecDeque::new(),
            keys: BTreeMap::new(),
            poison: None,
            closed: false,
        })
    }

    /// The settings it was made with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The latest time seen.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.clock.last()
    }

    /// The lanes and their queues.
    #[must_use]
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Starts a transmission on a lane by hand; the source of predicted times in a simulator.
    ///
    /// # Errors
    /// [`Error::Config`] if no lane has that name or `layers` is 0 or above the model's.
    pub fn transmit(
        &mut self,
        lane: &str,
        tokens: u64,
        now: Nanos,
        layers: u16,
    ) -> Result<crate::lane::Transmission> {
        self.open()?;
        if layers == 0 || layers > self.settings.layers {
            return Err(Error::config(format!(
                "{layers} layers on lane '{lane}', the model has {}",
                self.settings.layers
            )));
        }
        let id = self
            .lanes
            .find(lane)
            .ok_or_else(|| Error::config(format!("there is no lane '{lane}'")))?;
        let now = self.tick(now);
        let bytes = tokens.saturating_mul(self.settings.layer_bytes) * u64::from(layers)
            / u64::from(self.settings.block_tokens);
        Ok(self.lanes.transmit(id, bytes, now, layers))
    }

    /// Forgets all blocks, leases and moves; settings, lanes' queues and counters stay.
    ///
    /// # Errors
    /// [`Error::Config`] while a lease is held or a move is under way.
    pub fn reset(&mut self) -> Result<()> {
        self.open()?;
        if !self.leases.is_empty() || !self.moves.is_empty() {
            return Err(Error::config(format!(
                "reset with {} leases held and {} moves under way",
                self.leases.len(),
                self.moves.len()
            )));
        }
        let fresh = Self::new(self.settings.clone())?;
        let old = std::mem::replace(self, fresh);
        self.clock = old.clock;
        self.lanes = old.lanes;
        self.next_lease = old.next_lease;
        self.next_move = old.next_move;
        for (tier, old) in self.tiers.iter_mut().zip(old.tiers) {
            tier.stats = old.stats;
        }
        Ok(())
    }

    /// Ends the manager: every later call fails with [`Error::Closed`].
    pub fn close(&mut self) {
        self.closed = true;
        self.queue.clear();
    }

    /// The error of every call after `close` or a broken invariant.
    fn open(&self) -> Result<()> {
        if let Some(reason) = &self.poison {
            return Err(Error::invariant(format!("the manager is poisoned: {reason}")));
        }
        if self.closed { Err(Error::closed("the manager is closed")) } else { Ok(()) }
    }

    /// Takes the caller's time and settles what was marked to be ready by then.
    fn tick(&mut self, now: Nanos) -> Nanos {
        let now = self.clock.advance(now);
        while let Some(&(ready, tier, block)) = self.marked.first() {
            if ready > now {
                break;
            }
            self.marked.pop_first();
            self.settle_mark(tier, block);
        }
        now
    }

    fn block_tokens(&self) -> usize {
        self.settings.block_tokens as usize
    }

    fn all_layers(&self) -> Layers {
        Layers::new(0, self.settings.layers)
    }

    fn last(&self) -> TierId {
        self.tiers.len() - 1
    }

    fn structure(&self, block: BlockId) -> Structure {
        self.scopes.get(self.nodes[block as usize].scope).structure
    }

    fn resolve(&self, handle: Handle) -> Result<BlockId> {
        self.trie
            .resolve(handle)
            .ok_or_else(|| Error::config(format!("block {:#x} is not cached", handle.0)))
    }

    fn residency(&self, tier: TierId, block: BlockId) -> Residency {
        self.tiers[tier].here[block as usize]
    }

    fn residency_mut(&mut self, tier: TierId, block: BlockId) -> &mut Residency {
        &mut self.tiers[tier].here[block as usize]
    }

    /// The layers of a block that stand or will stand on a tier.
    fn expected(&self, tier: TierId, block: BlockId) -> Layers {
        let here = self.residency(tier, block);
        if here.state != State::Arriving {
            return here.usable();
        }
        match self.arriving.get(&(tier, block)) {
            Some(arrival) if !arrival.failed => arrival.target,
            _ => here.have,
        }
    }

    /// Whether failed moves still hold slots of a block on a tier: nothing new may go there.
    fn stuck(&self, tier: TierId, block: BlockId) -> bool {
        self.arriving.get(&(tier, block)).is_some_and(|arrival| arrival.failed)
    }

    /// Whether victims of a tier are written one tier down.
    fn writes(&self, tier: TierId) -> bool {
        tier < self.last() && self.tiers[tier].spec.write != Write::Never
    }

    fn departure(&self, tier: TierId) -> Departure {
        if self.writes(tier) { Departure::Demote } else { Departure::Drop }
    }

    /// The layers that leave next from what a tier holds of a block.
    fn next_out(&self, tier: TierId, block: BlockId, have: Layers) -> Layers {
        if !self.tiers[tier].spec.layer_slots {
            return have;
        }
        let back = Layers::new(have.hi - 1, have.hi);
        match self.departure(tier) {
            Departure::Demote => back,
            Departure::Drop if self.structure(block) == Structure::LeafOnly => have,
            Departure::Drop if self.settings.drop_order == DropOrder::Seed => back,
            Departure::Drop if tier == self.last() => Layers::new(have.lo, have.lo + 1),
            Departure::Drop => have,
        }
    }

    /// What ranks a block on a tier that holds `have` of it.
    fn facts(&self, tier: TierId, block: BlockId, have: Layers) -> Facts {
        let depth = self.trie.depth(block);
        let out = self.next_out(tier, block, have);
        let single = self.tiers[tier].spec.layer_slots && out.len() == 1;
        Facts {
            context: u64::from(depth)
                * u64::from(self.settings.block_tokens)
                * u64::from(self.settings.token_weight),
            block: depth,
            session_blocks: self.sessions.shortest(block).unwrap_or(depth + 1),
            uses: self.nodes[block as usize].uses,
            layers: have,
            model_layers: self.settings.layers,
            layer: single.then_some(out.lo),
            departure: self.departure(tier),
        }
    }

    fn entry(&self, tier: TierId, block: BlockId, have: Layers) -> Entry {
        let node = self.nodes[block as usize];
        let depth = self.trie.depth(block);
        let facts = self.facts(tier, block, have);
        Entry {
            class: self.tiers[tier].retention.policy().class(&facts, &self.settings.cost),
            access: node.access,
            tie: match self.structure(block) {
                Structure::LeafOnly => u32::MAX - depth,
                Structure::Holes => depth,
            },
            id: block,
        }
    }

    /// Whether a block may be chosen as victim on a tier.
    fn evictable(&self, tier: TierId, block: BlockId) -> bool {
        let here = self.residency(tier, block);
        let node = self.nodes[block as usize];
        let settled = matches!(here.state, State::Resident | State::Bad) && here.busy == 0;
        settled
            && self.tiers[tier].spec.owner != Owner::Engine
            && (tier > 0 || node.refs == 0)
            && (self.structure(block) == Structure::Holes
                || !self
                    .trie
                    .children(block)
                    .any(|child| self.residency(tier, child).state != State::Absent))
    }

    /// Brings the retention entries of a block in line with its state. Called after any change of
    /// residency, lease, access or price.
    fn refresh(&mut self, block: BlockId) {
        for tier in 0..self.tiers.len() {
            self.refresh_on(tier, block);
        }
    }

    fn refresh_on(&mut self, tier: TierId, block: BlockId) {
        let wanted = (self.trie.alive(block) && self.evictable(tier, block))
            .then(|| self.entry(tier, block, self.residency(tier, block).have));
        let known = self.tiers[tier].retention.get(block);
        if known != wanted {
            let retention = &mut self.tiers[tier].retention;
            if known.is_some() {
                retention.unlink(block);
            }
            if let Some(entry) = wanted {
                retention.link(entry);
            }
        }
    }

    /// After a block's presence on a tier changed: its own entry and its parent's.
    fn presence_changed(&mut self, tier: TierId, block: BlockId) {
        self.refresh_on(tier, block);
        if let Some(parent) = self.trie.parent(block) {
            self.refresh_on(tier, parent);
        }
    }

    fn touch(&mut self, block: BlockId, now: Nanos, used: bool) {
        let node = &mut self.nodes[block as usize];
        node.access = now;
        node.uses = node.uses.saturating_add(u32::from(used));
        self.refresh(block);
    }

    fn new_node(
        &mut self,
        scope: ScopeId,
        parent: Option<BlockId>,
        tokens: &[Token],
        now: Nanos,
    ) -> BlockId {
        let root = self.scopes.get(scope).root;
        let block = self.trie.insert(root, parent, tokens);
        let bound = self.trie.bound();
        if self.nodes.len() < bound {
            self.nodes.resize(bound, Node::default());
            for tier in &mut self.tiers {
                tier.here.resize(bound, Residency::default());
            }
        }
        self.nodes[block as usize] =
            Node { scope, refs: 0, uses: 1, access: now, unwritable: false };
        block
    }

    /// Where the last copy of a leaf-only block was lost to a failure, what stands behind it
    /// serves nobody any more: it goes too, now or when the moves that touch it have ended.
    fn sweep(&mut self, block: BlockId) {
        let lost = self.trie.alive(block)
            && self.structure(block) == Structure::LeafOnly
            && self.nodes[block as usize].refs == 0
            && !self.missing(block).is_empty();
        if !lost {
            return;
        }
        let mut below = vec![block];
        let mut at = 0;
        while let Some(&next) = below.get(at) {
            below.extend(self.trie.children(next));
            at += 1;
        }
        for &block in below.iter().rev() {
            for tier in 0..self.tiers.len() {
                let moving = self.arriving.get(&(tier, block)).is_some_and(|a| !a.moves.is_empty());
                if self.residency(tier, block).busy == 0 && !moving {
                    self.drop_copy(tier, block);
                }
            }
            self.prune(block);
        }
    }

    /// Removes nodes that hold nothing and that nothing needs, from `block` upwards.
    fn prune(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            if !self.trie.alive(block) {
                return;
            }
            let held = (0..self.tiers.len())
                .any(|tier| self.residency(tier, block).state != State::Absent);
            let used =
                self.nodes[block as usize].refs > 0 || self.trie.children(block).next().is_some();
            if held || used {
                return;
            }
            next = self.trie.parent(block);
            self.sessions.forget(block, next);
            self.keys.remove(&block);
            self.trie.remove(block);
        }
    }
}
