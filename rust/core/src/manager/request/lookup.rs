//! The pure probe: what is known of a sequence, without a pin and without a refresh.
//!
//! Invariant: nothing changes. Cost: O(tokens) for the comparison, O(blocks) for the report.

use crate::block::{BlockId, Handle, Layers, Slot, Structure, TierId, Token};
use crate::error::Result;
use crate::scope::{Scope, ScopeId};
use crate::tier::State;
use crate::time::Nanos;
use crate::trie::Query;

use crate::manager::Manager;

/// One copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Where.
    pub tier: TierId,
    /// In which slot; with layer slots that of its first layer.
    pub slot: Slot,
    /// The layers that are valid now.
    pub layers: Layers,
    /// The layers that will be valid at `ready`.
    pub coming: Layers,
    /// When the first of the coming layers is expected; now if it is there.
    pub first: Nanos,
    /// When all of it is expected; now if it is there.
    pub ready: Nanos,
    /// Whether it was chosen to leave: it is valid until the store that reads it has ended.
    pub leaving: bool,
}

/// A block of a match with its copies, fastest tier first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedBlock {
    /// Which block.
    pub block: Handle,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Its copies; none for a hole.
    pub copies: Vec<Copy>,
}

/// The longest usable prefix of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// How many tokens of the sequence it covers.
    pub tokens: usize,
    /// Its blocks in logical order.
    pub blocks: Vec<MatchedBlock>,
}

impl Manager {
    /// The longest prefix of `tokens` in which every block is resident, arriving or, in a
    /// hole-tolerant scope, recomputable. At least `keep` tokens stay uncovered.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] for a scope with another structure than at its first use.
    pub fn lookup(
        &self,
        tokens: &[Token],
        now: Nanos,
        scope: &Scope,
        keep: usize,
    ) -> Result<Match> {
        let blocks = self.probe(Query::Tokens(tokens), scope, keep)?;
        Ok(Match {
            tokens: blocks.len() * self.block_tokens(),
            blocks: self.describe(&blocks, now),
        })
    }

    /// The blocks that a lookup covers, without the report of every one.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
    pub fn probe(&self, asked: Query<'_>, scope: &Scope, keep: usize) -> Result<Vec<Handle>> {
        Ok(self.blocks.trie().handles(&self.known_path(asked, scope, keep)?))
    }

    /// What is known of blocks. One that is gone has no tokens and no copies.
    #[must_use]
    pub fn describe(&self, blocks: &[Handle], now: Nanos) -> Vec<MatchedBlock> {
        let now = self.clock.read(now);
        let of = |&block: &Handle| match self.blocks.trie().resolve(block) {
            Some(id) => {
                let tokens = self.blocks.trie().tokens(id).to_vec();
                MatchedBlock { block, tokens, copies: self.copies(id, now) }
            }
            None => MatchedBlock { block, tokens: Vec::new(), copies: Vec::new() },
        };
        blocks.iter().map(of).collect()
    }

    /// The slots of a copy: the one of all layers, or with layer slots that of each of its
    /// coming layers.
    #[must_use]
    pub fn copy_slots(&self, block: Handle, copy: &Copy) -> Vec<Slot> {
        let Some(block) = self.blocks.trie().resolve(block) else { return Vec::new() };
        if self.tiers[copy.tier].spec.layer_slots {
            let leaving = self.leaving(copy.tier, block);
            let slot = |layer| match Self::leaving_slot(&leaving, layer) {
                Some(slot) if copy.leaving => slot,
                _ => self.slot_of(copy.tier, block, layer),
            };
            copy.coming.iter().map(slot).collect()
        } else {
            vec![copy.slot]
        }
    }

    /// How many tokens of a sequence a lookup covers, without the report of every block.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
    pub fn matched(&self, tokens: &[Token], scope: &Scope, keep: usize) -> Result<usize> {
        Ok(self.known_path(Query::Tokens(tokens), scope, keep)?.len() * self.block_tokens())
    }

    fn known_path(&self, asked: Query<'_>, scope: &Scope, keep: usize) -> Result<Vec<BlockId>> {
        self.open()?;
        if self.scopes.digests.plain(scope) {
            let id = self.scopes.find(scope)?;
            return Ok(id.map_or_else(Vec::new, |id| self.path(id, asked, keep, 0)));
        }
        let tokens = asked.tokens();
        self.scopes.digests.check(scope, &tokens)?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, &tokens);
        Ok(self.path(id, Query::Tokens(&content), keep, 0))
    }

    /// The blocks of the longest usable prefix, with room for those of so many tokens behind them.
    pub(in crate::manager) fn path(
        &self,
        scope: ScopeId,
        asked: Query<'_>,
        keep: usize,
        beyond: usize,
    ) -> Vec<BlockId> {
        let known = self.scopes.get(scope);
        let usable = asked.len().saturating_sub(keep);
        // However much is asked for, no more is found than there is.
        let found = (usable / self.block_tokens()).min(self.blocks.trie().len());
        let mut path = Vec::with_capacity(found + beyond / self.block_tokens() + 1);
        self.blocks.trie().walk(known.root, asked.first(usable), &mut path);
        if known.structure == Structure::LeafOnly {
            path.truncate(self.whole(&path));
        } else {
            while path.last().is_some_and(|&block| !self.useful(block)) {
                path.pop();
            }
        }
        path
    }

    /// How many blocks of a path stand or arrive somewhere, with all their layers, before the first
    /// that does not.
    fn whole(&self, path: &[BlockId]) -> usize {
        if (0..self.tiers.len()).any(|tier| self.holds_all(tier)) {
            return path.len();
        }
        let mut whole = 0;
        for run in self.runs(path) {
            if !(0..self.tiers.len())
                .any(|tier| self.blocks.table(tier).all_fully_resident(run.clone()))
            {
                let lacking = run.clone().find(|&block| !self.missing(block).is_empty());
                if let Some(lacking) = lacking {
                    return whole + (lacking - run.start) as usize;
                }
            }
            whole += run.len();
        }
        whole
    }

    /// Layers of a block that no tier holds or expects: the smallest range around them.
    pub(in crate::manager) fn missing(&self, block: BlockId) -> Layers {
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

    fn useful(&self, block: BlockId) -> bool {
        (0..self.tiers.len()).any(|tier| !self.expected(tier, block).is_empty())
    }

    fn copies(&self, block: BlockId, now: Nanos) -> Vec<Copy> {
        let mut copies = Vec::new();
        for tier in 0..self.tiers.len() {
            let here = self.residency(tier, block);
            let leaving = self.leaving(tier, block);
            if let Some(layers) = self.valid_with(tier, block, &leaving) {
                let slot = Self::leaving_slot(&leaving, layers.lo);
                let slot = slot.unwrap_or_else(|| self.slot_of(tier, block, layers.lo));
                let (first, ready) = (now, now);
                let coming = layers;
                copies.push(Copy { tier, slot, layers, coming, first, ready, leaving: true });
                continue;
            }
            if matches!(here.state, State::Absent | State::Bad) {
                continue;
            }
            let arrival = self.arrival(tier, block);
            let coming = self.expected(tier, block);
            copies.push(Copy {
                tier,
                slot: self.slot_of(tier, block, coming.lo),
                layers: here.have,
                coming,
                first: arrival.map_or(now, |arrival| arrival.first.max(now)),
                ready: arrival.map_or(now, |arrival| arrival.ready.max(now)),
                leaving: false,
            });
        }
        copies
    }
}
