//! Pinned copies: kept on their tier while a second machine reads them.
//!
//! A pin takes no slot on the tiers above. In a group after the first it holds a residency like a
//! resume point. Invariant: a pinned copy has all layers and is no victim of its tier. Audit counts
//! pins as reading moves, and in the later groups as holders. Cost: O(log n) per block.

use std::collections::BTreeMap;

use crate::block::{BlockId, Handle, Layers, Part, Place, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::tier::{Residency, ResidencyState};
use crate::time::Nanos;

/// Id of a pin, never used twice.
pub type PinId = u64;

/// The pins currently held.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    held: BTreeMap<PinId, (Place, Vec<BlockId>)>,
    last: PinId,
}

impl Pins {
    /// Number of pins.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Every pinned copy of the first group, once per pin.
    pub(crate) fn copies(&self) -> impl Iterator<Item = (TierId, BlockId)> + '_ {
        let first = self.held.values().filter(|(place, _)| place.group == 0);
        first.flat_map(|(place, blocks)| blocks.iter().map(move |&block| (place.tier, block)))
    }

    /// Every pinned part of a block on a tier, of groups after the first, once per pin.
    pub(crate) fn parts(&self, tier: TierId) -> impl Iterator<Item = Part> + '_ {
        let held =
            self.held.values().filter(move |(place, _)| place.group > 0 && place.tier == tier);
        held.flat_map(|(place, blocks)| {
            blocks.iter().map(move |&block| Part { group: place.group, block })
        })
    }
}

impl Manager {
    /// Pins the copies of blocks on a tier until [`Manager::unpin_copies`], in the place's group of
    /// layers.
    ///
    /// # Errors
    /// [`Error::Config`] for a nonexistent tier or group, an engine's tier, or a block without all
    /// layers there. Nothing has changed then.
    pub fn pin_copies(
        &mut self,
        blocks: &[Handle],
        place: impl Into<Place>,
        now: Nanos,
    ) -> Result<PinId> {
        self.open()?;
        let place = place.into();
        self.check_place(place)?;
        self.tick(now);
        let mut found = Vec::with_capacity(blocks.len());
        for &handle in blocks {
            let block = self.resolve(handle)?;
            let Residency { state, have, busy, .. } = self.residency(place, block);
            let all =
                if place.group == 0 { self.all_layers() } else { self.points.layers(place.group) };
            if (state, have) != (ResidencyState::Resident, all) || busy > u16::MAX / 2 {
                return Err(self.not_whole(handle, place, have, all, busy));
            }
            found.push(block);
        }
        if place.group == 0 {
            for &block in &found {
                self.blocks.alter(place.tier, block, |residency| residency.busy += 1);
                self.refresh_on(place.tier, block);
            }
        } else {
            self.blocks.hold(place, found.iter().copied());
        }
        self.pins.last += 1;
        self.pins.held.insert(self.pins.last, (place, found));
        Ok(self.pins.last)
    }

    fn not_whole(
        &self,
        handle: Handle,
        place: Place,
        have: Layers,
        all: Layers,
        busy: u16,
    ) -> Error {
        let of = if place.group > 0 { format!(" of group {}", place.group) } else { String::new() };
        Error::config(format!(
            "block {:#x} cannot be pinned on tier '{}': it has layers {have} of {}{of} there, {busy} \
             times read",
            handle.0,
            self.tiers[place.tier].spec.kind.name(),
            all.len()
        ))
    }

    /// Ends a pin. Ending it twice does nothing.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`] of the manager itself.
    pub fn unpin_copies(&mut self, pin: PinId, now: Nanos) -> Result<()> {
        self.open()?;
        let now = self.tick(now);
        let Some((place, blocks)) = self.pins.held.remove(&pin) else { return Ok(()) };
        if place.group > 0 {
            self.blocks.unhold(place, blocks);
            return Ok(());
        }
        for block in blocks {
            self.blocks.alter(place.tier, block, |residency| residency.busy -= 1);
            self.refresh_on(place.tier, block);
        }
        self.write_ahead(now);
        Ok(())
    }
}
