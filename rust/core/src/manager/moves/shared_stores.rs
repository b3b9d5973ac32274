//! Stores to a shared tier: blocks waiting to be written to a tier shared by several machines.
//!
//! A write to a shared tier may take any time, so its store can be dropped until a worker begins to
//! read the source: the block waits here without a move. Its copy can be evicted, which drops the
//! store. The executor requests as many stores as it can start. Each then becomes a move, and its
//! source is busy until the move has ended. With several groups, a resume point waits as a single
//! store of several moves (`shared_stores/points.rs`), followed by the blocks of its path.
//!
//! ```text
//! waiting --the executor asks for it--> move: its source is no victim --> ended, on shared tier
//!    | its copy leaves the tier: dropped
//! ```
//!
//! Invariant: the copy of a waiting block is on the tier above the shared tier. A slot being read
//! for a shared tier is never promised to a new holder. Cost: O(log n) per waiting block, and the
//! cost of a write-back when its move starts.

pub(in crate::manager) mod points;

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::block::{BlockId, Part, TierId};
use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::tier::ResidencyState;
use crate::time::{Nanos, Stamp};

/// Waiting store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedStore {
    /// Source tier.
    pub(crate) tier: TierId,
    pub(crate) block: BlockId,
    /// Whether it stores the resume point of the block.
    pub(crate) point: bool,
    /// Blocks used after this time are not evicted for it.
    pub(crate) younger: Stamp,
}

/// Waiting stores, in starting order.
#[derive(Debug, Default)]
pub(crate) struct SharedStores {
    waiting: BTreeMap<u64, SharedStore>,
    numbers: FxHashMap<(TierId, BlockId, bool), u64>,
    /// Number of the next store.
    next: u64,
    /// Parts on or arriving on the shared tier, held for the first point until it is complete.
    held: Vec<Part>,
}

/// Result of a step of the oldest store.
enum Step {
    /// A move has started.
    Begun,
    /// It needs no further move.
    Over,
    /// There is no room until a move ends.
    NoRoom,
}

impl SharedStores {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the store of a copy waits.
    pub(crate) fn contains(&self, tier: TierId, block: BlockId) -> bool {
        self.numbers.contains_key(&(tier, block, false))
    }

    /// The stores, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SharedStore> {
        self.waiting.values()
    }

    /// Adds a store. Returns false if it already waits.
    pub(crate) fn add(&mut self, store: SharedStore) -> bool {
        let SharedStore { tier, block, point, younger } = store;
        if let Some(number) = self.numbers.get(&(tier, block, point)) {
            let known = self.waiting.get_mut(number).expect("it has this number");
            known.younger = known.younger.max(younger);
            return false;
        }
        self.numbers.insert((tier, block, point), self.next);
        self.waiting.insert(self.next, store);
        self.next += 1;
        true
    }

    /// The oldest store.
    pub(crate) fn first(&self) -> Option<SharedStore> {
        self.iter().next().copied()
    }

    /// Removes the store of a copy.
    pub(crate) fn remove(&mut self, tier: TierId, block: BlockId) {
        if let Some(number) = self.numbers.remove(&(tier, block, false)) {
            self.waiting.remove(&number);
        }
    }
}

impl Manager {
    /// Number of blocks and resume points waiting to be written to a shared tier, and of blocks
    /// evicted before a worker began to read them.
    #[must_use]
    pub fn shared_stores(&self) -> (usize, u64) {
        let dropped = self.meter.tiers.iter().map(|tier| tier.stores_dropped).sum();
        (self.shared_stores.len(), dropped)
    }

    /// Starts the stores of up to `blocks` waiting blocks, the oldest first.
    pub(super) fn begin_shared_stores(&mut self, blocks: usize) {
        let (now, mut begun) = (self.clock.last(), 0);
        while begun < blocks
            && let Some(store) = self.shared_stores.first()
        {
            let SharedStore { tier, block, point, younger } = store;
            let step = match () {
                () if point => self.begin_point_store(&store, now),
                () if self.points.several() => self.begin_path_store(&store, now),
                () => self.begin_store(&store, now),
            };
            match step {
                Step::Begun => begun += 1,
                // The end of a move may make room, but a flush does not wait for it.
                Step::NoRoom if younger == Stamp::MAX && !self.moves.is_empty() => return,
                Step::Over | Step::NoRoom if point => self.end_point_store(tier, block),
                Step::Over | Step::NoRoom => self.shared_stores.remove(tier, block),
            }
        }
    }

    /// Starts the store of a block of a model with a single group.
    fn begin_store(&mut self, store: &SharedStore, now: Nanos) -> Step {
        let SharedStore { tier, block, younger, .. } = *store;
        let Some(dirty) = self.unwritten(tier, block, None) else { return Step::Over };
        let Some(set) = self.room_below(tier, block, dirty, younger, now) else {
            return Step::NoRoom;
        };
        self.shared_stores.remove(tier, block);
        self.apply(&set, now);
        self.copy_down(tier, block, dirty, None, now);
        Step::Begun
    }

    /// Starts the store of a block of a model with several groups. The earlier blocks of its path
    /// are protected on the shared tier, because they have no child there yet.
    fn begin_path_store(&mut self, store: &SharedStore, now: Nanos) -> Step {
        let SharedStore { tier, block, .. } = *store;
        let Some(dirty) = self.unwritten(tier, block, None) else { return Step::Over };
        let (below, path) = (tier + 1, self.path_to(Some(block)));
        let stay: Vec<_> = self.runs(&path).into_iter().map(|run| (below, run)).collect();
        let fits = self.make_soft_room(Wanted { tier: below, slots: &[1] }, &stay, now);
        // Its copy may have left for the room.
        let begins = fits && self.unwritten(tier, block, None) == Some(dirty);
        if begins {
            self.shared_stores.remove(tier, block);
            self.copy_down(tier, block, dirty, None, now);
        }
        self.refresh_stay(stay);
        match (begins, fits) {
            (true, _) => Step::Begun,
            (false, true) => Step::Over,
            (false, false) => Step::NoRoom,
        }
    }

    /// Checks that waiting blocks and points are on their source tier, and that parts are held only
    /// for the first point.
    pub(crate) fn audit_shared_stores(&self, broken: &mut Vec<String>) {
        for store in self.shared_stores.iter() {
            let SharedStore { tier, block, point, .. } = *store;
            let storable = self.trie().alive(block)
                && if point {
                    self.points.has_on(tier, block)
                } else {
                    self.residency(tier, block).state != ResidencyState::Absent
                };
            if !storable || !self.tiers.writes_shared(tier) {
                broken.push(format!("block {block} waits on tier {tier} and is not there"));
            }
        }
        let first = self.shared_stores.first().is_some_and(|store| store.point);
        if !first && !self.shared_stores.held.is_empty() {
            broken.push(format!("{:?} are held for no point", self.shared_stores.held));
        }
    }
}
