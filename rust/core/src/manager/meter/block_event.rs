//! Block events: which layers of which block arrived on a tier or left it, by content key, for a
//! directory of several machines.
//!
//! Invariants: replayed in order they give the valid layers of every copy, whichever way it came or
//! went; a copy that is leaving counts as gone. Those of one time that are taken together are its
//! net effect: copies that left, children before parents, then copies that arrived, parents before
//! children. Cost: none but a branch per call and verb where none are kept; else mostly one hash per
//! block, and O(n log n) per time.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::block::{Handle, Layers, Place, TierId, Token};
use crate::error::Result;
use crate::manager::Manager;
use crate::record::BlockKey;
use crate::residency::Change;
use crate::time::Nanos;

/// Kind of a block event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockEventKind {
    /// Layers became valid on a tier.
    Stored,
    /// Layers are valid on a tier no more.
    Removed,
}

impl BlockEventKind {
    /// The name users read.
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
    /// Its place among all block events of the manager, from 0 on: a gap shows that some were
    /// overwritten.
    pub number: u64,
    /// Time.
    pub at: Nanos,
    /// Whether the layers arrived or left.
    pub kind: BlockEventKind,
    /// Block.
    pub block: Handle,
    /// Its content key.
    pub key: BlockKey,
    /// Content key of the block before it; of its scope for a first block.
    pub parent: BlockKey,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Tier.
    pub tier: TierId,
    /// Group of layers.
    pub group: u8,
    /// Layers; they count within the group.
    pub layers: Layers,
}

/// A change whose block has a name.
#[derive(Debug)]
struct NamedChange {
    block: Handle,
    depth: u32,
    key: BlockKey,
    parent: BlockKey,
    tokens: Vec<Token>,
    tier: TierId,
    group: u8,
    before: Layers,
    after: Layers,
}

/// The queue of block events.
#[derive(Debug, Default)]
pub(crate) struct BlockEvents {
    /// Changes of the latest time.
    open: Vec<NamedChange>,
    queue: VecDeque<BlockEvent>,
    next: u64,
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

    /// Gives changed blocks their names, while they are in the trie.
    pub(crate) fn name_changes(&mut self) {
        if self.settings.block_events == 0 {
            return;
        }
        for change in self.blocks.take_changes() {
            self.name_change(change);
        }
    }

    fn name_change(&mut self, Change { tier, block, group, before, after }: Change) {
        let above = self.trie().parent(block).map(|parent| self.key(parent));
        let record = self.record_behind(block, above);
        let key = self.keys.get(block).unwrap_or_else(|| {
            let key = record.key();
            self.keys.put(block, self.trie().depth(block), key);
            key
        });
        let (handle, depth) = (self.trie().handle(block), self.trie().depth(block));
        let (parent, tokens) = (record.parent, record.tokens);
        let block = handle;
        let named = NamedChange { block, depth, key, parent, tokens, tier, group, before, after };
        self.block_events.open.push(named);
    }

    /// The changes so far become events, at their time, before it passes.
    pub(crate) fn pass_block_events(&mut self, now: Nanos) {
        self.name_changes();
        // Bounds memory for a caller that passes the same time and takes no events.
        let full = self.block_events.open.len() > self.settings.block_events;
        if now > self.clock.last() || full {
            self.end_block_events();
        }
    }

    fn end_block_events(&mut self) {
        self.name_changes();
        let (at, most) = (self.clock.last(), self.settings.block_events);
        self.block_events.end(at, most);
    }

    /// Everything leaves by `reset`.
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

impl BlockEvents {
    fn end(&mut self, at: Nanos, most: usize) {
        if self.open.is_empty() {
            return;
        }
        let mut net: Vec<NamedChange> = Vec::with_capacity(self.open.len());
        let mut known: FxHashMap<(TierId, u8, Handle), usize> = FxHashMap::default();
        for change in self.open.drain(..) {
            let name = (change.tier, change.group, change.block);
            let place = *known.entry(name).or_insert(net.len());
            match net.get_mut(place) {
                Some(first) => first.after = change.after,
                None => net.push(change),
            }
        }
        // No block changes twice now, so any order of them is right.
        net.sort_by_key(|change| change.depth);
        for change in net.iter_mut().rev() {
            for layers in behind(change.before, change.after) {
                self.push(change, BlockEventKind::Removed, layers, at, most);
            }
        }
        for change in &mut net {
            for layers in behind(change.after, change.before) {
                self.push(change, BlockEventKind::Stored, layers, at, most);
            }
        }
    }

    fn push(
        &mut self,
        change: &mut NamedChange,
        kind: BlockEventKind,
        layers: Layers,
        at: Nanos,
        most: usize,
    ) {
        if self.queue.len() == most {
            self.queue.pop_front();
        }
        let NamedChange { block, key, parent, tier, group, before, after, .. } = *change;
        // A copy that comes or goes as a whole is one event, which may have its tokens.
        let whole = before.is_empty() || after.is_empty();
        let tokens = if whole { std::mem::take(&mut change.tokens) } else { change.tokens.clone() };
        let number = self.next;
        self.next += 1;
        self.queue.push_back(BlockEvent {
            number,
            at,
            kind,
            block,
            key,
            parent,
            tokens,
            tier,
            group,
            layers,
        });
    }
}

/// The layers of one range that another lacks: below it and above it.
fn behind(these: Layers, others: Layers) -> impl Iterator<Item = Layers> {
    let parts = if others.is_empty() {
        [these, Layers::NONE]
    } else {
        let (below, above) = (others.lo.min(these.hi), others.hi.max(these.lo));
        [Layers::new(these.lo, below), Layers::new(above, these.hi)]
    };
    parts.into_iter().filter(|part| !part.is_empty())
}
