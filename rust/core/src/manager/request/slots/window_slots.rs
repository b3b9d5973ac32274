//! Window slots: what a lease has in the groups after the first.
//!
//! Invariant: places of a list ascend. Cost: O(slots).

use std::collections::BTreeMap;

use crate::block::{BlockId, GroupId, Place, Slot};
use crate::group::GroupKind;
use crate::manager::points::Stay;
use crate::manager::request::slots::placed_slots::PlacedSlots;
use crate::private_slots::PrivateSlotId;

/// Place of the slot that follows that of the next state of a lease: no block has it yet.
pub(in crate::manager::request) const LATER: u32 = u32::MAX;

/// Block of a path, by its place there, that is loaded in a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedLoad {
    pub(crate) from: Place,
    pub(crate) place: u32,
}

/// Slots of a lease in the groups after the first. Lists by group have an empty one for the first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows {
    /// Borders after the match that become resume points, ascending, and how long they stay.
    pub(crate) borders: Vec<(u32, Stay)>,
    /// By group, places on the path of the blocks that the lease holds, ascending.
    pub(crate) held: Vec<Vec<u32>>,
    /// By group, the slots that the lease writes, by the place on the path of their block.
    pub(crate) open: Vec<PlacedSlots>,
    /// The same, taken while room is free: others may take them until the block table is read.
    pub(crate) spare: Vec<PlacedSlots>,
    /// By group, what an engine that owns the slots has named or will name, by place on the path.
    pub(crate) bound: Vec<BTreeMap<u32, PrivateSlotId>>,
    /// Places to take slots for, by group.
    pub(in crate::manager::request) wanted: Vec<Vec<u32>>,
    /// What the match needs from tiers below.
    pub(crate) loads: Vec<PlannedLoad>,
    /// Blocks of the path that have their slots.
    pub(crate) done: u32,
    /// Full blocks of the prompt.
    pub(crate) end: u32,
    /// How long the end of the match stays a resume point, if later prompts may leave the path there.
    pub(in crate::manager::request) here: Option<Stay>,
}

impl Windows {
    /// The borders at which resumes have to be possible: the lease's own, and its end.
    pub(in crate::manager::request) fn ends(&self, end: u32) -> impl Iterator<Item = u32> + '_ {
        self.borders.iter().map(|&(border, _)| border).chain([end])
    }

    /// The slots that no block has, with their groups.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (GroupId, Slot)> + '_ {
        let slots = self.open.iter().enumerate().chain(self.spare.iter().enumerate());
        slots.flat_map(|(group, slots)| slots.slots().map(move |slot| (group, slot)))
    }

    /// The same, which are no longer the lease's.
    pub(crate) fn take_slots(&mut self) -> Vec<(GroupId, Slot)> {
        let slots = self.slots().collect();
        self.open.iter_mut().chain(&mut self.spare).for_each(PlacedSlots::clear);
        slots
    }
}

/// Blocks that hold all earlier tokens to which a token may attend, and one more.
pub(in crate::manager::request) fn span(kind: GroupKind, size: u64) -> u32 {
    let blocks = match kind {
        GroupKind::State => return 1,
        GroupKind::Full => return u32::MAX,
        GroupKind::Sliding { window, .. } => window.div_ceil(size) + 1,
        GroupKind::Chunked { chunk } => chunk.div_ceil(size) + 1,
    };
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// The blocks of a path at these places.
pub(crate) fn blocks_at(path: &[BlockId], places: &[u32]) -> impl Iterator<Item = BlockId> {
    places.iter().map(|&place| path[place as usize])
}

/// The border after a path.
pub(in crate::manager) fn path_border(path: &[BlockId]) -> u32 {
    u32::try_from(path.len()).expect("fewer than 2^32 blocks")
}
