//! Nodes: the values of a block in the trie, the facts that rank it, and its removal.
//!
//! Invariant: after every change `refresh` has brought the block's entries in the eviction indexes
//! in line with its state. Cost: O(tiers · log n) per refresh. In leaf-only scopes also the
//! children, up to the first resident child.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Departure, Layers, Structure, TierId, Token};
use crate::policy::{Entry, Facts, LastUse, Needs, Order, Reload};
use crate::scope::{ScopeEntry, ScopeId};
use crate::tier::{Owner, ResidencyState};
use crate::time::{Nanos, Stamp, stamp};
use crate::trie::GroupSlice;

use crate::manager::Manager;
use crate::manager::settings::DropOrder;

/// Values shared by all blocks of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) scope: ScopeId,
    /// Refcount: number of leases with this block on their path.
    pub(super) refs: u32,
    /// Number of requests that used the block, including requests before an earlier eviction.
    pub(super) uses: u32,
    /// Time of the last use.
    pub(super) access: Stamp,
    /// Length in blocks of the block's session before a restart, 0 if unknown.
    pub(super) session_blocks: u32,
}

/// A path as ranges of blocks, a range per run. Few paths have more runs than turns.
pub(super) type Runs = SmallVec<[Range<BlockId>; 12]>;

/// Ghosts of returning blocks, as (number of blocks, ghost) per stretch of equal ghosts.
type Ghosts = SmallVec<[(usize, u32); 8]>;

/// Slices of trie groups leaving the trie, each with its ghost.
pub(super) type GroupSlices = SmallVec<[(GroupSlice, u32); 16]>;

impl Manager {
    /// The layers of a block resident on a tier or in flight to it.
    #[inline]
    pub(super) fn expected(&self, tier: TierId, block: BlockId) -> Layers {
        let residency = self.residency(tier, block);
        // A bad copy has unusable layers.
        if residency.state != ResidencyState::Arriving {
            return residency.usable();
        }
        // Layers of a failed arrival are not promised to any request.
        match self.arrival(tier, block) {
            Some(arrival) if !arrival.failed => arrival.target,
            _ => residency.have,
        }
    }

    /// Whether failed moves still hold slots of a block on a tier: no new move may write there.
    pub(super) fn stuck(&self, tier: TierId, block: BlockId) -> bool {
        self.arrival(tier, block).is_some_and(|arrival| arrival.failed)
    }

    /// The next layers to evict out of `have`, the layers resident on a tier.
    pub(super) fn next_out(&self, tier: TierId, block: BlockId, have: Layers) -> Layers {
        if !self.tiers[tier].spec.layer_slots {
            return have;
        }
        let back = Layers::new(have.hi - 1, have.hi);
        match self.tiers.departure(tier) {
            Departure::Demote => back,
            // A leaf-only block is useless without all its layers.
            Departure::Drop if self.departures(block) == Structure::LeafOnly => have,
            Departure::Drop if self.settings.drop_order == DropOrder::Seed => back,
            // On the last tier the shallow layer goes: recomputation passes through it anyway.
            Departure::Drop if tier == self.tiers.last() => Layers::new(have.lo, have.lo + 1),
            Departure::Drop => have,
        }
    }

    /// Length in blocks of the shortest session through a block. Before the first session, the
    /// length stored with the block.
    pub(super) fn session_blocks(&self, block: BlockId) -> Option<u32> {
        let stored = self.node(block).session_blocks;
        self.sessions.shortest(block).or((stored > 0).then_some(stored))
    }

    /// The inputs of a policy for a block with the layers `have` resident on a tier.
    pub(super) fn facts(&self, tier: TierId, block: BlockId, have: Layers) -> Facts {
        let (depth, node) = (self.trie().depth(block), self.node(block));
        let tokens = u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
        let out = self.next_out(tier, block, have);
        let single = self.tiers[tier].spec.layer_slots && out.len() == 1;
        let index = &self.tiers[tier].eviction;
        let sessions =
            index.needs(Needs::SESSION_BLOCKS).then(|| self.session_blocks(block)).flatten();
        Facts {
            id: block,
            context: u64::from(depth) * tokens,
            // Some facts cost a lookup, so they are read only for policies that need them.
            block: depth,
            session_blocks: sessions.unwrap_or(depth + 1),
            uses: node.uses,
            access: if index.needs(Needs::SESSION_ACCESS) {
                self.ages.last_use(block).unwrap_or(node.access)
            } else {
                node.access
            },
            arrival: index.arrival(block).unwrap_or(0),
            layers: have,
            model_layers: self.settings.layers,
            layer: single.then_some(out.lo),
            // The seed's order ranks every layer as if it were demoted.
            departure: match self.settings.drop_order {
                DropOrder::Seed => Departure::Demote,
                DropOrder::Shallow => self.tiers.departure(tier),
            },
            price: self
                .prices
                .of(block)
                .map(|price| self.settings.cost.objective().weight(price))
                .or_else(|| self.point_price(tier, block)),
            reload: if index.needs(Needs::RELOAD) { self.reload(tier) } else { Reload::default() },
            last_use: if index.needs(Needs::REUSE) {
                self.feed.last_use(block, depth, &self.settings)
            } else {
                LastUse::default()
            },
        }
    }

    /// Load times of the blocks of a tier on idle lanes: from this tier and from the tier below.
    pub(super) fn reload(&self, tier: TierId) -> Reload {
        let bytes = self.settings.layer_bytes * u64::from(self.settings.layers);
        let time = |tier: TierId| self.lanes.takes(self.tiers[tier].read, bytes);
        Reload {
            tokens: u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight),
            own_tier: if tier == 0 { 0 } else { time(tier) },
            below: self.tiers.writes(tier).then(|| time(tier + 1)),
        }
    }

    /// The entry of a block in a tier's eviction index.
    pub(super) fn entry(&self, tier: TierId, block: BlockId, have: Layers) -> Entry {
        let (depth, index) = (self.trie().depth(block), &self.tiers[tier].eviction);
        // Among equal values, the deepest block of a leaf-only path leaves first, and the first
        // block of a path with holes.
        let tie = match self.departures(block) {
            Structure::LeafOnly => u32::MAX - depth,
            Structure::Holes => depth,
        };
        // These policies rank a block by its last use alone, and a resume point by its price too.
        let priced = !self.prices.is_empty() || self.points.has_on(tier, block);
        if index.order_kind() == Order::Ends && !priced {
            let last_use = self.feed.last_use(block, depth, &self.settings);
            if let Some(entry) = index.of_use(block, tie, &last_use) {
                return entry;
            }
        }
        index.entry(&self.facts(tier, block, have), tie, &self.settings.cost)
    }

    /// Whether a block may be a victim on a tier.
    pub(super) fn evictable(&self, tier: TierId, block: BlockId) -> bool {
        let residency = self.residency(tier, block);
        let node = *self.node(block);
        let settled = matches!(residency.state, ResidencyState::Resident | ResidencyState::Bad)
            && residency.busy == 0;
        // An engine evicts from its tier itself. A pinned block stays on the first tier. A
        // leaf-only block leaves after its children.
        settled
            && self.tiers[tier].spec.owner != Owner::Engine
            && (tier > 0 || node.refs == 0)
            && (self.departures(block) == Structure::Holes
                || !self
                    .trie()
                    .children(block)
                    .any(|child| self.residency(tier, child).state != ResidencyState::Absent)
                || self.points.has_on(tier, block))
    }

    /// Prefetches the CPU cache lines of a block's last use and its residencies on all tiers.
    pub(super) fn prefetch_lines(&self, block: BlockId) {
        self.feed.prefetch_use(block);
        (0..self.tiers.len()).for_each(|tier| self.blocks.table(tier).prefetch_line(block));
    }

    /// The ranges of a path, a range per run.
    pub(super) fn runs(&self, path: &[BlockId]) -> Runs {
        self.trie().along(path).map(|(run, _)| run).collect()
    }

    /// The blocks of a run with a possible entry on a tier, except resume points.
    ///
    /// In a fully resident leaf-only run only the last block has an entry, because every earlier
    /// block has a resident child.
    pub(super) fn edge(
        &self,
        tier: TierId,
        run: Range<BlockId>,
        structure: Structure,
    ) -> Range<BlockId> {
        let (all, table) = (self.holds_all(tier), &self.blocks.table(tier));
        // A run without resident blocks has no entries.
        if !all && table.none_present(run.clone()) {
            return run.end..run.end;
        }
        if structure == Structure::LeafOnly && (all || table.all_present(run.clone())) {
            return run.end - 1..run.end;
        }
        run
    }

    /// Updates the eviction entries of a block. Call it after any change of residency, refcount,
    /// access or price.
    pub(super) fn refresh(&mut self, block: BlockId) {
        for tier in 0..self.tiers.len() {
            self.refresh_on(tier, block);
        }
    }

    /// Updates the eviction entry of a block on a tier.
    pub(super) fn refresh_on(&mut self, tier: TierId, block: BlockId) {
        let alive = self.trie().alive(block);
        let known = self.tiers[tier].eviction.get(block);
        // A pinned block without an entry stays without an entry: the usual case of a decoding
        // lease.
        if known.is_none() && tier == 0 && alive && self.node(block).refs > 0 {
            return;
        }
        let wanted = (alive && self.evictable(tier, block))
            .then(|| self.entry(tier, block, self.residency(tier, block).have));
        // Most blocks of a path have no entry before and after.
        if known.is_none() && wanted.is_none() {
            return;
        }
        let band = self.band(tier, block);
        self.tiers.set_entry(tier, block, known, wanted, band);
    }

    /// Drops the waiting store to a shared tier of a copy that has left its tier.
    #[inline]
    pub(super) fn drop_shared_store(&mut self, tier: TierId, block: BlockId) {
        if !self.shared_stores.is_empty()
            && self.residency(tier, block).state == ResidencyState::Absent
        {
            self.shared_stores.remove(tier, block);
        }
    }

    /// Updates policy and hints after a residency change on a tier. The caller refreshes the entries
    /// of the block and its parent.
    pub(super) fn note_change(&mut self, tier: TierId, block: BlockId) {
        self.drop_shared_store(tier, block);
        self.note_arrival(tier, block);
        self.attend(tier, block);
    }

    /// Updates policy, hints and the entries of a block and its parent after a residency change on
    /// a tier.
    pub(super) fn residency_changed(&mut self, tier: TierId, block: BlockId) {
        self.note_change(tier, block);
        self.refresh_on(tier, block);
        if let Some(parent) = self.trie().parent(block) {
            self.refresh_on(tier, parent);
            self.refresh_above(tier, Some(parent));
        }
    }

    /// Updates a block's entries on the tiers above after its children left a tier or arrived
    /// there: the children decide whether the block serves a resume point.
    pub(super) fn refresh_above(&mut self, tier: TierId, block: Option<BlockId>) {
        if let (true, Some(block)) = (self.points.several(), block) {
            (0..tier).for_each(|above| self.refresh_on(above, block));
        }
    }

    /// Counts a request's use of the blocks of a path at `now`.
    pub(super) fn touch(&mut self, path: &[BlockId], now: Nanos) {
        let mut runs = Runs::new();
        // A pinned block has no entry on the first tier, so it needs no refresh there.
        let single = self.tiers.len() == 1;
        self.blocks.change_values(path, |run, node| {
            node.access = stamp(now);
            node.uses = node.uses.saturating_add(1);
            // With a single tier, only a block that was not pinned has an entry to refresh.
            if node.refs == 0 || !single {
                runs.push(run);
            }
        });
        self.refused.used(path);
        self.use_cached(path);
        self.used_again(path);
        self.refresh_runs(runs);
    }

    /// Refreshes the entries of consecutive blocks of a path.
    pub(super) fn refresh_path(&mut self, path: &[BlockId]) {
        self.refresh_runs(self.runs(path));
    }

    /// Refreshes the entries of ranges of blocks. Skips blocks without a possible entry.
    fn refresh_runs(&mut self, runs: Runs) {
        let Some(first) = runs.first() else { return };
        let structure = self.departures(first.start);
        for run in runs {
            let first = usize::from(self.node(run.start).refs > 0);
            self.refresh_from(first, run, structure);
        }
    }

    /// Refreshes the entries of a range on the tiers from `first` on.
    pub(super) fn refresh_from(
        &mut self,
        first: TierId,
        run: Range<BlockId>,
        structure: Structure,
    ) {
        for tier in first..self.tiers.len() {
            for block in self.edge(tier, run.clone(), structure) {
                self.refresh_on(tier, block);
            }
            self.refresh_points(tier, run.clone());
        }
    }

    /// Adds consecutive blocks under `parent` to the trie and to `path`, with the values of `node`.
    /// Adds their use counts from before eviction to its uses.
    pub(super) fn new_nodes(
        &mut self,
        node: Node,
        parent: Option<BlockId>,
        tokens: &[Token],
        path: &mut Vec<BlockId>,
    ) {
        let known = path.len();
        self.scopes.digests.hold(tokens);
        self.extend_trie(node, parent, tokens, path);
        if self.settings.priced {
            self.prices.wait(&path[known..]);
        }
        self.begin_producers(node.scope, &path[known..]);
        self.grant_new(node.scope, parent, &path[known..]);
    }

    /// Extends the trie, and updates policies and ghosts.
    fn extend_trie(
        &mut self,
        node: Node,
        parent: Option<BlockId>,
        tokens: &[Token],
        path: &mut Vec<BlockId>,
    ) {
        let ScopeEntry { root, seed, .. } = *self.scopes.get(node.scope);
        let known = path.len();
        let mut ghosts = Ghosts::new();
        // Use counts from before eviction continue in the new blocks.
        if self.feed.has_ghosts() {
            let (mut rest, mut last) = (tokens, parent);
            ghosts = self.ghosts_of(seed, parent, tokens);
            if self.feed.learns() {
                fill_gaps(&mut ghosts);
            }
            // Blocks with equal use counts share a run.
            for &(blocks, ghost) in &ghosts {
                let (now, later) = rest.split_at(blocks * self.block_tokens());
                let node = Node { uses: node.uses + self.feed.uses_of(ghost), ..node };
                self.blocks.extend(root, last, now, node, path);
                (rest, last) = (later, path.last().copied());
            }
        } else {
            self.blocks.extend(root, parent, tokens, node, path);
        }
        // Blocks added for a request are pinned already.
        let used = node.refs > 0;
        self.use_new(&path[known..], &ghosts, used);
    }

    /// Takes the ghosts of new blocks.
    fn ghosts_of(&mut self, seed: u64, parent: Option<BlockId>, tokens: &[Token]) -> Ghosts {
        let mut counts = Ghosts::new();
        let mut add = |blocks: usize, ghost: u32| match counts.last_mut() {
            Some((known, same)) if *same == ghost => *known += blocks,
            _ => counts.push((blocks, ghost)),
        };
        for slice in self.slices_of(seed, parent, tokens) {
            self.feed.take_ghosts(&slice, &mut add);
        }
        counts
    }

    /// The group slices of blocks with these tokens after `parent`, with the CPU cache lines of
    /// their ghosts prefetched.
    pub(super) fn slices_of(
        &self,
        seed: u64,
        parent: Option<BlockId>,
        tokens: &[Token],
    ) -> SmallVec<[GroupSlice; 8]> {
        let slices = self.trie().slices(seed, parent, tokens);
        slices.inspect(|slice| self.feed.prefetch_ghosts(slice)).collect()
    }

    /// A block and its descendants, parents before children.
    pub(super) fn subtree(&self, block: BlockId) -> Vec<BlockId> {
        let mut below = vec![block];
        let mut at = 0;
        while let Some(&next) = below.get(at) {
            below.extend(self.trie().children(next));
            at += 1;
        }
        below
    }

    /// Removes unpinned nodes without copies and children, from `block` upwards.
    pub(super) fn prune(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            // An earlier call has removed the block and its removable ancestors.
            if !self.trie().alive(block) {
                return;
            }
            let held = (0..self.tiers.len())
                .any(|tier| self.residency(tier, block).state != ResidencyState::Absent)
                || self.blocks.groups_arrive(block);
            if held || self.node(block).refs > 0 || self.trie().children(block).next().is_some() {
                return;
            }
            next = self.trie().parent(block);
            let slices = self.slices_leaving(std::iter::once(block..block + 1));
            self.remove_nodes(block..block + 1, next);
            self.remember(&slices);
        }
    }

    /// The slices to remember of tails of runs about to leave the trie, the last block first: a
    /// ghost table keeps later entries longer.
    pub(super) fn slices_leaving(&self, runs: impl Iterator<Item = Range<BlockId>>) -> GroupSlices {
        let mut all = GroupSlices::new();
        if !self.feed.keeps_ghosts() {
            return all;
        }
        for blocks in runs {
            let Node { scope, uses, .. } = *self.node(blocks.start);
            let (seed, before) = (self.scopes.get(scope).seed, self.trie().parent(blocks.start));
            let first = all.len();
            let mut block = blocks.start;
            for slice in self.trie().slices(seed, before, self.trie().tokens_of(blocks)) {
                self.feed.prefetch_ghosts(&slice);
                let mut ghost = self.feed.ghost_of(block, uses);
                let mut places = slice.places.start..slice.places.end;
                let start = block;
                block += u32::try_from(places.len()).expect("a group");
                // Blocks of a run may be of different turns.
                if !self.feed.one_ghost(start..block) {
                    for place in slice.places.clone().skip(1) {
                        let next = self.feed.ghost_of(block - (slice.places.end - place), uses);
                        if next != ghost {
                            let part = places.start..place;
                            all.push((GroupSlice { places: part, ..slice.clone() }, ghost));
                            (ghost, places.start) = (next, place);
                        }
                    }
                }
                all.push((GroupSlice { places, ..slice }, ghost));
            }
            all[first..].reverse();
        }
        all
    }

    /// Adds slices removed from the trie to the ghost table.
    pub(super) fn remember(&mut self, slices: &GroupSlices) {
        for (slice, ghost) in slices {
            self.feed.put_ghosts(slice, *ghost);
        }
    }

    /// Removes the tail of a run and prunes upwards from `before`. The tail has no copies and no
    /// children, and is in the ghost table.
    pub(super) fn forget(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        self.remove_nodes(blocks, before);
        if let Some(before) = before {
            self.prune(before);
        }
    }

    /// Removes the tail of a run from the side tables, the digests and the trie.
    fn remove_nodes(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        debug_assert!(
            blocks
                .clone()
                .all(|block| self.tiers.iter().all(|tier| tier.eviction.get(block).is_none())),
            "a block with an entry leaves the trie"
        );
        if self.points.several() {
            for block in blocks.clone().rev() {
                self.drop_point(block);
                self.blocks.discard_all(block);
            }
        }
        // Events name the block by its key and tokens, so record them before the removal.
        self.name_changes();
        self.forget_side_tables(blocks.clone(), before);
        let first = before.is_none().then(|| self.node(blocks.start).scope);
        self.scopes.digests.free(self.blocks.trie().tokens_of(blocks.clone()));
        self.blocks.remove_tail(blocks.end - 1, blocks.end - blocks.start);
        // A scope without blocks may be forgotten.
        if let Some(scope) = first {
            self.scopes.emptied(scope);
        }
    }

    /// Removes blocks that leave the trie from the side tables.
    fn forget_side_tables(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        let empty = self.sessions.is_empty()
            && self.keys.is_empty()
            && self.refused.is_empty()
            && self.hints.is_empty()
            && self.prices.tracks_none()
            && self.ages.is_empty()
            && self.producers.is_empty();
        // Without hints, sessions and keys the tables are empty: no work per block.
        if empty {
            return;
        }
        self.sessions.forget(blocks.clone(), before);
        for block in blocks.clone().rev() {
            let parent = if block > blocks.start { Some(block - 1) } else { before };
            self.keys.forget(block);
            self.refused.forget(block);
            self.forget_hints(block, parent);
            self.prices.forget(block);
            self.ages.forget(block);
            self.producers.forget(block);
        }
    }

    /// The path from the first block of a scope to `tip`.
    pub(super) fn path_to(&self, tip: Option<BlockId>) -> Vec<BlockId> {
        let depth = tip.map_or(0, |block| self.trie().depth(block) as usize + 1);
        let (mut path, mut next) = (Vec::with_capacity(depth), tip);
        while let Some(block) = next {
            let first = self.trie().run(block).start;
            path.extend((first..=block).rev());
            next = self.trie().parent(first);
        }
        path.reverse();
        path
    }

    /// All blocks of the trie.
    pub(super) fn living(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..self.trie().bound()).filter(|&b| self.trie().alive(b))
    }

    /// Whether all blocks of the trie are fully resident on a tier.
    pub(super) fn holds_all(&self, tier: TierId) -> bool {
        let table = &self.blocks.table(tier);
        table.overflow() == 0 && table.copies() == self.trie().len() as u64
    }

    /// The smallest range around the layers of a block missing on every tier.
    pub(super) fn missing(&self, block: BlockId) -> Layers {
        let all = self.all_layers();
        if (0..self.tiers.len()).any(|tier| self.expected(tier, block) == all) {
            return Layers::NONE;
        }
        let mut gaps = Layers::NONE;
        for layer in self.all_layers().iter() {
            let known =
                (0..self.tiers.len()).any(|tier| self.expected(tier, block).contains(layer));
            if !known {
                let lo = if gaps.is_empty() { layer } else { gaps.lo };
                gaps = Layers::new(lo, layer + 1);
            }
        }
        gaps
    }
}

/// Replaces lost ghosts by the next ghost on the path: a known block implies known blocks before
/// it.
fn fill_gaps(ghosts: &mut Ghosts) {
    let mut next_ghost = 0;
    for (_, ghost) in ghosts.iter_mut().rev() {
        if *ghost == 0 {
            *ghost = next_ghost;
        }
        next_ghost = *ghost;
    }
}
