//! Moves: the queue of copies for the executor.
//!
//! Each move is issued exactly once, after all its dependencies, except at most the move named by
//! `after`. Invariant: the queue is in topological order, and both ends of a move are busy until it
//! has ended. Cost: O(log moves) each. A move's life:
//!
//! ```text
//! add_move --> parked --> queue --> issued --> done on some ranks --> ended, ok
//!               |            |         |                 |
//!               +------------+---------+-- fail ---------+--> failed --> ended, on every rank
//! parked: more than one dependency, a parked dependency, or a slot not yet named by the engine
//! ```

pub(super) mod awaits;
pub(super) mod batch;
pub(super) mod complete;
pub(super) mod copy;
pub(super) mod fail;
pub(super) mod load;
pub(super) mod points;
pub(super) mod shared_stores;
pub(super) mod write_ahead;

use std::ops::RangeInclusive;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::arrival::{Arrival, MoveIds};
use crate::block::{BlockId, Layers, LeaseId, MoveId, NO_MOVE, Place, TierId};
use crate::error::{Error, Result};
use crate::lane::{LaneId, Transmission};
use crate::record::BlockKey;
use crate::tier::{Kind, ResidencyState};
use crate::time::Nanos;

use crate::manager::Manager;
use crate::transfer::{End, Endpoint, InFlightMove, Move, MoveKind};

/// Route of moves of a kind between two tiers, computed once per batch.
#[derive(Clone, Copy)]
pub(super) struct Route {
    lane: LaneId,
    /// Whether the move carries the block's key.
    keyed: bool,
    /// Whether it carries the block's label.
    labelled: bool,
}

/// Specification of a new move. `enter` adds id, times and dependencies.
pub(super) struct NewMove {
    pub(super) kind: MoveKind,
    pub(super) lease: LeaseId,
    pub(super) block: Option<BlockId>,
    pub(super) src: Endpoint,
    pub(super) dst: Endpoint,
    pub(super) layers: Layers,
    pub(super) tokens: u32,
    pub(super) deps: MoveIds,
}

impl Manager {
    /// Issues up to `limit` moves, each exactly once, in topological order. They include all stores
    /// to a shared tier, and these stores count as started.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`].
    pub fn moves(&mut self, limit: usize) -> Result<Vec<Move>> {
        self.hand_out(limit, usize::MAX, |known, lease| Move { lease, ..known.clone() })
    }

    /// Like [`Manager::moves`], but starts stores of at most `shared` blocks to a shared tier.
    /// Returns `give` of each move and of the lease that requested or awaits it.
    ///
    /// # Errors
    /// As [`Manager::moves`].
    pub fn hand_out<T>(
        &mut self,
        limit: usize,
        shared: usize,
        give: impl Fn(&Move, LeaseId) -> T,
    ) -> Result<Vec<T>> {
        self.open()?;
        if !self.shared_stores.is_empty() {
            let room = limit.saturating_sub(self.moves.queued());
            self.begin_shared_stores(shared.min(room));
        }
        let number = limit.min(self.moves.queued());
        // Searching for the waiting leases takes O(leases), so do it only for moves without a
        // lease.
        let without = self.moves.peek(number).filter(|known| known.lease == 0);
        let (low, high) = without
            .fold((MoveId::MAX, 0), |(low, high), known| (known.id.min(low), known.id.max(high)));
        let first =
            if high > 0 { self.first_to_await(&(low..=high)) } else { FxHashMap::default() };
        let mut out = Vec::with_capacity(number);
        self.moves.hand_out(number, self.clock.last(), |known| {
            let lease = match known.lease {
                0 => first.get(&known.id).copied().unwrap_or(0),
                asked => asked,
            };
            out.push(give(known, lease));
        });
        Ok(out)
    }

    /// The oldest waiting lease of each of these moves.
    fn first_to_await(&self, ids: &RangeInclusive<MoveId>) -> FxHashMap<MoveId, LeaseId> {
        let mut all: FxHashMap<MoveId, LeaseId> = FxHashMap::default();
        let mut visit = |id: MoveId, lease: LeaseId| {
            if ids.contains(&id) {
                let first = all.entry(id).or_insert(lease);
                *first = lease.min(*first);
            }
        };
        for (lease, moves) in self.awaits.all() {
            // The moves of a row ascend.
            for &id in &moves[moves.partition_point(|id| id < ids.start())..] {
                visit(id, lease);
            }
        }
        // A lease with a draining slot waits for the store that reads the slot.
        if !self.blocks.none_draining(0) {
            for lease in self.leases.values() {
                self.readers(lease, usize::MAX).for_each(|id| visit(id, lease.id));
            }
        }
        all
    }

    /// Number of moves not yet issued, and of all moves in flight.
    #[must_use]
    pub fn pending(&self) -> (usize, usize) {
        (self.moves.queued(), self.moves.len())
    }

    /// The predicted first-layer and last-layer ready times of moves in flight. An ended move is
    /// ready now.
    ///
    /// # Errors
    /// [`Error::Config`] for an id that was never assigned.
    pub fn predict(&self, ids: &[MoveId], now: Nanos) -> Result<Vec<(Nanos, Nanos)>> {
        if let Some(id) = ids.iter().find(|&&id| !self.moves.issued_id(id)) {
            return Err(Error::config(format!("there is no move {id}")));
        }
        let now = self.clock.read(now);
        let times = |&id: &MoveId| {
            self.moves.get(id).map_or((now, now), |m| (m.first.max(now), m.ready.max(now)))
        };
        Ok(ids.iter().map(times).collect())
    }

    /// Adds a move and marks both its ends as busy.
    pub(super) fn add_move(&mut self, new: NewMove, now: Nanos) -> MoveId {
        let NewMove { kind, block, src, dst, .. } = new;
        let route = self.route(kind, src.place.tier, dst.place.tier);
        let (id, _) = self.enter(new, route, now);
        if let (End::Resident, Some(block)) = (src.end, block) {
            self.blocks.begin_use(src.place, block, id);
        }
        if let (End::Resident, Some(block)) = (dst.end, block) {
            self.blocks.alter(dst.place, block, |residency| residency.busy += 1);
        }
        for at in [src, dst] {
            match (at.end, block) {
                (End::Resident, Some(block)) => self.refresh_part(at.place, block),
                (End::PrivateSlot(private), _) => self.private_slots.begin_move(private),
                (End::Open, _) => self.blocks.begin_touch(at.place, at.slot, id),
                (End::Resident | End::Leaving, _) => {}
            }
        }
        id
    }

    /// The route of moves of this kind between two tiers.
    pub(super) fn route(&self, kind: MoveKind, src: TierId, dst: TierId) -> Route {
        let lane = match kind {
            // A tier has a read lane and a write lane. A load queues at its source.
            MoveKind::Load | MoveKind::Copy => self.tiers[src].read,
            MoveKind::Store => self.tiers[dst].store,
        };
        let far = |tier: TierId| {
            let spec = &self.tiers[tier].spec;
            spec.kept || matches!(spec.kind, Kind::Disk | Kind::Remote)
        };
        Route { lane, keyed: far(src) || far(dst), labelled: far(dst) }
    }

    /// Adds a move between busy ends, and returns its predicted times.
    #[expect(clippy::inline_always, reason = "a batch of moves: a tenth of what offloading takes")]
    #[inline(always)]
    pub(super) fn enter(
        &mut self,
        new: NewMove,
        route: Route,
        now: Nanos,
    ) -> (MoveId, Transmission) {
        let id = self.moves.next_id();
        let NewMove { kind, lease, block, src, dst, layers, tokens, mut deps } = new;
        let Route { lane, keyed, labelled } = route;
        let since = if self.marked.is_empty() { 0 } else { self.marked_until(src, block) };
        let start = self.moves.depend(id, &mut deps, now.max(since));
        let (from, to) = (src.place.tier, dst.place.tier);
        let group = u8::try_from(dst.place.group).expect("few groups");
        let bytes = self.bytes_of(group, layers, tokens);
        let times = self.lanes.transmit(lane, bytes, start, layers.len());
        let key = match block {
            Some(block) if keyed => self.key(block),
            _ => BlockKey::default(),
        };
        let kept = block.filter(|_| labelled);
        let label = kept.map(|block| Box::new(self.label(block, now)));
        self.meter.tier(to).moves += 1;
        self.moves.add(InFlightMove {
            spec: Move {
                id,
                kind,
                lease,
                block: block.map(|block| self.trie().handle(block)),
                key,
                label,
                src: from,
                dst: to,
                src_slot: src.slot,
                dst_slot: dst.slot,
                group,
                layers,
                after: NO_MOVE,
                tokens,
                first: times.first,
                ready: times.end,
            },
            from: src.end,
            to: dst.end,
            leaves: None,
            deps,
            since,
            issued: false,
            failed: false,
            done_ranks: 0,
            hung_ranks: 0,
            progress: SmallVec::new(),
            landed: 0,
            started: now,
            handed: now,
        });
        (id, times)
    }

    /// Bytes of some tokens of a block: a partial block transfers only its tokens.
    fn bytes_of(&self, group: u8, layers: Layers, tokens: u32) -> u64 {
        let full = self.settings.move_bytes(group, layers);
        if tokens == self.settings.block_tokens {
            full
        } else {
            full * u64::from(tokens) / u64::from(self.settings.block_tokens)
        }
    }

    /// Ready time of a marked source that is still arriving, or 0.
    fn marked_until(&self, src: Endpoint, block: Option<BlockId>) -> Nanos {
        // All groups of a block are marked with the first.
        let coming = block.filter(|_| src.end == End::Resident);
        let coming = coming.and_then(|block| self.arrival(src.place.tier, block));
        coming.filter(|arrival| arrival.moves.is_empty()).map_or(0, |arrival| arrival.ready)
    }

    /// Refreshes the entry of a block's part. Only the first group has entries.
    pub(super) fn refresh_part(&mut self, place: Place, block: BlockId) {
        if place.group == 0 {
            self.refresh_on(place.tier, block);
        }
    }

    /// Adds layers to the arrival of a block.
    pub(super) fn expect(
        &mut self,
        place: impl Into<Place>,
        block: BlockId,
        layers: Layers,
        moves: &[MoveId],
    ) {
        let place = place.into();
        let have = self.residency(place, block).have;
        let times = moves.iter().map(|&id| &self.moves[id]);
        let first = times.clone().map(|m| m.first).min().unwrap_or(0);
        let ready = times.map(|m| m.ready).max().unwrap_or(0);
        self.blocks.alter(place, block, |residency| residency.state = ResidencyState::Arriving);
        // The first arriving layers start an arrival, and later loads of the block extend it.
        if self.arrival(place, block).is_none() {
            let arrival = Arrival::new(have, MoveIds::new(), first, ready);
            self.blocks.attach_arrival(place, block, arrival);
        }
        let arrival = self.arrival_mut(place, block).expect("just made");
        arrival.target =
            arrival.target.join(layers).expect("arriving layers leave no gap in a tier's range");
        arrival.moves.extend_from_slice(moves);
        arrival.ready = arrival.ready.max(ready);
        if place.group == 0 {
            self.residency_changed(place.tier, block);
        }
    }

    /// The moves in flight that bring `layers` of a block to a place.
    pub(super) fn bringing(
        &self,
        place: impl Into<Place>,
        block: BlockId,
        layers: Layers,
    ) -> MoveIds {
        let Some(arrival) = self.arrival(place, block) else { return MoveIds::new() };
        let under_way = |id: &&MoveId| {
            self.moves.get(**id).is_some_and(|m| !m.failed && !m.layers.meet(layers).is_empty())
        };
        arrival.moves.iter().filter(under_way).copied().collect()
    }
}
