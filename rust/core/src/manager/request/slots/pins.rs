//! Pinned copies: kept on their tier while another machine reads them.
//!
//! A pin takes no slot on any tier above. Invariant: a pinned copy has all layers and is no victim
//! of its tier; audit counts pins as moves that read. Cost: O(log n) per block.

use std::collections::BTreeMap;

use crate::block::{BlockId, Handle, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::tier::{Residency, ResidencyState};
use crate::time::Nanos;

/// A pin's id; never used twice.
pub type PinId = u64;

/// The pins that are held.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    held: BTreeMap<PinId, (TierId, Vec<BlockId>)>,
    last: PinId,
}

impl Pins {
    /// Number of pins.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Every pinned copy, once per pin.
    pub(crate) fn copies(&self) -> impl Iterator<Item = (TierId, BlockId)> + '_ {
        let of = |(tier, blocks): &(TierId, Vec<BlockId>)| {
            let tier = *tier;
            blocks.clone().into_iter().map(move |block| (tier, block))
        };
        self.held.values().flat_map(of)
    }
}

impl Manager {
    /// Keeps the copies of blocks on a tier where they are until [`Manager::unpin_copies`].
    ///
    /// # Errors
    /// [`Error::Config`] if there is no such tier or the engine owns its slots, or if a block does
    /// not have all layers there; nothing has changed then.
    pub fn pin_copies(&mut self, blocks: &[Handle], tier: TierId, now: Nanos) -> Result<PinId> {
        self.open()?;
        self.check_tier(tier)?;
        self.tick(now);
        let mut found = Vec::with_capacity(blocks.len());
        for &handle in blocks {
            let block = self.resolve(handle)?;
            let Residency { state, have, busy, .. } = self.residency(tier, block);
            if (state, have) != (ResidencyState::Resident, self.all_layers()) || busy > u16::MAX / 2
            {
                return Err(Error::config(format!(
                    "block {:#x} cannot be pinned on tier '{}': it has layers {have} of {} there, \
                     {busy} times read",
                    handle.0,
                    self.tiers[tier].spec.kind.name(),
                    self.settings.layers
                )));
            }
            found.push(block);
        }
        for &block in &found {
            self.blocks.alter(tier, block, |here| here.busy += 1);
            self.refresh_on(tier, block);
        }
        self.pins.last += 1;
        self.pins.held.insert(self.pins.last, (tier, found));
        Ok(self.pins.last)
    }

    /// Ends a pin. Ending it twice does nothing.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`] of the manager itself.
    pub fn unpin_copies(&mut self, pin: PinId, now: Nanos) -> Result<()> {
        self.open()?;
        let now = self.tick(now);
        let Some((tier, blocks)) = self.pins.held.remove(&pin) else { return Ok(()) };
        for block in blocks {
            self.blocks.alter(tier, block, |here| here.busy -= 1);
            self.refresh_on(tier, block);
        }
        self.write_ahead(now);
        Ok(())
    }
}
