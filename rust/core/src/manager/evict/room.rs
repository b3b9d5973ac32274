//! Room: slots of several tiers, made all or not at all.
//!
//! ```text
//! room there? --yes--> nothing
//!      | no
//!      v
//! a set that writes victims back --enough--> carried out
//!      | too little: abandoned
//!      v
//! a set that drops victims --enough--> carried out, --too little--> abandoned, NoSpace
//! ```
//!
//! Soft room (`make_soft_room`) ends after the first set. Invariant: a failure changes nothing.
//! Cost: none while there is room, otherwise the cost of the eviction set.

use std::ops::Range;

use crate::block::{BlockId, TierId};
use crate::error::Result;
use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;
use crate::time::Nanos;

/// Slots wanted on a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) tier: TierId,
    /// Number of slots by group, for the leading groups.
    pub(crate) slots: &'a [u64],
}

impl Manager {
    /// Makes room for the wanted slots of each tier, or changes nothing.
    ///
    /// Does not evict the copies in `stay`. If writing victims back does not leave enough room,
    /// droppable victims are dropped: retention is soft.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::error::Error::NoSpace) for the first tier without enough room.
    pub(crate) fn make_room(
        &mut self,
        wanted: &[Wanted<'_>],
        stay: &[(TierId, Range<BlockId>)],
        now: Nanos,
    ) -> Result<()> {
        // The usual case before a tier is full needs no set. Each tier is named once, so the tiers
        // can be checked separately.
        if wanted.iter().all(|wanted| self.has_room(wanted.tier, wanted.slots)) {
            return Ok(());
        }
        let room = |manager: &mut Self, set: &mut EvictionSet| {
            let full =
                wanted.iter().find(|wanted| !manager.room(set, wanted.tier, wanted.slots, now));
            full.map_or(Ok(()), |full| Err(manager.no_space(full.tier, full.slots, set)))
        };
        let set = self.decide_room(stay, room)?;
        self.apply(&set, now);
        self.keep(set);
        Ok(())
    }

    /// Whether slots of each group can be taken on a tier without a victim.
    #[inline]
    pub(crate) fn has_room(&self, tier: TierId, slots: &[u64]) -> bool {
        match self.blocks.arena(tier) {
            Some(arena) => arena.fits(slots),
            None => {
                slots[0] == 0 || slots[0] + self.transit_reserve(tier) <= self.blocks.takeable(tier)
            }
        }
    }

    /// Makes room on a tier without dropping last copies: victims are stored below or are clean.
    /// Returns whether there is enough room. Otherwise nothing has changed.
    pub(crate) fn make_soft_room(
        &mut self,
        wanted: Wanted<'_>,
        stay: &[(TierId, Range<BlockId>)],
        now: Nanos,
    ) -> bool {
        if self.has_room(wanted.tier, wanted.slots) {
            return true;
        }
        let mut set = self.reuse_set(false);
        for (tier, blocks) in stay {
            self.guard(&mut set, *tier, blocks.clone());
        }
        let fits = self.room(&mut set, wanted.tier, wanted.slots, now);
        if fits {
            self.apply(&set, now);
        } else {
            self.abandon(&set);
        }
        self.keep(set);
        fits
    }

    /// Decides the evictions for a successful `fill`, for `apply` and `keep`, or changes nothing.
    ///
    /// # Errors
    /// The errors of `fill`.
    pub(crate) fn decide_room(
        &mut self,
        stay: &[(TierId, Range<BlockId>)],
        fill: impl Fn(&mut Self, &mut EvictionSet) -> Result<()>,
    ) -> Result<Box<EvictionSet>> {
        let mut dropping = false;
        loop {
            let mut set = self.reuse_set(dropping);
            for (tier, blocks) in stay {
                self.guard(&mut set, *tier, blocks.clone());
            }
            // The set is carried out only once every tier has its room.
            let Err(refused) = fill(self, &mut set) else { return Ok(set) };
            self.abandon(&set);
            self.keep(set);
            if dropping {
                return Err(refused);
            }
            dropping = true;
        }
    }
}
