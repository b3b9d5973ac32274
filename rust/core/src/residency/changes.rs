//! Changes: layers of a block becoming valid or invalid on a tier, in order.
//!
//! Recorded only on request. Invariant: applied in order they give the valid layers of every
//! residency. Cost: O(1) per change. A branch per verb if not recorded.

use crate::block::{BlockId, Layers, Place, TierId};
use crate::tier::Residency;

use super::Blocks;

/// A change of the valid layers of a residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Tier.
    pub tier: TierId,
    /// Block.
    pub block: BlockId,
    /// Group of layers.
    pub group: u8,
    /// Valid layers before.
    pub before: Layers,
    /// Valid layers after.
    pub after: Layers,
}

impl<T: Copy + PartialEq + Default> Blocks<T> {
    /// Starts to record changes.
    pub(crate) fn keep_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// Takes the changes since the last call.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Records a change, if enabled.
    pub(super) fn note(
        &mut self,
        Place { tier, group }: Place,
        block: BlockId,
        before: Layers,
        after: Layers,
    ) {
        if let Some(changes) = &mut self.changes
            && before != after
        {
            let group = u8::try_from(group).expect("few groups");
            changes.push(Change { tier, block, group, before, after });
        }
    }

    /// Records the same change of several blocks.
    pub(super) fn note_all(
        &mut self,
        tier: TierId,
        blocks: impl Iterator<Item = BlockId>,
        before: Layers,
        after: Layers,
    ) {
        if let Some(changes) = &mut self.changes {
            changes.extend(blocks.map(|block| Change { tier, block, group: 0, before, after }));
        }
    }

    /// [`Blocks::alter`] with a record of the change.
    #[cold]
    pub(super) fn alter_noted(
        &mut self,
        place: Place,
        block: BlockId,
        change: impl FnOnce(&mut Residency),
    ) {
        let valid = |blocks: &Self| blocks.table(place).get(block).usable();
        let before = valid(self);
        self.alter_quietly(place, block, change);
        self.note(place, block, before, valid(self));
    }
}
