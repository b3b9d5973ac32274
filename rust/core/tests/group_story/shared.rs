//! A shared tier in a story: workers begin as many stores to it as they like, and end them late.
//!
//! Invariant: nothing waits for a store to a shared tier but a load of what it brings, and nothing writes
//! what one reads. Cost: O(stores in flight) per move.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::{BlockKey, Kind, Move, MoveId, MoveKind, Scope, Settings, Token};

use crate::bytes::content;
use crate::group_story::Story;

/// Stores to the shared tier, if there is one.
#[derive(Default)]
pub(super) struct SharedStores {
    /// Draws how many stores workers ask for.
    pub(super) workers: usize,
    /// Stores in flight.
    begun: Vec<Move>,
    /// Stores that have begun.
    total: usize,
    /// Moves that have failed: those after them never start.
    pub(super) failed: BTreeSet<MoveId>,
    /// By key, what is computed for a block: another machine may have written it.
    computed: BTreeMap<BlockKey, u64>,
}

/// The same settings with a shared tier as the last one of two or more.
pub(crate) fn above_shared(mut settings: Settings) -> Settings {
    let kinds: &[Kind] = match settings.tiers.len() {
        2 => &[Kind::Host, Kind::Remote],
        3 => &[Kind::Gpu, Kind::Host, Kind::Remote],
        _ => &[Kind::Gpu, Kind::Host, Kind::Disk, Kind::Remote],
    };
    for (tier, &kind) in settings.tiers.iter_mut().zip(kinds) {
        tier.kind = kind;
    }
    settings
}

impl Story {
    /// Number of stores to the shared tier that have begun.
    pub(crate) fn stored(&self) -> usize {
        self.stores.total
    }

    /// Notes what is computed for the blocks of a path.
    pub(super) fn learn(&mut self, path: &[Token]) {
        let keys = self.rig.manager.keys(&Scope::default(), path).unwrap();
        let known = keys.into_iter().enumerate().map(|(at, key)| (key, content(path, at)));
        self.stores.computed.extend(known);
    }

    /// The bytes of a move are copied. A shared tier finds them by the key of the block, wherever its
    /// slot is; it is given no others.
    pub(super) fn copy(&mut self, known: &Move, ok: bool) {
        let Some(bytes) = &mut self.bytes else { return };
        let tiers = &self.rig.manager.settings().tiers;
        let shared = |tier: usize| tiers[tier].kind == Kind::Remote;
        if shared(known.src) {
            let found = self.stores.computed.get(&known.key).copied();
            bytes.arrive(known, found.filter(|_| ok));
            return;
        }
        // An engine writes a slot after it has let it be copied ahead.
        if shared(known.dst) && ok && self.engine.is_none() {
            let wanted = self.stores.computed.get(&known.key).copied();
            assert_eq!(bytes.source(known), wanted, "{known:?} writes other bytes");
        }
        bytes.copy(known, ok);
    }

    /// Hands out all moves, and as many stores to a shared tier as workers ask for.
    pub(super) fn hand_out(&mut self) -> Vec<Move> {
        let busy = self.stores.begun.len();
        let shared = [usize::MAX, 0, 1, 2][self.stores.workers % 4].saturating_sub(busy);
        let give = |known: &Move, lease| Move { lease, ..known.clone() };
        self.rig.call(|m, _| m.hand_out(usize::MAX, shared, give)).expect("it never fails")
    }

    /// Whether a move is a store to a shared tier that ends later.
    pub(super) fn waits(&mut self, known: &Move) -> bool {
        let tiers = &self.rig.manager.settings().tiers;
        let shared = tiers.len() - 1;
        if tiers[shared].kind != Kind::Remote {
            return false;
        }
        if self.stores.failed.contains(&known.after) {
            self.stores.failed.insert(known.id);
        }
        let failed = &self.stores.failed;
        self.stores.begun.retain(|store| !failed.contains(&store.after));
        let store = self.stores.begun.iter().position(|store| store.id == known.after);
        if let Some(at) = store.filter(|_| known.src == shared) {
            let store = self.stores.begun.remove(at);
            self.end_move(&store, true);
        }
        for store in &self.stores.begun {
            assert!(known.after != store.id, "{known:?} waits for a store");
            let overwrites = self.bytes.as_ref().is_some_and(|b| b.overwrites(known, store));
            assert!(!overwrites, "{known:?} writes what {store:?} reads");
        }
        let store = known.kind == MoveKind::Store && known.dst == shared;
        // One after a move that failed never starts.
        if store && !self.stores.failed.contains(&known.id) {
            self.stores.total += 1;
            self.stores.begun.push(known.clone());
        }
        store
    }

    /// Stores to a shared tier end, every `each`th of them badly; half of them with `each` odd.
    pub(super) fn end_stores(&mut self, each: usize) {
        let keeps = if each % 2 == 1 { self.stores.begun.len() / 2 } else { 0 };
        let ended = self.stores.begun.split_off(keeps);
        for (at, known) in ended.into_iter().enumerate() {
            self.end_move(&known, each == 0 || at % each > 0);
        }
    }

    /// All stores that wait begin and end.
    pub(super) fn end_all_stores(&mut self) {
        self.stores.workers = 0;
        for round in 0.. {
            self.end_all_moves();
            if self.rig.manager.shared_stores().0 == 0 {
                return;
            }
            assert!(round < 1000, "stores wait for ever: {:?}", self.rig.manager.shared_stores());
            self.end_moves(0);
        }
    }
}
