//! Lookup: a read-only probe of the longest usable prefix.
//!
//! Invariant: nothing changes. Cost: O(tokens) for the comparison, O(blocks) for the report.

use crate::block::{BlockId, Handle, Layers, Place, Slot, Structure, TierId, Token};
use crate::error::Result;
use crate::group::longest;
use crate::scope::{Scope, ScopeId};
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::trie::Query;

use crate::manager::Manager;

/// Residency of a matched block on a tier, as reported to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Tier of the copy.
    pub tier: TierId,
    /// Group of layers.
    pub group: u8,
    /// Its slot. With layer slots, the slot of its first layer.
    pub slot: Slot,
    /// The currently valid layers.
    pub layers: Layers,
    /// The valid layers at `ready`.
    pub coming: Layers,
    /// Predicted time of the first arriving layer, or now if it is valid.
    pub first: Nanos,
    /// Predicted time of the last arriving layer, or now if all are valid.
    pub ready: Nanos,
    /// Whether it was evicted and stays valid until its write-back has ended.
    pub leaving: bool,
}

/// Block of a match with its copies, fastest tier first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedBlock {
    /// The block.
    pub block: Handle,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Its copies by tier, the first group's copy first. Empty for a hole.
    pub copies: Vec<Copy>,
}

/// Longest usable prefix of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Number of matched tokens of the sequence.
    pub tokens: usize,
    /// Its blocks in logical order.
    pub blocks: Vec<MatchedBlock>,
}

impl Manager {
    /// Finds the longest prefix of `tokens` in which every block is resident, arriving or, in a
    /// hole-tolerant scope, recomputable. At least `keep` tokens stay uncovered.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] for a scope with a different structure than at its first
    /// use.
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

    /// The matched blocks of a lookup, without their copies.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn probe(&self, query: Query<'_>, scope: &Scope, keep: usize) -> Result<Vec<Handle>> {
        Ok(self.trie().handles(&self.matched_path(query, scope, keep)?))
    }

    /// The tokens and copies of blocks. Empty for a block that left the trie.
    #[must_use]
    pub fn describe(&self, blocks: &[Handle], now: Nanos) -> Vec<MatchedBlock> {
        let now = self.clock.read(now);
        let of = |&block: &Handle| match self.trie().resolve(block) {
            Some(id) => {
                let tokens = self.trie().tokens(id).to_vec();
                MatchedBlock { block, tokens, copies: self.copies(id, now) }
            }
            None => MatchedBlock { block, tokens: Vec::new(), copies: Vec::new() },
        };
        blocks.iter().map(of).collect()
    }

    /// The slots of a copy: the slot of all layers, or with layer slots the slot of each arriving
    /// layer.
    #[must_use]
    pub fn copy_slots(&self, block: Handle, copy: &Copy) -> Vec<Slot> {
        let Some(block) = self.trie().resolve(block) else { return Vec::new() };
        // Groups have no layer slots.
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

    /// Number of tokens of a sequence matched by a lookup.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn matched(&self, tokens: &[Token], scope: &Scope, keep: usize) -> Result<usize> {
        Ok(self.matched_path(Query::Tokens(tokens), scope, keep)?.len() * self.block_tokens())
    }

    /// Number of leading blocks of a sequence with all layers valid now on any tiers, up to the
    /// last border resumable in every group. Arriving and leaving copies do not count.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn resident(&self, query: Query<'_>, scope: &Scope, keep: usize) -> Result<usize> {
        let path = self.matched_path(query, scope, keep)?;
        let front = self.resident_front(&path);
        let has = |after, place: u32| {
            let block = path[place as usize];
            let mut places = (0..self.tiers.len()).map(|tier| Place::new(tier, after + 1));
            places.any(|place| self.blocks.table(place).fully_resident(block))
        };
        let (most, points) = (u32::try_from(front).expect("fewer than 2^32 blocks"), &self.points);
        Ok(longest(&points.groups[1..], points.block_tokens, most, has) as usize)
    }

    /// Number of leading blocks of a path with all layers of the first group.
    fn resident_front(&self, path: &[BlockId]) -> usize {
        let tiers = || (0..self.tiers.len()).map(|tier| self.blocks.table(tier));
        let mut resident = 0;
        for run in self.runs(path) {
            // Usually a single tier has the full run, or its front.
            let full = tiers().map(|table| table.first_not_full(run.clone()));
            let full = full.max().unwrap_or(run.start);
            let lacking = (full..run.end).find(|&block| {
                let valid = |layer| tiers().any(|table| table.get(block).usable().contains(layer));
                !self.all_layers().iter().all(valid)
            });
            if let Some(lacking) = lacking {
                return resident + (lacking - run.start) as usize;
            }
            resident += run.len();
        }
        resident
    }

    /// Number of leading blocks with all layers valid on a tier now. Arriving and leaving copies do
    /// not count, nor do blocks that left the trie.
    #[must_use]
    pub fn resident_blocks(&self, blocks: &[Handle], tier: usize) -> usize {
        let (all, table) = (self.all_layers(), self.blocks.table(tier));
        let complete = |&&block: &&Handle| {
            self.trie().resolve(block).is_some_and(|id| table.get(id).usable() == all)
        };
        blocks.iter().take_while(complete).count()
    }

    /// Number of blocks of a path, after the first `skip`, up to the last border resumable from a
    /// tier in every group now. Arriving and leaving copies do not count.
    #[must_use]
    pub fn resumable_blocks(&self, blocks: &[Handle], skip: usize, tier: usize) -> usize {
        let front = skip + self.resident_blocks(&blocks[skip..], tier);
        let has = |after: usize, place: u32| {
            let table = self.blocks.table(Place::new(tier, after + 1));
            let block = self.trie().resolve(blocks[place as usize]);
            block.is_some_and(|block| table.fully_resident(block))
        };
        let (most, points) = (u32::try_from(front).expect("fewer than 2^32 blocks"), &self.points);
        let border = longest(&points.groups[1..], points.block_tokens, most, has) as usize;
        border.saturating_sub(skip)
    }

    /// The usable path of a query in a scope.
    fn matched_path(&self, query: Query<'_>, scope: &Scope, keep: usize) -> Result<Vec<BlockId>> {
        let mut path = self.known_path(query, scope, keep)?;
        self.cut_to_groups(&mut path);
        Ok(path)
    }

    /// The usable path of a query in a scope for the first group.
    fn known_path(&self, query: Query<'_>, scope: &Scope, keep: usize) -> Result<Vec<BlockId>> {
        self.open()?;
        // Without digests the query needs no copy of the tokens.
        if self.scopes.digests.plain(scope) {
            let id = self.scopes.find(scope)?;
            return Ok(id.map_or_else(Vec::new, |id| self.path(id, scope, query, keep, 0)));
        }
        let tokens = query.tokens();
        self.scopes.digests.check(scope, &tokens)?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, &tokens);
        Ok(self.path(id, scope, Query::Tokens(&content), keep, 0))
    }

    /// Number of tokens of leading blocks of a sequence usable in the first group, regardless of
    /// the remaining groups.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn known(&self, tokens: &[Token], scope: &Scope) -> Result<usize> {
        Ok(self.known_path(Query::Tokens(tokens), scope, 0)?.len() * self.block_tokens())
    }

    /// The blocks of the longest prefix visible to a scope, in a vector with capacity for `beyond`
    /// more tokens.
    pub(crate) fn path(
        &self,
        id: ScopeId,
        scope: &Scope,
        query: Query<'_>,
        keep: usize,
        beyond: usize,
    ) -> Vec<BlockId> {
        let known = self.scopes.get(id);
        let usable = query.len().saturating_sub(keep);
        // A prefix has at most all blocks of the trie, for any query length.
        let found = (usable / self.block_tokens()).min(self.trie().len());
        let mut path = Vec::with_capacity(found + beyond / self.block_tokens() + 1);
        self.trie().walk(known.root, query.first(usable), &mut path);
        self.cut_to_visible(scope, &mut path);
        if known.structure == Structure::LeafOnly {
            path.truncate(self.covered(&path));
        } else {
            // Trailing holes are computed like the rest of the prompt.
            while path.last().is_some_and(|&block| !self.useful(block)) {
                path.pop();
            }
        }
        path
    }

    /// Number of leading blocks of a path resident or arriving with all layers.
    pub(crate) fn covered(&self, path: &[BlockId]) -> usize {
        // If a tier has every block of the trie, no run needs a check.
        if (0..self.tiers.len()).any(|tier| self.holds_all(tier)) {
            return path.len();
        }
        let mut covered = 0;
        for run in self.runs(path) {
            // Usually a single tier has the full run. Otherwise check block by block.
            if !(0..self.tiers.len()).any(|tier| self.blocks.table(tier).all_full(run.clone())) {
                let lacking = run.clone().find(|&block| !self.missing(block).is_empty());
                if let Some(lacking) = lacking {
                    return covered + (lacking - run.start) as usize;
                }
            }
            covered += run.len();
        }
        covered
    }

    /// Whether any layer of a block is resident or arriving.
    fn useful(&self, block: BlockId) -> bool {
        (0..self.tiers.len()).any(|tier| !self.expected(tier, block).is_empty())
    }

    /// The copies of a block, fastest tier first.
    fn copies(&self, block: BlockId, now: Nanos) -> Vec<Copy> {
        let mut copies = Vec::new();
        for tier in 0..self.tiers.len() {
            copies.extend(self.copy_on(tier, block, now));
            let others = self.points.other_numbers().map(|group| Place::new(tier, group));
            copies.extend(others.filter_map(|place| self.group_copy(place, block, now)));
        }
        copies
    }

    /// The copy of a block on a tier, in the first group.
    fn copy_on(&self, tier: TierId, block: BlockId, now: Nanos) -> Option<Copy> {
        let residency = self.residency(tier, block);
        let leaving = self.leaving(tier, block);
        // A leaving copy joins the resident layers of its tier.
        if let Some(layers) = self.valid_with(tier, block, &leaving) {
            let slot = Self::leaving_slot(&leaving, layers.lo);
            let slot = slot.unwrap_or_else(|| self.slot_of(tier, block, layers.lo));
            let (first, ready, coming) = (now, now, layers);
            return Some(Copy {
                tier,
                group: 0,
                slot,
                layers,
                coming,
                first,
                ready,
                leaving: true,
            });
        }
        if matches!(residency.state, ResidencyState::Absent | ResidencyState::Bad) {
            return None;
        }
        let arrival = self.arrival(tier, block);
        let coming = self.expected(tier, block);
        Some(Copy {
            tier,
            group: 0,
            slot: self.slot_of(tier, block, coming.lo),
            layers: residency.have,
            coming,
            first: arrival.map_or(now, |arrival| arrival.first.max(now)),
            ready: arrival.map_or(now, |arrival| arrival.ready.max(now)),
            leaving: false,
        })
    }

    /// The copy of a block on a tier in a group after the first.
    fn group_copy(&self, place: Place, block: BlockId, now: Nanos) -> Option<Copy> {
        if !self.blocks.expects(place, block) {
            return None;
        }
        let (residency, arrival) = (self.residency(place, block), self.arrival(place, block));
        Some(Copy {
            tier: place.tier,
            group: u8::try_from(place.group).expect("few groups"),
            slot: residency.slot,
            layers: residency.have,
            coming: arrival.map_or(residency.have, |arrival| arrival.target),
            first: arrival.map_or(now, |arrival| arrival.first.max(now)),
            ready: arrival.map_or(now, |arrival| arrival.ready.max(now)),
            leaving: false,
        })
    }
}
