//! One block among its kin: what ranks it, whether it may leave, when it is gone.
//!
//! Invariant: after every change `refresh` has brought the retention entries in line with the
//! block's state. Cost: O(tiers · log n) per refresh; in leaf-only scopes plus the children looked
//! at until one is found.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Departure, Layers, Structure, TierId, Token};
use crate::policy::{Entry, Facts, Reload};
use crate::scope::{Known, ScopeId};
use crate::tier::{Owner, State, Write};
use crate::time::{Nanos, Stamp, stamp};
use crate::trie::GroupSlice;

use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::manager::settings::DropOrder;

/// What the blocks of a run have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) scope: ScopeId,
    /// Leases whose path goes through here.
    pub(super) refs: u32,
    pub(super) uses: u32,
    /// When it was last used.
    pub(super) access: Stamp,
    /// Blocks of its session before a restart; 0 if it had none.
    pub(super) session_blocks: u32,
}

/// A path run by run; few paths have more runs than turns.
pub(super) type Runs = SmallVec<[Range<BlockId>; 12]>;

/// Parts of groups that leave the trie, and how often they were used.
pub(super) type GroupSlices = SmallVec<[(GroupSlice, u32); 16]>;

impl Manager {
    /// The layers of a block that stand or will stand on a tier.
    pub(super) fn expected(&self, tier: TierId, block: BlockId) -> Layers {
        let here = self.residency(tier, block);
        if here.state != State::Arriving {
            return here.usable();
        }
        match self.arrival(tier, block) {
            Some(arrival) if !arrival.failed => arrival.target,
            _ => here.have,
        }
    }

    /// Whether failed moves still hold slots of a block on a tier: nothing new may go there.
    pub(super) fn stuck(&self, tier: TierId, block: BlockId) -> bool {
        self.arrival(tier, block).is_some_and(|arrival| arrival.failed)
    }

    /// Whether victims of a tier are written one tier down.
    pub(super) fn writes(&self, tier: TierId) -> bool {
        tier < self.last() && self.tiers[tier].spec.write != Write::Never
    }

    pub(super) fn departure(&self, tier: TierId) -> Departure {
        if self.writes(tier) { Departure::Demote } else { Departure::Drop }
    }

    /// The layers that leave next from what a tier holds of a block.
    pub(super) fn next_out(&self, tier: TierId, block: BlockId, have: Layers) -> Layers {
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

    /// Blocks of the shortest session through a block; before any is seen, of the one that passed
    /// through it when it was stored.
    pub(super) fn session_blocks(&self, block: BlockId) -> Option<u32> {
        let stored = self.node(block).session_blocks;
        self.sessions.shortest(block).or((stored > 0).then_some(stored))
    }

    /// What ranks a block on a tier that holds `have` of it.
    pub(super) fn facts(&self, tier: TierId, block: BlockId, have: Layers) -> Facts {
        let (depth, node) = (self.blocks.trie().depth(block), self.node(block));
        let tokens = u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
        let out = self.next_out(tier, block, have);
        let single = self.tiers[tier].spec.layer_slots && out.len() == 1;
        let policy = self.tiers[tier].eviction.policy();
        let sessions = policy.sessions().then(|| self.session_blocks(block)).flatten();
        Facts {
            id: block,
            context: u64::from(depth) * tokens,
            start: if policy.turns() {
                u64::from(self.blocks.trie().start(block)) * tokens
            } else {
                0
            },
            block: depth,
            session_blocks: sessions.unwrap_or(depth + 1),
            uses: node.uses,
            access: if policy.ages_by_session() {
                self.ages.last_use(block).unwrap_or(node.access)
            } else {
                node.access
            },
            layers: have,
            model_layers: self.settings.layers,
            layer: single.then_some(out.lo),
            // The source document weighs every layer as if it were demoted.
            departure: match self.settings.drop_order {
                DropOrder::Seed => Departure::Demote,
                DropOrder::Shallow => self.departure(tier),
            },
            price: self.price(block),
            reload: if policy.restores() { self.reload(tier) } else { Reload::default() },
        }
    }

    /// How long the blocks of a tier take to load, on idle lanes, from there and from where they go.
    pub(super) fn reload(&self, tier: TierId) -> Reload {
        let bytes = self.settings.layer_bytes * u64::from(self.settings.layers);
        let time = |tier: TierId| self.lanes.takes(self.tiers[tier].read, bytes);
        Reload {
            tokens: u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight),
            here: if tier == 0 { 0 } else { time(tier) },
            below: self.writes(tier).then(|| time(tier + 1)),
        }
    }

    pub(super) fn entry(&self, tier: TierId, block: BlockId, have: Layers) -> Entry {
        let facts = self.facts(tier, block, have);
        let tie = match self.structure(block) {
            Structure::LeafOnly => u32::MAX - facts.block,
            Structure::Holes => facts.block,
        };
        self.tiers[tier].eviction.entry(&facts, tie, &self.settings.cost)
    }

    /// Whether a block may be chosen as victim on a tier.
    pub(super) fn evictable(&self, tier: TierId, block: BlockId) -> bool {
        let here = self.residency(tier, block);
        let node = *self.node(block);
        let settled = matches!(here.state, State::Resident | State::Bad) && here.busy == 0;
        settled
            && self.tiers[tier].spec.owner != Owner::Engine
            && (tier > 0 || node.refs == 0)
            && (self.structure(block) == Structure::Holes
                || !self
                    .blocks
                    .trie()
                    .children(block)
                    .any(|child| self.residency(tier, child).state != State::Absent))
    }

    /// Prefetches the CPU cache lines of a block's residencies on all tiers.
    pub(super) fn prefetch_residencies(&self, block: BlockId) {
        (0..self.tiers.len()).for_each(|tier| self.blocks.table(tier).prefetch_line(block));
    }

    /// Consecutive blocks of a path, run by run.
    pub(super) fn runs(&self, path: &[BlockId]) -> Runs {
        self.blocks.trie().along(path).map(|(run, _)| run).collect()
    }

    /// The blocks of a run that may have an entry on a tier. Where something of all of a leaf-only
    /// run is there, only the last one may have nothing behind it.
    pub(super) fn edge(
        &self,
        tier: TierId,
        run: Range<BlockId>,
        structure: Structure,
    ) -> Range<BlockId> {
        let (all, here) = (self.holds_all(tier), &self.blocks.table(tier));
        if !all && here.none_present(run.clone()) {
            return run.end..run.end;
        }
        if structure == Structure::LeafOnly && (all || here.all_present(run.clone())) {
            return run.end - 1..run.end;
        }
        run
    }

    /// Brings the retention entries of a block in line with its state. Called after any change of
    /// residency, lease, access or price.
    pub(super) fn refresh(&mut self, block: BlockId) {
        for tier in 0..self.tiers.len() {
            self.refresh_on(tier, block);
        }
    }

    pub(super) fn refresh_on(&mut self, tier: TierId, block: BlockId) {
        let alive = self.blocks.trie().alive(block);
        let known = self.tiers[tier].eviction.get(block);
        if known.is_none() && tier == 0 && alive && self.node(block).refs > 0 {
            return;
        }
        let wanted = (alive && self.evictable(tier, block))
            .then(|| self.entry(tier, block, self.residency(tier, block).have));
        if known.is_none() && wanted.is_none() {
            return;
        }
        let band = self.band(tier, block);
        if known != wanted || (known.is_some() && self.tiers[tier].eviction.band(block) != band) {
            let index = &mut self.tiers[tier].eviction;
            if known.is_some() {
                index.unlink(block);
            }
            if let Some(entry) = wanted {
                index.link(entry, band);
            }
        }
    }

    /// After a block's presence on a tier changed: its own entry and its parent's.
    pub(super) fn residency_changed(&mut self, tier: TierId, block: BlockId) {
        self.on_change(tier, block);
        self.attend(tier, block);
        self.refresh_on(tier, block);
        if let Some(parent) = self.blocks.trie().parent(block) {
            self.refresh_on(tier, parent);
        }
    }

    /// A request uses the blocks of a path at `now`.
    pub(super) fn touch(&mut self, path: &[BlockId], now: Nanos) {
        let mut runs = Runs::new();
        // What is leased has no entry on the first tier.
        let single = self.tiers.len() == 1;
        self.blocks.change_values(path, |run, node| {
            node.access = stamp(now);
            node.uses = node.uses.saturating_add(1);
            if node.refs == 0 || !single {
                runs.push(run);
            }
        });
        self.refused.used(path);
        if self.feed.watched {
            for &block in path {
                self.on_hit(block);
            }
        }
        self.used_again(path);
        self.refresh_runs(runs);
    }

    /// Brings the entries of consecutive blocks of a path in line.
    pub(super) fn refresh_path(&mut self, path: &[BlockId]) {
        self.refresh_runs(self.runs(path));
    }

    /// The same for runs, looking at their ends only where no other block can have an entry.
    fn refresh_runs(&mut self, runs: Runs) {
        let Some(first) = runs.first() else { return };
        let structure = self.structure(first.start);
        for run in runs {
            let first = usize::from(self.node(run.start).refs > 0);
            self.refresh_from(first, run, structure);
        }
    }

    /// The same for a run on all tiers from one on.
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
        }
    }

    /// Blocks that are not known, one behind the other, the first behind `parent`; `path` gets them.
    /// `node` says what they have in common, but for the uses of former lives.
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
        self.await_prices(&path[known..]);
        self.grant_new(node.scope, parent, &path[known..]);
    }

    fn extend_trie(
        &mut self,
        node: Node,
        parent: Option<BlockId>,
        tokens: &[Token],
        path: &mut Vec<BlockId>,
    ) {
        let Known { root, seed, .. } = *self.scopes.get(node.scope);
        let known = path.len();
        if self.feed.has_ghosts() {
            let (mut rest, mut behind) = (tokens, parent);
            // Blocks that were used equally often go together.
            for (blocks, uses) in self.uses_before_eviction(seed, parent, tokens) {
                let (now, later) = rest.split_at(blocks * self.block_tokens());
                let node = Node { uses: node.uses + uses, ..node };
                self.blocks.extend(root, behind, now, node, path);
                (rest, behind) = (later, path.last().copied());
            }
        } else {
            self.blocks.extend(root, parent, tokens, node, path);
        }
        if self.feed.wants_inserts() {
            let mut tags = self.blocks.trie().tags(seed, parent);
            let mut before = parent;
            for &block in &path[known..] {
                self.feed.on_insert(before, block, tags.next(self.blocks.trie().tokens(block)));
                before = Some(block);
            }
        }
    }

    /// How often blocks that come were used in a former life: so many one after the other, so often.
    fn uses_before_eviction(
        &mut self,
        seed: u64,
        parent: Option<BlockId>,
        tokens: &[Token],
    ) -> SmallVec<[(usize, u32); 8]> {
        let mut former: SmallVec<[(usize, u32); 8]> = SmallVec::new();
        let mut add = |blocks: usize, uses: u32| match former.last_mut() {
            Some((known, alike)) if *alike == uses => *known += blocks,
            _ => former.push((blocks, uses)),
        };
        let slices = self
            .blocks
            .trie()
            .slices(seed, parent, tokens)
            .inspect(|slice| self.feed.prefetch_line(slice));
        let slices: SmallVec<[GroupSlice; 8]> = slices.collect();
        for slice in slices {
            self.feed.recall(&slice, &mut add);
        }
        former
    }

    /// Where the last copy of a leaf-only block was lost to a failure, what stands behind it
    /// serves nobody any more: it goes too, now or when the moves that touch it have ended.
    pub(super) fn sweep(&mut self, block: BlockId) {
        let lost = self.blocks.trie().alive(block)
            && self.structure(block) == Structure::LeafOnly
            && self.node(block).refs == 0
            && !self.missing(block).is_empty();
        if !lost {
            return;
        }
        for &block in self.subtree(block).iter().rev() {
            for tier in 0..self.tiers.len() {
                let moving = self.arrival(tier, block).is_some_and(|a| !a.moves.is_empty());
                if self.residency(tier, block).busy == 0 && !moving {
                    self.drop_copy(tier, block, Cause::Failed);
                }
            }
            self.prune(block);
        }
    }

    /// A block and all that stands behind it, parents before children.
    pub(super) fn subtree(&self, block: BlockId) -> Vec<BlockId> {
        let mut below = vec![block];
        let mut at = 0;
        while let Some(&next) = below.get(at) {
            below.extend(self.blocks.trie().children(next));
            at += 1;
        }
        below
    }

    /// Removes nodes that hold nothing and that nothing needs, from `block` upwards.
    pub(super) fn prune(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(block) = next {
            if !self.blocks.trie().alive(block) {
                return;
            }
            let held = (0..self.tiers.len())
                .any(|tier| self.residency(tier, block).state != State::Absent);
            if held
                || self.node(block).refs > 0
                || self.blocks.trie().children(block).next().is_some()
            {
                return;
            }
            next = self.blocks.trie().parent(block);
            let slices = self.slices_leaving(std::iter::once(block..block + 1));
            self.strike(block..block + 1, next);
            self.remember(&slices);
        }
    }

    /// What is to be remembered of the last blocks of runs, which are about to leave the trie, the
    /// last one first: whoever leaves later is remembered longer.
    pub(super) fn slices_leaving(&self, runs: impl Iterator<Item = Range<BlockId>>) -> GroupSlices {
        let mut all = GroupSlices::new();
        if !self.feed.keeps_ghosts() {
            return all;
        }
        for blocks in runs {
            let Node { scope, uses, .. } = *self.node(blocks.start);
            let (seed, before) =
                (self.scopes.get(scope).seed, self.blocks.trie().parent(blocks.start));
            let first = all.len();
            for slice in
                self.blocks.trie().slices(seed, before, self.blocks.trie().tokens_of(blocks))
            {
                self.feed.prefetch_line(&slice);
                all.push((slice, uses));
            }
            all[first..].reverse();
        }
        all
    }

    /// Remembers blocks that left the trie.
    pub(super) fn remember(&mut self, slices: &GroupSlices) {
        for (slice, uses) in slices {
            self.feed.remember(slice, *uses);
        }
    }

    /// Removes the last blocks of a run, which hold nothing, have nothing behind them and are
    /// remembered, and then what nothing needs any more before them.
    pub(super) fn forget(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        self.strike(blocks, before);
        if let Some(before) = before {
            self.prune(before);
        }
    }

    fn strike(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        self.forget_beside(blocks.clone(), before);
        let first = before.is_none().then(|| self.node(blocks.start).scope);
        self.scopes.digests.free(self.blocks.trie().tokens_of(blocks.clone()));
        self.blocks.remove_tail(blocks.end - 1, blocks.end - blocks.start);
        if let Some(scope) = first {
            self.scopes.emptied(scope);
        }
    }

    /// What tables beside the trie say of blocks that leave it.
    fn forget_beside(&mut self, blocks: Range<BlockId>, before: Option<BlockId>) {
        let silent = self.sessions.is_empty()
            && self.keys.is_empty()
            && self.refused.is_empty()
            && self.hints.silent()
            && self.prices.silent()
            && self.ages.is_empty();
        if silent {
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
        }
    }
}
