//! Explanations: the terms of a block's price, computed by the code that ranks victims.
//!
//! Invariant: nothing changes. Cost: O(entries of the tier) for the rank.

use crate::block::{BlockId, Departure, Handle, Layers, TierId};
use crate::error::{Error, Result};
use crate::hint::Priority;
use crate::policy::{Facts, LastUse, Terms};
use crate::time::{Nanos, stamp};

use crate::manager::Manager;

/// Explanation of a block's rank on a tier at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The factors and their product.
    pub terms: Terms,
    /// Nanoseconds since its last use.
    pub idle: Nanos,
    /// Cost per second of idle time. Infinite at zero idle time.
    pub value: f64,
    /// Its priority. A block of lower priority is evicted first, regardless of value.
    pub priority: Priority,
    /// Number of entries of the tier evicted before the block, or `None` while it cannot be a
    /// victim.
    pub rank: Option<usize>,
    /// The next layers to evict.
    pub layers: Layers,
    /// The value in words, under a learning policy.
    pub words: Option<String>,
}

impl Manager {
    /// Explains the price of a block on a tier, and its rank in the eviction order.
    ///
    /// # Errors
    /// [`Error::Config`] if the block is not cached or not on the tier.
    pub fn explain(&self, block: Handle, tier: TierId, now: Nanos) -> Result<Explanation> {
        self.explain_part(block, tier, None, now)
    }

    /// Explains the price of a layer of a block, as if only this layer were demoted next. The rank
    /// is the rank of the block's entry.
    ///
    /// # Errors
    /// [`Error::Config`] if the block is not cached or the layer is not on the tier.
    pub fn explain_layer(
        &self,
        block: Handle,
        tier: TierId,
        layer: u16,
        now: Nanos,
    ) -> Result<Explanation> {
        self.explain_part(block, tier, Some(layer), now)
    }

    /// Explains a block, or a layer of it.
    fn explain_part(
        &self,
        block: Handle,
        tier: TierId,
        layer: Option<u16>,
        now: Nanos,
    ) -> Result<Explanation> {
        self.open()?;
        let id = self.resolve(block)?;
        if tier >= self.tiers.len() {
            return Err(Error::config(format!(
                "there is no tier {tier}, only {}",
                self.tiers.len()
            )));
        }
        let have = self.residency(tier, id).have;
        if have.is_empty() {
            return Err(Error::config(format!(
                "block {:#x} is not on tier '{}'",
                block.0,
                self.tiers[tier].spec.kind.name()
            )));
        }
        let now = self.clock.read(now);
        let index = &self.tiers[tier].eviction;
        let policy = index.policy();
        let mut facts = self.facts(tier, id, have);
        let mut leaving = self.next_out(tier, id, have);
        if let Some(layer) = layer {
            if !have.contains(layer) {
                return Err(Error::config(format!(
                    "layer {layer} of block {:#x} is not on tier '{}', which has {have}",
                    block.0,
                    self.tiers[tier].spec.kind.name()
                )));
            }
            leaving = Layers::new(layer, layer + 1);
            facts = Facts {
                layers: leaving,
                layer: Some(layer),
                departure: Departure::Demote,
                ..facts
            };
        }
        let terms = policy.terms(&facts, &self.settings.cost);
        let idle = stamp(now) - facts.access;
        // Hints expire at the next changing call. Here they end at the requested time.
        let bands = self.bands_at(tier, now);
        Ok(Explanation {
            terms,
            idle,
            value: policy.value(&facts, terms.cost, idle),
            priority: bands.get(&id).copied().unwrap_or_else(|| self.band(tier, id)).priority,
            rank: index.rank(id, stamp(now), &bands),
            layers: leaving,
            words: policy.words(&facts, &self.settings.cost),
        })
    }

    /// The cost of demoting a layer of a block under a tier's policy.
    ///
    /// # Errors
    /// [`Error::Config`] for a nonexistent layer or block.
    pub fn cost(
        &self,
        tier: TierId,
        layer: u16,
        block: u32,
        session_blocks: u32,
        context: u64,
    ) -> Result<Terms> {
        if layer >= self.settings.layers || block >= session_blocks || tier >= self.tiers.len() {
            return Err(Error::config(format!(
                "layer {layer} of {}, block {block} of {session_blocks}, tier {tier} of {}",
                self.settings.layers,
                self.tiers.len()
            )));
        }
        let facts = Facts {
            id: BlockId::MAX,
            context,
            block,
            session_blocks,
            uses: 1,
            access: 0,
            arrival: 0,
            layers: Layers::new(layer, layer + 1),
            model_layers: self.settings.layers,
            layer: Some(layer),
            departure: Departure::Demote,
            price: None,
            reload: self.reload(tier),
            last_use: LastUse::default(),
        };
        Ok(self.tiers[tier].eviction.policy().terms(&facts, &self.settings.cost))
    }
}
