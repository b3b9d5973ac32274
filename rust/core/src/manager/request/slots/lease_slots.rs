//! Lease slots: the slots of a lease in each group of layers, by place on its path.
//!
//! The first group's full attention is a window without end: the path pins all its blocks, and its
//! slots follow the path without a gap. In each later group a lease holds the needs of its border:
//!
//! ```text
//!   place     0    1    2    3    4  |  5    6    7    8 ...
//!             path                   |  next blocks
//!   full      all blocks are pinned  |  [ written         ]
//!   window              [   held   ] |  [ written ]  [ spare ]
//!   state                     [held] |       [ written: the next state ]
//! ```
//!
//! Invariant: places of a list ascend. Cost: O(slots).

use std::ops::{Index, IndexMut, Range};

use smallvec::{SmallVec, smallvec};

use crate::arrival::MoveIds;
use crate::block::{BlockId, GroupId, LeaseId, Part, Place, Slot};
use crate::group::Places;
use crate::manager::Manager;
use crate::manager::points::Stay;
use crate::manager::request::matching::path::{blocks_at, path_border};
use crate::manager::request::slots::placed_slots::PlacedSlots;
use crate::private_slots::PrivateSlotId;
use crate::tier::Owner;

/// Place of the second state slot of a lease, before a block has it.
pub(in crate::manager::request) const LATER: u32 = u32::MAX - 1;

/// Slot written by a lease. A slot with only this lease as holder is a plain number:
///
/// ```text
/// Plain(n) --second reference--> Private(id) --last reference--> free
///    |                               | commit: the block has no such residency
///    +-- commit: full block ---------+--> residency of the block
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenSlot {
    /// A slot of the first tier for all layers of a block, referred to only by the lease.
    Plain(Slot),
    /// A slot with more holders, for single layers, or named by an engine.
    Private(PrivateSlotId),
}

impl OpenSlot {
    pub(crate) fn plain(self) -> Option<Slot> {
        match self {
            Self::Plain(slot) => Some(slot),
            Self::Private(_) => None,
        }
    }

    pub(crate) fn private(self) -> Option<PrivateSlotId> {
        match self {
            Self::Plain(_) => None,
            Self::Private(private) => Some(private),
        }
    }
}

/// Places to take slots for, in each group.
#[derive(Clone, Debug, Default)]
pub(in crate::manager::request) struct NewPlaces {
    /// Consecutive places of the first group.
    pub(in crate::manager::request) first: Range<u32>,
    pub(in crate::manager::request) others: Vec<Places>,
}

/// Slots of a lease in a group of layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeaseSlots {
    /// Places of its held blocks, ascending. Empty for the first group, which is pinned by the
    /// path.
    pub(crate) held: Vec<u32>,
    /// Slots it writes, and all engine-named slots in groups after the first.
    pub(crate) written: PlacedSlots,
    /// Slots taken while room is free. They can be reclaimed until the block table is read.
    pub(crate) spare: PlacedSlots,
}

/// Slots of a lease in all groups, and the borders of its passes.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeaseGroups {
    slots: SmallVec<[LeaseSlots; 1]>,
    /// Borders after the match that become resume points, ascending, with their lifetimes.
    pub(crate) borders: Vec<(u32, Stay)>,
    /// Number of blocks of the path with slots in the groups after the first.
    pub(crate) done: u32,
    /// Number of full blocks of the prompt of a model with several groups.
    pub(crate) end: u32,
    /// Needs of the match's border in groups after the first that no load brings yet: group and
    /// place.
    pub(in crate::manager::request) deferred: Vec<(GroupId, u32)>,
    /// Lifetime of the match's end as a resume point, if a later prompt may diverge there.
    pub(in crate::manager::request) match_stay: Option<Stay>,
}

impl Index<GroupId> for LeaseGroups {
    type Output = LeaseSlots;

    #[inline]
    fn index(&self, group: GroupId) -> &LeaseSlots {
        &self.slots[group]
    }
}

impl IndexMut<GroupId> for LeaseGroups {
    #[inline]
    fn index_mut(&mut self, group: GroupId) -> &mut LeaseSlots {
        &mut self.slots[group]
    }
}

impl LeaseGroups {
    /// Empty slots for this number of groups.
    pub(crate) fn of(groups: usize) -> Self {
        let mut slots: SmallVec<[LeaseSlots; 1]> = SmallVec::new();
        slots.resize_with(groups, LeaseSlots::default);
        Self { slots, ..Self::default() }
    }

    /// The borders that must be resumable: the lease's borders, and its end.
    pub(in crate::manager::request) fn ends(&self, end: u32) -> impl Iterator<Item = u32> + '_ {
        self.borders.iter().map(|&(border, _)| border).chain([end])
    }

    /// Its slots in each group.
    pub(crate) fn all(&self) -> &[LeaseSlots] {
        &self.slots
    }

    /// Its slots in each group, mutable.
    pub(crate) fn all_mut(&mut self) -> &mut [LeaseSlots] {
        &mut self.slots
    }

    /// The slots without a block, with their groups.
    pub(crate) fn open(&self) -> impl Iterator<Item = (GroupId, OpenSlot)> + '_ {
        self.slots.iter().enumerate().flat_map(|(group, slots)| {
            let open = slots.written.slots().chain(slots.spare.slots());
            open.map(move |slot| (group, slot))
        })
    }
}

impl Manager {
    /// Number of slots of each group taken by these places on the first tier.
    #[inline]
    pub(in crate::manager::request) fn slots_for(&self, places: &NewPlaces) -> SmallVec<[u64; 4]> {
        let first = self.tiers.units(0, self.all_layers()) * places.first.len() as u64;
        let mut slots: SmallVec<[u64; 4]> = smallvec![first];
        if !places.others.is_empty() {
            slots.extend(places.others.iter().map(|places| places.count() as u64));
        }
        slots
    }

    /// Takes slots for a lease at places without slots. The caller has made room.
    pub(in crate::manager::request) fn take_places(
        &mut self,
        groups: &mut LeaseGroups,
        places: &NewPlaces,
    ) {
        let spec = &self.tiers[0].spec;
        let count = places.first.len();
        // A row, or a slot without a number yet, needs a private slot from the start.
        let first = if spec.layer_slots || spec.owner == Owner::Engine {
            let mut new = || OpenSlot::Private(self.new_private(0, self.all_layers()));
            (0..count).map(|_| new()).collect()
        } else {
            self.blocks.take_open(0, count, OpenSlot::Plain)
        };
        groups[0].written.add(places.first.start, first);
        for (group, places) in (1..).zip(&places.others) {
            let mut taken = self.blocks.take_open(group, places.count(), OpenSlot::Plain);
            for range in places.ranges() {
                let rest = taken.split_off(range.len());
                groups[group].written.add(range.start, std::mem::replace(&mut taken, rest));
            }
        }
    }

    /// The private slot of an open slot. Makes it for a plain slot.
    pub(crate) fn as_private(&mut self, open: OpenSlot) -> PrivateSlotId {
        match open {
            OpenSlot::Plain(slot) => {
                let layers = self.all_layers();
                self.private_slots.add(0, slot, layers)
            }
            OpenSlot::Private(private) => private,
        }
    }

    /// The private slot of the first group's slot after a lease's path, which stays open.
    pub(crate) fn share_open(&mut self, id: LeaseId) -> PrivateSlotId {
        let lease = &self.leases[&id];
        let next = path_border(lease.path.blocks());
        let private = self.as_private(lease.groups[0].written.get(next).expect("an open slot"));
        self.lease_mut(id).groups[0].written.replace(next, OpenSlot::Private(private));
        private
    }

    /// The stores to finish before a write to an open slot of a group.
    pub(crate) fn open_slot_waits(&self, group: GroupId, open: OpenSlot) -> MoveIds {
        match open {
            OpenSlot::Plain(slot) => self.blocks.waits(Place::new(0, group), slot),
            OpenSlot::Private(private) => self.private_waits(private),
        }
    }

    /// Returns an open slot of a lease.
    pub(crate) fn close_open(&mut self, group: GroupId, open: OpenSlot) {
        match open {
            OpenSlot::Plain(slot) => self.blocks.give_slot(Place::new(0, group), slot),
            OpenSlot::Private(private) => self.unref_private(private),
        }
    }

    /// Returns all open slots of a lease.
    pub(crate) fn close_slots(&mut self, groups: &mut LeaseGroups) {
        for (group, slots) in groups.slots.iter_mut().enumerate() {
            for list in [&mut slots.written, &mut slots.spare] {
                while let Some(run) = list.pop() {
                    for open in run {
                        self.close_open(group, open);
                    }
                }
            }
        }
    }

    /// Ends all holds of a lease on a path.
    pub(crate) fn end_holds(&mut self, groups: &mut LeaseGroups, path: &[BlockId]) {
        for (group, slots) in groups.slots.iter_mut().enumerate().skip(1) {
            self.blocks.unhold(Place::new(0, group), blocks_at(path, &slots.held));
            slots.held.clear();
        }
    }

    /// Moves a lease's holds to the border of a path where it resumes.
    pub(in crate::manager::request) fn move_holds(
        &mut self,
        id: LeaseId,
        path: &[BlockId],
        border: u32,
    ) {
        let mut groups = std::mem::take(&mut *self.lease_mut(id).groups);
        self.end_holds(&mut groups, path);
        for Part { group, block } in self.points.needs(&path[..border as usize], border) {
            self.blocks.hold(Place::new(0, group), [block]);
            groups[group].held.push(self.trie().depth(block));
        }
        groups.done = border;
        *self.lease_mut(id).groups = groups;
    }
}
