//! Block events: arrivals and removals of block layers on tiers, by content key, for a directory of
//! several machines.
//!
//! Invariants: replayed in order, the events give the valid layers of every copy. A leaving copy
//! counts as removed. Events of equal time taken together are the net effect: removed copies,
//! children before parents, then stored copies, parents before children. Cost: a branch per call
//! without an event queue. Otherwise mostly a hash per block, and O(n log n) per distinct time.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::block::{BlockId, Handle, Layers, Place, TierId, Token};
use crate::error::Result;
use crate::manager::Manager;
use crate::manager::keys::BlockName;
use crate::record::BlockKey;
use crate::residency::Change;
use crate::scope::Whose;
use crate::time::Nanos;

/// Tokens of a block.
pub type BlockTokens = SmallVec<[Token; 16]>;

/// Kind of a block event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockEventKind {
    /// Layers became valid on a tier.
    Stored,
    /// Layers are no longer valid on a tier.
    Removed,
}

impl BlockEventKind {
    /// Name of the kind in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Removed => "removed",
        }
    }
}

/// Event: layers of a block arrived on a tier, or left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Position among all block events of the manager, starting at 0. A gap shows lost events.
    pub number: u64,
    /// Time.
    pub at: Nanos,
    /// Whether the layers arrived or left.
    pub kind: BlockEventKind,
    /// Block.
    pub block: Handle,
    /// Its content key.
    pub key: BlockKey,
    /// Content key of the parent block, or of the scope for a first block.
    pub parent: BlockKey,
    /// Whether the block is the first of a sequence.
    pub first: bool,
    /// Tokens of a stored block. Empty for a removal.
    pub tokens: BlockTokens,
    /// Owner of a stored block's scope, if the scope has an adapter.
    pub owner: Option<Whose>,
    /// Whether the block belongs to a tenant, or the path up to it has a digest. An index that
    /// matches by tokens would find it for different content.
    pub private: bool,
    /// Tier.
    pub tier: TierId,
    /// Group of layers.
    pub group: u8,
    /// Layers, counted within the group.
    pub layers: Layers,
    /// Whether the copy became complete by this event, or was complete before it.
    pub whole: bool,
}

/// Change of a copy, with the name of its block, because the block may leave the trie.
#[derive(Debug)]
struct NamedChange {
    change: Change,
    handle: Handle,
    depth: u32,
    name: BlockName,
    /// Key of the parent block, or of the scope.
    parent: BlockKey,
}

/// The queue of block events.
#[derive(Debug, Default)]
pub(crate) struct BlockEvents {
    /// Changes of the latest time.
    open: Vec<NamedChange>,
    queue: VecDeque<BlockEvent>,
    pub(super) next: u64,
}

impl Manager {
    /// Takes the block events since the last call.
    ///
    /// # Errors
    /// [`crate::error::Error::Closed`] or [`crate::error::Error::Invariant`].
    pub fn take_block_events(&mut self) -> Result<Vec<BlockEvent>> {
        self.open()?;
        self.end_block_events();
        Ok(self.block_events.queue.drain(..).collect())
    }

    /// Records the names of changed blocks while they are in the trie.
    pub(crate) fn name_changes(&mut self) {
        if self.settings.block_events == 0 {
            return;
        }
        for change in self.blocks.take_changes() {
            self.name_change(change);
        }
    }

    fn name_change(&mut self, change: Change) {
        let (block, above) = (change.block, self.trie().parent(change.block));
        let above = above.map(|parent| self.name(parent));
        let name = self.keys.get(block).unwrap_or_else(|| {
            let name = self.name_under(block, above);
            self.keys.put(block, self.trie().depth(block), name);
            name
        });
        let parent = above.map_or_else(|| self.scope_key_of(block), |above| above.key);
        let (handle, depth) = (self.trie().handle(block), self.trie().depth(block));
        self.block_events.open.push(NamedChange { change, handle, depth, name, parent });
    }

    /// Owner of a block's scope, if the scope has an adapter.
    pub(super) fn adapter_owner(&self, block: BlockId) -> Option<Whose> {
        self.scopes.get(self.node(block).scope).whose.with_adapter()
    }

    /// All layers of a group. The layers of a group after the first come and go together.
    pub(super) fn layers_of(&self, group: u8, valid: Layers) -> Layers {
        if group == 0 { self.all_layers() } else { valid }
    }

    /// Turns the changes so far into events at their time, before the time passes.
    pub(crate) fn pass_block_events(&mut self, now: Nanos) {
        self.name_changes();
        // Limits memory for a caller that passes equal times and takes no events.
        let full = self.block_events.open.len() > self.settings.block_events;
        if now > self.clock.last() || full {
            self.end_block_events();
        }
    }

    pub(super) fn end_block_events(&mut self) {
        self.name_changes();
        if self.block_events.open.is_empty() {
            return;
        }
        let mut changes = std::mem::take(&mut self.block_events.open);
        let net = net(&mut changes);
        for &at in net.iter().rev() {
            self.queue_block_events(&changes[at], BlockEventKind::Removed);
        }
        for &at in &net {
            self.queue_block_events(&changes[at], BlockEventKind::Stored);
        }
        changes.clear();
        self.block_events.open = changes;
    }

    /// Queues the events of a kind for a change.
    fn queue_block_events(&mut self, named: &NamedChange, kind: BlockEventKind) {
        let NamedChange { change, handle: block, depth, name, parent } = *named;
        let Change { tier, group, before, after, .. } = change;
        let (more, less) = match kind {
            BlockEventKind::Stored => (after, before),
            BlockEventKind::Removed => (before, after),
        };
        let whole = more == self.layers_of(group, more);
        let mut parts = layers_outside(more, less).peekable();
        while let Some(layers) = parts.next() {
            // A present copy has a block in the trie.
            let (tokens, owner) = match kind {
                BlockEventKind::Stored => {
                    (self.real_tokens(change.block), self.adapter_owner(change.block))
                }
                BlockEventKind::Removed => (BlockTokens::new(), None),
            };
            let events = &mut self.block_events;
            if events.queue.len() == self.settings.block_events {
                events.queue.pop_front();
            }
            events.queue.push_back(BlockEvent {
                number: events.next,
                at: self.clock.last(),
                kind,
                block,
                key: name.key,
                parent,
                first: depth == 0,
                tokens,
                owner,
                private: name.private,
                tier,
                group,
                layers,
                whole: whole && parts.peek().is_none(),
            });
            events.next += 1;
        }
    }

    /// Tokens of a block, with digest numbers replaced by tokens.
    pub(super) fn real_tokens(&self, block: BlockId) -> BlockTokens {
        let (digests, tokens) = (&self.scopes.digests, self.trie().tokens(block));
        if digests.is_empty() {
            return BlockTokens::from_slice(tokens);
        }
        let real = |&token: &Token| digests.pair(token).map_or(token, |pair| pair.0);
        tokens.iter().map(real).collect()
    }

    /// Records the removal of all copies by `reset`.
    pub(crate) fn note_reset(&mut self) {
        if self.settings.block_events == 0 {
            return;
        }
        self.end_block_events();
        for block in self.living().collect::<Vec<_>>() {
            for tier in 0..self.tiers.len() {
                for group in 0..self.points.other_numbers().end {
                    let before = self.residency(Place::new(tier, group), block).usable();
                    let (group, after) = (u8::try_from(group).expect("few groups"), Layers::NONE);
                    self.name_change(Change { tier, block, group, before, after });
                }
            }
        }
        self.end_block_events();
    }
}

/// Computes the net effect of the changes of a time. Returns the index of each copy's first change,
/// ordered by depth, and gives this change the layers after the copy's last change.
fn net(changes: &mut [NamedChange]) -> Vec<usize> {
    let place = |(at, named): (usize, &NamedChange)| {
        let Change { tier, group, .. } = named.change;
        (named.depth, named.handle.0, tier, group, at)
    };
    let mut order: Vec<_> = changes.iter().enumerate().map(place).collect();
    order.sort_unstable();
    let same = |one: &(u32, u64, TierId, u8, usize), next: &(u32, u64, TierId, u8, usize)| {
        (one.1, one.2, one.3) == (next.1, next.2, next.3)
    };
    let mut net = Vec::with_capacity(order.len());
    for of_copy in order.chunk_by(same) {
        let (first, last) = (of_copy[0].4, of_copy[of_copy.len() - 1].4);
        changes[first].change.after = changes[last].change.after;
        net.push(first);
    }
    net
}

/// The layers of `these` missing in `others`: below them and above them.
fn layers_outside(these: Layers, others: Layers) -> impl Iterator<Item = Layers> {
    let parts = if others.is_empty() {
        [these, Layers::NONE]
    } else {
        let (below, above) = (others.lo.min(these.hi), others.hi.max(these.lo));
        [Layers::new(these.lo, below), Layers::new(above, these.hi)]
    };
    parts.into_iter().filter(|part| !part.is_empty())
}
