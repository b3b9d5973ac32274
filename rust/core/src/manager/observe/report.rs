//! Reports: a tier's occupancy, and the queue of eviction events.
//!
//! Invariant: each event is returned once. A full queue overwrites the oldest event. Cost: O(1) per
//! event.

use crate::block::{BlockId, Handle, Layers, LeaseId, Part, TierId, Token};
use crate::error::Result;
use crate::residency::{Arena, GroupSlots};
use crate::scope::Scope;
use crate::time::Nanos;
use crate::trie::Query;

use crate::manager::kinds::{Cause, Evicted, Reason};
use crate::manager::{Manager, TierStats};

/// Occupancy of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Total number of slots.
    pub slots: u64,
    /// Slots that can be written at once.
    pub free: u64,
    /// Slots without a holder still being read by a store.
    pub coming: u64,
    /// Entries that can be victims now.
    pub evictable: u64,
}

impl Reason {
    /// Name of the reason in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Demoted => "demoted",
            Self::Dropped => "dropped",
        }
    }
}

/// Event: layers of a block left a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time.
    pub at: Nanos,
    /// Block.
    pub block: Handle,
    /// Layers that left.
    pub layers: Layers,
    /// Tier they left.
    pub tier: TierId,
    /// Whether a copy remains.
    pub reason: Reason,
    /// Event that caused the eviction.
    pub cause: Cause,
    /// Destination of their write-back.
    pub to: Option<TierId>,
    /// Time since the last use.
    pub idle: Nanos,
}

impl Manager {
    /// The counters of a tier.
    #[must_use]
    pub fn stats(&self, tier: TierId) -> TierStats {
        let (copies, clean) = (self.blocks.table(tier).copies(), self.blocks.clean_copies(tier));
        TierStats { copies, clean, retained: self.retained(tier).0, ..self.meter.tiers[tier] }
    }

    /// The occupancy of a tier.
    #[must_use]
    pub fn occupancy(&self, tier: TierId) -> Occupancy {
        let space = self.blocks.space(tier);
        // A page without a group can be cut into slots of the first group.
        let all = |arena: &Arena| u64::from(arena.room()) * u64::from(arena.per_page(0));
        Occupancy {
            slots: self.blocks.arena(tier).map_or(u64::from(space.capacity()), all),
            free: self.blocks.free(tier),
            coming: u64::from(space.coming()),
            evictable: self.tiers[tier].eviction.len() as u64,
        }
    }

    /// Number of runs of the trie: chains of blocks with shared values.
    #[doc(hidden)]
    #[must_use]
    pub fn run_count(&self) -> usize {
        self.trie().runs()
    }

    /// Number of blocks in the trie, of leases held, and of calls with a time in the past.
    #[must_use]
    pub fn totals(&self) -> (usize, usize, u64) {
        (self.trie().len(), self.leases.len(), self.clock.clamped())
    }

    /// Number of calls with a time too far in the future. They were served at the latest time.
    #[must_use]
    pub fn doubted(&self) -> u64 {
        self.clock.doubted()
    }

    /// Takes the events: evicted layers with tier, time, reason and destination.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::error::Error::Closed) or
    /// [`Error::Invariant`](crate::error::Error::Invariant).
    pub fn take_events(&mut self) -> Result<Vec<Event>> {
        self.open()?;
        Ok(self.events.drain(..).collect())
    }

    /// The last path of every named session of a scope: its name, its length in blocks, and its
    /// blocks still in the trie, in logical order.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) if the scope is known with a different
    /// structure.
    pub fn sessions(&self, scope: &Scope) -> Result<Vec<(String, u32, Vec<Handle>)>> {
        self.open()?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let path = |tip| self.trie().handles(&self.path_to(tip));
        let named = self.sessions.named(id);
        let mine = named.filter_map(|(name, length, tip)| {
            Some((scope.named(name)?.to_owned(), length, path(tip)))
        });
        Ok(mine.collect())
    }

    /// The name of a lease's session, or `None`.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::error::Error::Closed).
    pub fn session_name(&self, id: LeaseId) -> Result<Option<&str>> {
        let lease = self.lease(id)?;
        let name = lease.session.and_then(|session| self.sessions.name(session));
        Ok(name.and_then(|name| lease.scope.named(name)))
    }

    /// The fastest tier with each layer of a block, or `None`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) if the block is not cached.
    pub fn layer_tiers(&self, block: Handle) -> Result<Vec<Option<TierId>>> {
        let block = self.resolve(block)?;
        let of = |layer| {
            (0..self.tiers.len()).find(|&t| self.residency(t, block).usable().contains(layer))
        };
        Ok(self.all_layers().iter().map(of).collect())
    }

    /// Whether each group has or expects each block of a sequence on any tier, up to the last block
    /// of the first group.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    #[doc(hidden)]
    pub fn group_map(&self, tokens: &[Token], scope: &Scope) -> Result<Vec<Vec<bool>>> {
        self.open()?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, tokens);
        let path = self.path(id, scope, Query::Tokens(&content), 0, 0);
        let on = |part| self.part_on(part, self.tiers.len());
        let has = |group| path.iter().map(|&block| on(Part { group, block })).collect();
        let others = self.points.other_numbers().map(has);
        let mut first = vec![true; path.len()];
        for hole in self.holes(&path) {
            first[hole as usize] = false;
        }
        Ok(std::iter::once(first).chain(others).collect())
    }

    /// Slots of each group on a tier. Empty for a model with a single group.
    #[must_use]
    pub fn group_slots(&self, tier: usize) -> Vec<GroupSlots> {
        self.blocks.group_slots(tier)
    }

    /// Queues an event for layers leaving a tier.
    pub(crate) fn record(&mut self, evicted: &Evicted, block: BlockId, idle: Nanos, at: Nanos) {
        let Evicted { tier, layers, reason, cause, .. } = *evicted;
        if self.settings.events == 0 {
            return;
        }
        if self.events.len() == self.settings.events {
            self.events.pop_front();
        }
        let block = self.trie().handle(block);
        let to = (reason == Reason::Demoted).then_some(tier + 1);
        self.events.push_back(Event { at, block, layers, tier, reason, cause, to, idle });
    }
}
