//! Prices: a table of user-given costs per block, in place of the cost model.
//!
//! `unpriced` returns blocks and `set_costs` takes their costs, so no user code runs under the
//! manager's lock. Invariant: if the user prices blocks, every block is priced or unpriced. The
//! cost model ranks unpriced blocks. Cost: O(log n) per new block and per cost, none otherwise.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BlockId, Handle};
use crate::error::{Error, Result};
use crate::record::sound;
use crate::time::Nanos;

use crate::manager::Manager;

/// Costs by block, and the blocks without a cost.
#[derive(Debug, Default)]
pub(crate) struct Prices {
    known: BTreeMap<BlockId, f64>,
    unknown: BTreeSet<BlockId>,
}

/// Block without a cost, with the possible inputs of a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unpriced {
    /// The block.
    pub block: Handle,
    /// Number of tokens before it.
    pub context: u64,
    /// Its index in its sequence, from 0.
    pub index: u32,
    /// Number of requests that used it.
    pub uses: u32,
    /// Number of blocks of its session, or up to its end without a session.
    pub session_blocks: u32,
}

impl Prices {
    /// Whether no block has a cost.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Whether no block is in either table.
    pub(crate) fn tracks_none(&self) -> bool {
        self.known.is_empty() && self.unknown.is_empty()
    }

    /// A block's cost, if given by the user.
    pub(crate) fn of(&self, block: BlockId) -> Option<f64> {
        if self.known.is_empty() { None } else { self.known.get(&block).copied() }
    }

    /// Lists new blocks as unpriced.
    pub(crate) fn wait(&mut self, blocks: &[BlockId]) {
        self.unknown.extend(blocks);
    }

    /// Drops a block that left the trie.
    pub(crate) fn forget(&mut self, block: BlockId) {
        self.known.remove(&block);
        self.unknown.remove(&block);
    }
}

impl Manager {
    /// Restores a stored cost, unless the user has given a new cost.
    pub(crate) fn restore_price(&mut self, block: BlockId, cost: f64) {
        if self.settings.priced && sound(cost).is_some() && self.prices.unknown.remove(&block) {
            self.prices.known.insert(block, cost);
        }
    }

    /// Up to `limit` blocks without a cost, by id. They are returned again until they have a cost.
    ///
    /// # Errors
    /// [`Error::Config`] if the manager does not use the user's prices.
    pub fn unpriced(&self, limit: usize) -> Result<Vec<Unpriced>> {
        self.check_priced()?;
        let tokens = u64::from(self.settings.block_tokens) * u64::from(self.settings.token_weight);
        let all = self.prices.unknown.iter().take(limit).map(|&block| {
            let index = self.trie().depth(block);
            Unpriced {
                block: self.trie().handle(block),
                context: u64::from(index) * tokens,
                index,
                uses: self.node(block).uses,
                session_blocks: self.session_blocks(block).unwrap_or(index + 1),
            }
        });
        Ok(all.collect())
    }

    /// Sets the cost of recomputing a token of each block. Blocks that left the trie are skipped:
    /// handles are never reused. Returns the number of costs set.
    ///
    /// # Errors
    /// [`Error::Config`] if the manager does not use the user's prices, for unequal numbers of
    /// blocks and costs, or for a cost that is not finite and positive. Nothing has changed then.
    pub fn set_costs(&mut self, blocks: &[Handle], costs: &[f64], now: Nanos) -> Result<usize> {
        self.check_priced()?;
        if blocks.len() != costs.len() {
            return Err(Error::config(format!(
                "{} blocks and {} costs",
                blocks.len(),
                costs.len()
            )));
        }
        if let Some(at) = costs.iter().position(|&cost| sound(cost).is_none()) {
            return Err(Error::config(format!(
                "cost {at}, of block {:#x}, is {}: finite and above 0 wanted",
                blocks[at].0, costs[at]
            )));
        }
        self.tick(now);
        let mut set = 0;
        for (&handle, &cost) in blocks.iter().zip(costs) {
            // The block may have been evicted since `unpriced` returned it.
            let Some(block) = self.trie().resolve(handle) else { continue };
            self.prices.unknown.remove(&block);
            self.prices.known.insert(block, cost);
            self.refresh(block);
            set += 1;
        }
        Ok(set)
    }

    fn check_priced(&self) -> Result<()> {
        self.open()?;
        if self.settings.priced {
            return Ok(());
        }
        Err(Error::config("the manager ranks by its cost model; make it with cost='python'"))
    }

    pub(crate) fn audit_prices(&self, broken: &mut Vec<String>) {
        let Prices { known, unknown } = &self.prices;
        let living = if self.settings.priced { self.living().count() } else { 0 };
        let all = known.keys().chain(unknown).filter(|&&block| self.trie().alive(block)).count();
        if (known.len() + unknown.len(), all) != (living, living) {
            broken.push(format!(
                "{living} blocks, {} priced and {} not, {all} of them alive",
                known.len(),
                unknown.len()
            ));
        }
    }
}
