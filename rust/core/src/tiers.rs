//! Tiers of a machine, with their settings, eviction indexes and lanes.
//!
//! Invariant: tiers go from fast to slow, as given. Cost: O(1). An index changes only if the entry
//! changed.

use std::ops::{Deref, DerefMut};

use crate::block::{BlockId, Departure, Layers, TierId};
use crate::error::{Error, Result};
use crate::eviction::EvictionIndex;
use crate::hint::Band;
use crate::lane::{LaneId, Lanes};
use crate::policy::{self, Entry, Needs};
use crate::tier::{Kind, Owner, TierSpec, Write};

/// Tier with its index and lanes.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) spec: TierSpec,
    pub(crate) eviction: EvictionIndex,
    pub(crate) read: LaneId,
    pub(crate) store: LaneId,
    /// Whether several machines share the tier directly below.
    above_shared: bool,
    /// Slots known as free or clean since `write_ahead` last checked `free_low`.
    pub(crate) credit: u64,
}

/// All tiers, from fast to slow.
#[derive(Debug)]
pub(crate) struct Tiers(Vec<Tier>);

impl Tiers {
    /// Empty tiers with their lanes. `policy` applies to tiers without a policy.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] for an unknown policy.
    pub(crate) fn new(
        specs: &[TierSpec],
        policy: &str,
        reuse: bool,
        epsilon: f64,
        lanes: &mut Lanes,
    ) -> Result<Self> {
        let mut tiers = Vec::with_capacity(specs.len());
        for (at, spec) in specs.iter().enumerate() {
            let policy = policy::by_name(spec.policy.as_deref().unwrap_or(policy), reuse)?;
            tiers.push(Tier {
                eviction: EvictionIndex::new(policy, epsilon),
                read: lanes.add(spec.read.clone()),
                store: lanes.add(spec.store.clone()),
                above_shared: specs.get(at + 1).is_some_and(|below| below.kind == Kind::Remote),
                credit: 0,
                spec: spec.clone(),
            });
        }
        Ok(Self(tiers))
    }

    /// The slowest tier.
    pub(crate) fn last(&self) -> TierId {
        self.0.len() - 1
    }

    /// Whether the engine allocates the slots of the first tier.
    pub(crate) fn engine_owned(&self) -> bool {
        self.0[0].spec.owner == Owner::Engine
    }

    /// Whether a tier writes its victims back to the tier below.
    pub(crate) fn writes(&self, tier: TierId) -> bool {
        tier < self.last() && self.0[tier].spec.write != Write::Never
    }

    /// Whether new residents of a tier are copied down at once.
    pub(crate) fn writes_through(&self, tier: TierId) -> bool {
        self.writes(tier) && self.0[tier].spec.write == Write::Through
    }

    /// Whether several machines share the tier directly below. A write to it may take any time.
    pub(crate) fn above_shared(&self, tier: TierId) -> bool {
        self.0[tier].above_shared
    }

    /// Whether several machines share the slowest tier.
    pub(crate) fn has_shared(&self) -> bool {
        self.0[self.last()].spec.kind == Kind::Remote
    }

    /// Whether a tier writes its blocks to a shared tier.
    pub(crate) fn writes_shared(&self, tier: TierId) -> bool {
        self.above_shared(tier) && self.writes(tier)
    }

    /// Whether each slot of the first tier is assigned to a block before its bytes are written.
    pub(crate) fn writes_bytes(&self) -> bool {
        self.0[0].spec.owner == Owner::Kvtrie
    }

    /// Whether a policy of a tier reads a fact.
    pub(crate) fn need(&self, fact: Needs) -> bool {
        self.0.iter().any(|tier| tier.eviction.needs(fact))
    }

    /// Number of slots for layers of a block on a tier.
    pub(crate) fn units(&self, tier: TierId, layers: Layers) -> u64 {
        if self.0[tier].spec.layer_slots { u64::from(layers.len()) } else { 1 }
    }

    /// Fails if there is no such tier.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn check(&self, tier: TierId) -> Result<()> {
        if tier < self.0.len() {
            return Ok(());
        }
        Err(Error::config(format!("there is no tier {tier}, only {}", self.0.len())))
    }

    /// How victims leave a tier.
    pub(crate) fn departure(&self, tier: TierId) -> Departure {
        if self.writes(tier) { Departure::Demote } else { Departure::Drop }
    }

    /// Updates the index of a tier: links the wanted entry in its band, or unlinks the known entry.
    pub(crate) fn set_entry(
        &mut self,
        tier: TierId,
        block: BlockId,
        known: Option<Entry>,
        wanted: Option<Entry>,
        band: Band,
    ) {
        let index = &mut self.0[tier].eviction;
        if known == wanted && (known.is_none() || index.band(block) == band) {
            return;
        }
        // Value and band determine the place in the index, so the entry is linked again.
        if known.is_some() {
            index.unlink(block);
        }
        if let Some(entry) = wanted {
            index.link(entry, band);
        }
    }
}

impl Deref for Tiers {
    type Target = [Tier];

    fn deref(&self) -> &[Tier] {
        &self.0
    }
}

impl DerefMut for Tiers {
    fn deref_mut(&mut self) -> &mut [Tier] {
        &mut self.0
    }
}
