//! One block among its kin: what ranks it, whether it may leave, when it is gone.
//!
//! Invariant: after every change `refresh` has brought the retention entries in line with the
//! block's state. Cost: O(tiers · log n) per refresh; in leaf-only scopes plus the children looked
//! at until one is found.

use crate::block::{BlockId, Departure, Layers, Structure, TierId, Token};
use crate::policy::{Entry, Facts};
use crate::scope::ScopeId;
use crate::tier::{Owner, Residency, State, Write};
use crate::time::{Nanos, Stamp, stamp};

use super::Manager;
use super::meter::Cause;
use super::settings::DropOrder;

/// What every block carries beside its residencies.
#[derive(Clone, Copy, Debug, Default)]
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

impl Manager {
    /// The layers of a block that stand or will stand on a tier.
    pub(super) fn expected(&self, tier: TierId, block: BlockId) -> Layers {
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
    pub(super) fn stuck(&self, tier: TierId, block: BlockId) -> bool {
        self.arriving.get(&(tier, block)).is_some_and(|arrival| arrival.failed)
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
        let stored = self.nodes[block as usize].session_blocks;
        self.sessions.shortest(block).or((stored > 0).then_some(stored))
    }

    /// What ranks a block on a tier that holds `have` of it.
    pub(super) fn facts(&self, tier: TierId, block: BlockId, have: Layers) -> Facts {
        let depth = self.trie.depth(block);
        let tokens = u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
        let out = self.next_out(tier, block, have);
        let single = self.tiers[tier].spec.layer_slots && out.len() == 1;
        Facts {
            id: block,
            context: u64::from(depth) * tokens,
            start: u64::from(self.trie.start(block)) * tokens,
            block: depth,
            session_blocks: self.session_blocks(block).unwrap_or(depth + 1),
            uses: self.nodes[block as usize].uses,
            access: self.nodes[block as usize].access,
            layers: have,
            model_layers: self.settings.layers,
            layer: single.then_some(out.lo),
            // The source document weighs every layer as if it were demoted.
            departure: match self.settings.drop_order {
                DropOrder::Seed => Departure::Demote,
                DropOrder::Shallow => self.departure(tier),
            },
        }
    }

    pub(super) fn entry(&self, tier: TierId, block: BlockId, have: Layers) -> Entry {
        let facts = self.facts(tier, block, have);
        let tie = match self.structure(block) {
            Structure::LeafOnly => u32::MAX - facts.block,
            Structure::Holes => facts.block,
        };
        self.tiers[tier].retention.entry(&facts, tie, &self.settings.cost)
    }

    /// Whether a block may be chosen as victim on a tier.
    pub(super) fn evictable(&self, tier: TierId, block: BlockId) -> bool {
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
    pub(super) fn refresh(&mut self, block: BlockId) {
        for tier in 0..self.tiers.len() {
            self.refresh_on(tier, block);
        }
    }

    pub(super) fn refresh_on(&mut self, tier: TierId, block: BlockId) {
        let known = self.tiers[tier].retention.get(block);
        if known.is_none() && tier == 0 && self.nodes[block as usize].refs > 0 {
            return;
        }
        let wanted = (self.trie.alive(block) && self.evictable(tier, block))
            .then(|| self.entry(tier, block, self.residency(tier, block).have));
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
    pub(super) fn presence_changed(&mut self, tier: TierId, block: BlockId) {
        self.recount(block);
        self.notice(tier, block);
        self.refresh_on(tier, block);
        if let Some(parent) = self.trie.parent(block) {
            self.refresh_on(tier, parent);
        }
    }

    pub(super) fn touch(&mut self, block: BlockId, now: Nanos, used: bool) {
        let node = &mut self.nodes[block as usize];
        node.access = stamp(now);
        node.uses = node.uses.saturating_add(u32::from(used));
        self.refused.used(block);
        if used {
            self.notice_use(block);
        }
        self.refresh(block);
    }

    pub(super) fn new_node(
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
            self.meter.grow(bound);
            for tier in &mut self.tiers {
                tier.here.resize(bound, Residency::default());
            }
        }
        let uses = 1 + self.told.meet(scope, parent, block, self.trie.tokens(block));
        self.nodes[block as usize] =
            Node { scope, refs: 0, uses, access: stamp(now), session_blocks: 0 };
        block
    }

    /// Where the last copy of a leaf-only block was lost to a failure, what stands behind it
    /// serves nobody any more: it goes too, now or when the moves that touch it have ended.
    pub(super) fn sweep(&mut self, block: BlockId) {
        let lost = self.trie.alive(block)
            && self.structure(block) == Structure::LeafOnly
            && self.nodes[block as usize].refs == 0
            && !self.missing(block).is_empty();
        if !lost {
            return;
        }
        for &block in self.subtree(block).iter().rev() {
            for tier in 0..self.tiers.len() {
                let moving = self.arriving.get(&(tier, block)).is_some_and(|a| !a.moves.is_empty());
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
            below.extend(self.trie.children(next));
            at += 1;
        }
        below
    }

    /// Removes nodes that hold nothing and that nothing needs, from `block` upwards.
    pub(super) fn prune(&mut self, block: BlockId) {
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
            self.told.forget(block, self.nodes[block as usize].uses);
            self.sessions.forget(block, next);
            self.keys.remove(&block);
            self.refused.forget(block);
            self.trie.remove(block);
        }
    }
}
