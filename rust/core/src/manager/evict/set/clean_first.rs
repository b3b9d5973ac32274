//! Clean copies first: in host memory above a shared tier, clean copies leave before dirty copies,
//! which are dropped. No victim waits for a shared store.
//!
//! Invariant: clean victims leave in order of value, and so do dirty victims. Cost: at most
//! `MOST_PASSED` more links and unlinks per call than in order of value.

use crate::block::{BlockId, TierId};
use crate::policy::Entry;
use crate::tier::Kind;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;

/// Maximum number of skipped dirty copies per call. After them victims leave in order of value.
const MOST_PASSED: usize = 64;

/// Dirty copies skipped until the clean copies have left.
#[derive(Debug, Default)]
pub(super) struct Passed(Option<Vec<Entry>>);

impl Passed {
    /// Whether clean copies leave first.
    #[inline]
    pub(super) fn passes(&self) -> bool {
        self.0.is_some()
    }
}

impl Manager {
    /// Starts to skip dirty copies of a tier, if it is host memory above a shared tier. A preview
    /// of the tier skips nothing, because it writes the dirty copies.
    pub(super) fn pass_dirty(&self, set: &EvictionSet, tier: TierId) -> Passed {
        let host = self.tiers[tier].spec.kind == Kind::Host && self.tiers.above_shared(tier);
        Passed((host && set.preview != Some(tier)).then(Vec::new))
    }

    /// The next linked entry to leave a tier.
    #[inline]
    pub(super) fn next_victim(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        passed: &mut Passed,
        now: Nanos,
    ) -> Option<Entry> {
        if passed.passes() {
            return self.next_clean(set, tier, passed, now);
        }
        self.tiers[tier].eviction.victim(stamp(now))
    }

    /// The next linked entry to leave a tier, preferably a clean copy.
    fn next_clean(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        passed: &mut Passed,
        now: Nanos,
    ) -> Option<Entry> {
        while let Some(dirty) = &mut passed.0 {
            let entry = self.tiers[tier].eviction.victim(stamp(now));
            match entry.filter(|_| dirty.len() < MOST_PASSED) {
                Some(entry) if self.leaves_clean(tier, entry.id) => return Some(entry),
                Some(entry) => {
                    self.tiers[tier].eviction.unlink(entry.id);
                    dirty.push(entry);
                }
                None => self.end_passing(set, tier, passed),
            }
        }
        self.tiers[tier].eviction.victim(stamp(now))
    }

    /// Whether the shared tier has the resume point or the block of an entry.
    fn leaves_clean(&self, tier: TierId, block: BlockId) -> bool {
        if self.points.has_on(tier, block) {
            return self.points.has_on(tier + 1, block);
        }
        self.blocks.is_clean(tier, block)
    }

    /// Links the skipped dirty copies again.
    pub(super) fn end_passing(&mut self, set: &mut EvictionSet, tier: TierId, passed: &mut Passed) {
        for entry in passed.0.take().unwrap_or_default() {
            if self.points.several() {
                self.put_again(set, tier, entry.id);
            } else {
                self.put_in(set, tier, entry);
            }
        }
    }

    /// Links a skipped block again, unless it or its exposing child has left in the set's view. A
    /// block with a resume point may have children.
    fn put_again(&mut self, set: &mut EvictionSet, tier: TierId, block: BlockId) {
        let layers = self.view(set, tier, block);
        let resident = !layers.is_empty() || self.points.has_on(tier, block);
        if resident && self.tiers[tier].eviction.get(block).is_none() {
            let entry = self.entry(tier, block, layers);
            self.put_in(set, tier, entry);
        }
    }
}
