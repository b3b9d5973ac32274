//! Policy feed: the inputs of policies beyond a block's own state, with their tables.
//!
//! Invariant: an index of arrivals has an entry for exactly the resident blocks of its tier. Cost:
//! nothing without a policy that needs them. Otherwise O(1) per arriving, used or evicted block.

pub(super) mod reuse;

use std::ops::Range;

use crate::block::{BlockId, TierId};
use crate::eviction::GhostTable;
use crate::policy::{LastUse, MOST_USES, Needs, expected_use, pack, unpack};
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::trie::GroupSlice;

use crate::manager::Manager;
use crate::manager::settings::Settings;
use crate::tiers::Tier;
use reuse::Uses;

/// Number of requests averaged for the mean interval between two requests.
const MEAN_OF: u64 = 64;

/// Context of the current request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestContext {
    /// Full blocks of its prompt.
    blocks: u32,
    /// Its turn, evicted blocks included. Kept if a policy learns.
    run: u8,
}

impl RequestContext {
    /// Full blocks of its prompt.
    pub(super) fn prompt_blocks(self) -> u32 {
        self.blocks
    }
}

/// Tables for policies that need arrivals or past uses.
#[derive(Debug)]
pub(super) struct PolicyFeed {
    /// Whether a policy needs arrivals.
    pub(super) arrivals: bool,
    /// Number of requests so far.
    requests: u64,
    /// Start of the last request, and the mean interval between two requests.
    last: Nanos,
    interval: Nanos,
    /// The current request.
    pub(super) request: RequestContext,
    /// Uses of evicted blocks, if a policy needs them.
    ghosts: Option<GhostTable>,
    /// Evicted blocks for explaining misses, if no policy needs them. Decides nothing.
    explained: Option<GhostTable>,
    /// Uses of blocks, if a policy learns. Then a ghost encodes a block's turn and uses.
    uses: Option<Uses>,
}

impl PolicyFeed {
    /// Empty tables for the needs of these tiers' policies, of a model with a single group or
    /// `several`.
    pub(super) fn new(tiers: &[Tier], explain: bool, several: bool) -> Self {
        let room = |needs: &[Needs]| -> u64 {
            let such = |tier: &&Tier| needs.iter().any(|&needs| tier.eviction.needs(needs));
            tiers.iter().filter(such).map(|tier| u64::from(tier.spec.blocks)).sum()
        };
        let capacity = room(&[Needs::PAST_USES, Needs::REUSE]);
        let all = tiers.iter().map(|tier| u64::from(tier.spec.blocks)).sum();
        Self {
            arrivals: tiers.iter().any(|tier| tier.eviction.needs(Needs::ARRIVAL)),
            requests: 0,
            last: 0,
            interval: 0,
            request: RequestContext::default(),
            ghosts: (capacity > 0).then(|| GhostTable::new(capacity)),
            explained: (explain && capacity == 0).then(|| GhostTable::new(all)),
            uses: Uses::new(tiers, several),
        }
    }

    /// Prefetches the CPU cache line of a block's last use, if a policy learns.
    pub(super) fn prefetch_use(&self, block: BlockId) {
        if let Some(uses) = &self.uses {
            uses.prefetch_line(block);
        }
    }

    /// Prefetches the CPU cache line of a group's ghosts.
    pub(super) fn prefetch_ghosts(&self, slice: &GroupSlice) {
        if let Some(ghosts) = &self.ghosts {
            ghosts.prefetch_line(slice);
        }
    }

    /// Takes a slice's ghosts out of the table. `each` gets the number of consecutive blocks per
    /// ghost, and the ghost.
    pub(super) fn take_ghosts(&mut self, slice: &GroupSlice, each: impl FnMut(usize, u32)) {
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.take(slice, each);
        }
    }

    /// Place and ghost of a slice's last block with a ghost.
    fn last_ghost(&self, slice: &GroupSlice) -> Option<(u32, u32)> {
        self.ghosts.as_ref()?.last(slice)
    }

    /// The number of uses encoded in a ghost.
    pub(super) fn uses_of(&self, ghost: u32) -> u32 {
        if self.uses.is_none() { ghost } else { unpack(ghost).map_or(0, |(_, uses)| uses) }
    }

    /// The ghost of a block that leaves the trie, with `uses` uses.
    pub(super) fn ghost_of(&self, block: BlockId, uses: u32) -> u32 {
        match &self.uses {
            Some(known) => pack(known.turn(block), uses),
            None => uses.clamp(1, MOST_USES),
        }
    }

    /// Whether consecutive blocks of a run with equal use counts have equal ghosts. May spuriously
    /// return false.
    pub(super) fn one_ghost(&self, blocks: Range<BlockId>) -> bool {
        self.uses.as_ref().is_none_or(|uses| uses.one_turn(blocks))
    }

    /// Whether a block's ghost is specific to the block, not shared by its run.
    pub(super) fn learns(&self) -> bool {
        self.uses.is_some()
    }

    /// The last use of a block at this depth, if a policy learns.
    pub(super) fn last_use(&self, block: BlockId, depth: u32, settings: &Settings) -> LastUse {
        self.uses.as_ref().map(|uses| uses.last_use(block, depth, settings)).unwrap_or_default()
    }

    /// Number of blocks directly before `last` in this range with an equal last use. 0 if no policy
    /// learns.
    pub(super) fn same_use_before(&self, before: Range<BlockId>, last: BlockId) -> u32 {
        self.uses.as_ref().map_or(0, |uses| uses.same_use_before(before, last))
    }

    /// Whether uses of evicted blocks are known.
    pub(super) fn has_ghosts(&self) -> bool {
        self.ghosts.as_ref().is_some_and(|ghosts| !ghosts.is_empty())
    }

    /// Whether [`PolicyFeed::put_ghosts`] must be called.
    pub(super) fn keeps_ghosts(&self) -> bool {
        self.ghosts.is_some() || self.explained.is_some()
    }

    /// Number of a slice's leading blocks in a ghost table.
    pub(super) fn evicted_blocks(&self, slice: &GroupSlice) -> usize {
        let known = self.ghosts.as_ref().or(self.explained.as_ref());
        known.map_or(0, |known| known.leading(slice))
    }

    /// Puts the ghost of blocks that leave the trie into the table.
    pub(super) fn put_ghosts(&mut self, slice: &GroupSlice, ghost: u32) {
        if let Some(ghosts) = self.ghosts.as_mut().or(self.explained.as_mut()) {
            ghosts.put(slice, ghost);
        }
    }

    /// The number of the first request after `eta`, by the mean rate of requests.
    pub(super) fn request_after(&self, eta: Nanos) -> u32 {
        expected_use(self.requests.saturating_add(eta / self.interval.max(1)))
    }

    /// Ranks the blocks of a path by the request expected to use them, if a policy learns.
    ///
    /// Skips blocks that a different session will use earlier. `before` is the replaced request
    /// number. Returns the number of skipped blocks.
    pub(super) fn expect(&mut self, path: &[BlockId], request: u32, before: Option<u32>) -> u64 {
        let Self { requests, uses, .. } = self;
        let Some(uses) = uses else { return 0 };
        path.iter().map(|&block| u64::from(!uses.expect(block, request, before, *requests))).sum()
    }

    /// Starts a request of `blocks` blocks, in turn `run`.
    pub(super) fn begin_request(&mut self, blocks: usize, run: u8, now: Nanos) {
        let since = now.saturating_sub(std::mem::replace(&mut self.last, now));
        if self.requests > 0 {
            let weight = self.requests.min(MEAN_OF);
            self.interval = self.interval - self.interval / weight + since / weight;
        }
        self.requests += 1;
        self.request = RequestContext { blocks: u32::try_from(blocks).unwrap_or(u32::MAX), run };
    }
}

impl Manager {
    /// Records a block's arrival on a tier or its departure, if its residency changed.
    pub(super) fn note_arrival(&mut self, tier: TierId, block: BlockId) {
        if !self.feed.arrivals || !self.tiers[tier].eviction.needs(Needs::ARRIVAL) {
            return;
        }
        let resident = self.residency(tier, block).state != ResidencyState::Absent;
        let index = &mut self.tiers[tier].eviction;
        // A block with layers that come or go separately changes several times, but arrives once.
        if resident != index.arrival(block).is_some() {
            index.set_arrival(block, resident.then_some(self.feed.requests));
        }
    }

    /// Records new blocks on a tier, and applies the hints waiting for them.
    pub(super) fn on_resident(&mut self, tier: TierId, blocks: &[BlockId]) {
        if self.feed.arrivals {
            for &block in blocks {
                self.note_arrival(tier, block);
            }
        }
        self.attend_all(tier, blocks.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::PolicyFeed;
    use crate::trie::GroupSlice;

    #[test]
    fn nothing_is_kept_without_a_need() {
        let mut feed = PolicyFeed::new(&[], false, false);
        feed.begin_request(9, 0, 0);
        let slice = GroupSlice { group: 1, places: 0..1, checks: 0 };
        feed.put_ghosts(&slice, 3);
        feed.take_ghosts(&slice, |_, _| unreachable!("nothing is kept"));
        assert!(!feed.has_ghosts());
    }
}
