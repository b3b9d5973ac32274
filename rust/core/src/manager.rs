//! The block manager: decides about placement, eviction, moves and recomputation of blocks.
//!
//! Sans-IO and deterministic: time is an argument, `moves` hands out copies, and `complete` takes
//! their results. A copy becomes valid only in `complete`. Invariants: see `audit`. A failed
//! operation has changed nothing. Cost: see each operation. Life of a request:
//!
//! ```text
//! acquire: match the trie -> pin the path -> residency scan -> plan (reuse | load | recompute)
//!            -> eviction set (room on each tier) -> apply it -> moves in flight -> lease
//! moves:   queue -> executor copies -> complete: arrived -> resident -> lease ready
//! commit:  computed blocks enter the trie and become resident;  release: unpin, evictable again
//! ```

mod bands;
mod consequence;
mod evict;
mod hints;
mod keys;
mod kinds;
mod meter;
mod moves;
mod name;
mod node;
mod observe;
mod points;
mod policy_feed;
mod producers;
mod request;
mod settings;
mod slots;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rustc_hash::FxHashMap;

use crate::arrival::Arrival;
use crate::block::{BlockId, Handle, Layers, LeaseId, Place, Slot, Structure, TierId};
use crate::error::{Error, Result};
use crate::lane::Lanes;
use crate::memory;
use crate::private_slots::PrivateSlots;
use crate::residency::Blocks;
use crate::scope::Scopes;
use crate::tier::Residency;
use crate::tiers::Tiers;
use crate::time::{Clock, Nanos};
use crate::transfer::Moves;
use crate::trie::Trie;

pub use crate::transfer::{Move, MoveKind};
pub use hints::versions::{SortedVersions, VersionFate};
pub use kinds::{Action, Cause, LoadMode, Reason, Span};
pub use meter::block_event::{BlockEvent, BlockEventKind, BlockTokens};
pub use meter::contents::Contents;
pub use meter::log::Eviction;
pub use meter::{RequestStats, TierStats, TierTimes};
pub use moves::complete::{Failed, MOST_FAILED, Outcome};
pub use observe::explain::Explanation;
pub use observe::miss::{Asked, Miss, MissBranch, MissCause, OpenMiss};
pub use observe::report::{Event, Occupancy};
pub use request::life::acquire::Acquire;
pub use request::life::commit::Committed;
pub use request::life::expected_sessions::ExpectedSession;
pub use request::life::lease::{Lease, Plan};
pub use request::matching::lookup::{Copy, Match, MatchedBlock};
pub use request::matching::price::Unpriced;
pub use request::restart::index::Row;
pub use request::restart::mark::Mark;
pub use request::slots::pins::PinId;
pub use settings::{DropOrder, Groups, Settings, producer_key};

use consequence::Consequences;
use evict::set::EvictionSet;
use hints::Hints;
use kinds::Ahead;
use meter::Meter;
use meter::block_event::BlockEvents;
use moves::awaits::Awaits;
use moves::shared_stores::SharedStores;
use node::Node;
use points::Points;
use policy_feed::PolicyFeed;
use producers::Producers;
use request::life::ages::Ages;
use request::life::session::Sessions;
use request::matching::price::Prices;
use request::slots::pins::Pins;
use request::slots::refused::Refused;

/// The block manager of a machine.
#[derive(Debug)]
pub struct Manager {
    settings: Settings,
    clock: Clock,
    blocks: Blocks<Node>,
    scopes: Scopes,
    tiers: Tiers,
    lanes: Lanes,
    private_slots: PrivateSlots,
    leases: FxHashMap<LeaseId, Box<Lease>>,
    /// Copies of blocks not committed yet, by source slot.
    ahead: BTreeMap<Slot, Ahead>,
    awaits: Awaits,
    next_lease: LeaseId,
    moves: Moves,
    /// Blocks waiting to be written to a shared tier.
    shared_stores: SharedStores,
    /// Copies announced by `mark` without a move, by ready time.
    marked: BTreeSet<(Nanos, TierId, BlockId)>,
    /// Latest failures not yet returned by `failed`.
    failed: VecDeque<Failed>,
    /// Lost blocks with moves still touching copies after them.
    lost: Vec<Handle>,
    /// Pending steps of the current call.
    consequences: Consequences,
    sessions: Sessions,
    ages: Ages,
    feed: PolicyFeed,
    meter: Meter,
    /// An empty eviction set, kept to reuse its memory.
    spare_set: Option<Box<EvictionSet>>,
    events: VecDeque<Event>,
    block_events: BlockEvents,
    keys: keys::ContentKeys,
    producers: Producers,
    refused: Refused,
    hints: Hints,
    prices: Prices,
    pins: Pins,
    /// Groups of layers, with resume points if there are several.
    points: Points,
    poison: Option<String>,
    closed: bool,
}

impl Manager {
    /// An empty manager.
    ///
    /// # Errors
    /// [`Error::Config`] if the settings contradict each other.
    pub fn new(settings: Settings) -> Result<Self> {
        settings.check()?;
        let mut lanes = Lanes::default();
        let Settings { policy, reuse, epsilon, .. } = &settings;
        let tiers = Tiers::new(&settings.tiers, policy, *reuse, *epsilon, &mut lanes)?;
        let mut blocks =
            Blocks::new(settings.block_tokens as usize, settings.layers, &settings.tiers);
        if settings.block_events > 0 {
            blocks.keep_changes();
        }
        let points = Points::new(&settings);
        if let Some(groups) = settings.groups.as_ref().filter(|_| points.several()) {
            let layers: Vec<u16> = groups.groups[1..].iter().map(|group| group.layers).collect();
            let above_shared = (0..tiers.len()).find(|&tier| tiers.above_shared(tier));
            blocks.open_groups(groups.arenas()?, &layers, above_shared);
        }
        memory::check(blocks.trie().growth(1), || {
            format!("the text of blocks of {} tokens", settings.block_tokens)
        })?;
        let keys = keys::ContentKeys::new(settings.block_events > 0);
        let private_slots = PrivateSlots::default();
        let feed = PolicyFeed::new(&tiers, settings.explain, points.several());
        let meter = Meter::new(tiers.len(), settings.eviction_log);
        let hints = Hints::new(&settings.tiers);
        Ok(Self {
            scopes: Scopes::new(settings.lacks_producer_key()),
            producers: Producers::new(settings.producer_key.unwrap_or_default()),
            blocks,
            settings,
            clock: Clock::default(),
            tiers,
            lanes,
            private_slots,
            leases: FxHashMap::default(),
            ahead: BTreeMap::new(),
            awaits: Awaits::default(),
            next_lease: 1,
            moves: Moves::default(),
            shared_stores: SharedStores::default(),
            marked: BTreeSet::new(),
            failed: VecDeque::new(),
            lost: Vec::new(),
            consequences: Consequences::default(),
            sessions: Sessions::default(),
            ages: Ages::default(),
            feed,
            meter,
            spare_set: None,
            events: VecDeque::new(),
            block_events: BlockEvents::default(),
            keys,
            refused: Refused::default(),
            hints,
            prices: Prices::default(),
            pins: Pins::default(),
            points,
            poison: None,
            closed: false,
        })
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The latest time seen.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.clock.last()
    }

    /// Number that changes whenever a lookup result may have changed, except for predicted times.
    /// May also change spuriously.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.blocks.generation()
    }

    /// The lanes and their queues.
    #[must_use]
    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Starts a transmission on a lane manually. Simulators use it for predicted times.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown lane, or if `layers` is 0 or exceeds the model's number.
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

    /// Adds measured busy time of a lane in nanoseconds.
    ///
    /// # Errors
    /// [`Error::Config`] for an unknown lane.
    pub fn add_lane_busy(&mut self, lane: &str, busy_ns: Nanos) -> Result<()> {
        self.open()?;
        if self.lanes.add_busy(lane, busy_ns) {
            return Ok(());
        }
        Err(Error::config(format!("there is no lane '{lane}'")))
    }

    /// Forgets all blocks, leases, moves and the time. The next call may pass any time.
    ///
    /// Settings, rates of lanes and counters stay. All lanes become idle.
    ///
    /// # Errors
    /// [`Error::Config`] while a lease is held or a move is in flight.
    pub fn reset(&mut self) -> Result<()> {
        self.open()?;
        if !self.leases.is_empty() || !self.moves.is_empty() || self.pins.len() > 0 {
            return Err(Error::config(format!(
                "reset with {} leases held and {} moves in flight, {} pins of copies",
                self.leases.len(),
                self.moves.len(),
                self.pins.len()
            )));
        }
        let fresh = Self::new(self.settings.clone())?;
        self.count_reset();
        self.note_reset();
        let old = std::mem::replace(self, fresh);
        // The clock keeps its counters, but accepts an earlier time from here on.
        self.clock = old.clock;
        self.clock.reset();
        self.lanes = old.lanes;
        self.lanes.reset();
        self.next_lease = old.next_lease;
        self.moves = Moves::starting_after(old.moves.latest());
        self.meter = old.meter;
        self.block_events = old.block_events;
        self.blocks.follow(old.blocks.generation());
        Ok(())
    }

    /// Ends the manager: every later call fails with [`Error::Closed`].
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Fails after `close` or a broken invariant, like all further calls.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`].
    pub fn open(&self) -> Result<()> {
        if let Some(reason) = &self.poison {
            return Err(Error::invariant(format!("the manager is poisoned: {reason}")));
        }
        if self.closed { Err(Error::closed("the manager is closed")) } else { Ok(()) }
    }

    /// Advances the clock to the caller's time, settles due marked copies and ends expired hints.
    fn tick(&mut self, now: Nanos) -> Nanos {
        self.pass_block_events(now);
        let now = self.clock.advance(now);
        let marked = self.marked.len();
        while let Some(&(ready, tier, block)) = self.marked.first() {
            if ready > now {
                break;
            }
            self.marked.pop_first();
            self.arrive_marked(tier, block);
        }
        if self.marked.len() < marked {
            // Loads may have waited for these copies.
            self.moves.unpark(now);
        }
        self.expire_hints(now);
        now
    }

    fn block_tokens(&self) -> usize {
        self.settings.block_tokens as usize
    }

    fn all_layers(&self) -> Layers {
        Layers::new(0, self.settings.layers)
    }

    #[inline]
    fn structure(&self, block: BlockId) -> Structure {
        self.scopes.get(self.node(block).scope).structure
    }

    /// The order in which blocks leave a tier. With several groups a block leaves after its
    /// successors: the windows before a hole are kept only at resume points, and a resume point is
    /// worth less per byte than the blocks before it.
    #[inline]
    fn departures(&self, block: BlockId) -> Structure {
        if self.points.several() { Structure::LeafOnly } else { self.structure(block) }
    }

    fn resolve(&self, handle: Handle) -> Result<BlockId> {
        self.trie()
            .resolve(handle)
            .ok_or_else(|| Error::config(format!("block {:#x} is not cached", handle.0)))
    }

    fn trie(&self) -> &Trie<Node> {
        self.blocks.trie()
    }

    #[inline]
    fn residency(&self, place: impl Into<Place>, block: BlockId) -> Residency {
        self.blocks.table(place).get(block)
    }

    /// The arrival of a block: the layers in flight to it.
    #[inline]
    fn arrival(&self, place: impl Into<Place>, block: BlockId) -> Option<&Arrival> {
        self.blocks.table(place).arrival(block)
    }

    fn arrival_mut(&mut self, place: impl Into<Place>, block: BlockId) -> Option<&mut Arrival> {
        self.blocks.arrival_mut(place, block)
    }

    /// Values shared by all blocks of a run.
    #[inline]
    fn node(&self, block: BlockId) -> &Node {
        self.trie().value(block)
    }
}
