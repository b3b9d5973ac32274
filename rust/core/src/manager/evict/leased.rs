//! Leased slots: the first tier's slots held by leases, the room left for them to grow, and the
//! error of a request without room.
//!
//! If several groups share pages, a page is leased if a lease has a slot in it or a resume point of
//! its path there: this point leaves after the lease. Invariant: none, these are sums. Cost:
//! O(leases' paths).

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;

use crate::block::{BlockId, GroupId, LeaseId, Part, Place, Slot, TierId};
use crate::error::{Error, Result};
use crate::manager::Manager;
use crate::manager::evict::set::EvictionSet;
use crate::manager::request::life::lease::{Lease, TailFrom};
use crate::manager::request::matching::path::{blocks_at, path_border};
use crate::manager::request::slots::lease_slots::{LeaseSlots, OpenSlot};
use crate::residency::Arena;
use crate::tier::ResidencyState;

/// Matched path of a request, and its held blocks by group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Matched<'a> {
    pub(crate) path: &'a [BlockId],
    pub(crate) groups: &'a [LeaseSlots],
}

/// Slots of the first tier by group, and the blocks visited so far.
#[derive(Default)]
struct Leased {
    slots: FxHashSet<(GroupId, Slot)>,
    blocks: FxHashSet<BlockId>,
}

impl Leased {
    fn pages(&self, arena: &Arena) -> FxHashSet<(GroupId, u32)> {
        self.slots.iter().map(|&(group, slot)| (group, arena.page(group, slot))).collect()
    }
}

impl Manager {
    /// The error of a request without room, with its figures: in slots, or in pages if several
    /// groups share them.
    pub(in crate::manager) fn no_space(
        &self,
        tier: TierId,
        wanted: &[u64],
        set: &EvictionSet,
    ) -> Error {
        let arena = self.blocks.arena(tier);
        let units = |slots: &[u64]| match arena {
            None => slots[0],
            Some(arena) => (0..).zip(slots).map(|(group, &n)| arena.whole_pages(group, n)).sum(),
        };
        let groups = 0..arena.map_or(1, Arena::groups);
        let coming =
            groups.map(|group| self.blocks.table(Place::new(tier, group)).arrivals() as u64);
        Error::NoSpace {
            tier: self.tiers[tier].spec.kind.name().to_owned(),
            unit: if arena.is_some() { "pages" } else { "slots" },
            wanted: units(wanted),
            free: Self::spare(set, tier),
            coming: units(&coming.collect::<Vec<_>>()),
            leased: match arena.filter(|_| tier == 0) {
                Some(arena) => self.leased_slots(Matched::default()).pages(arena).len() as u64,
                None if tier == 0 => self.leased(0),
                None => 0,
            },
        }
    }

    /// Fails if slots for a request would leave running leases less than the first tier's growth
    /// reserve.
    ///
    /// # Errors
    /// [`Error::NoSpace`].
    pub(in crate::manager) fn check_growth(
        &self,
        wanted: &[u64],
        matched: Matched<'_>,
    ) -> Result<()> {
        // Counting leased slots takes O(leases' blocks), so only a tier with a growth reserve pays
        // for it. A request without new slots leaves the reserve as it is.
        let share = self.tiers[0].spec.growth_reserve;
        if share == 0.0 || wanted.iter().all(|&slots| slots == 0) {
            return Ok(());
        }
        let arena = self.blocks.arena(0);
        let room = arena.map_or_else(|| self.blocks.space(0).capacity(), Arena::room);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share below one of a capacity below 2^32"
        )]
        let growth = (f64::from(room) * share) as u64;
        let held = match arena {
            Some(arena) => self.pages_with(arena, wanted, matched),
            None => self.leased(0) + wanted[0],
        };
        if growth > 0 && held + growth > u64::from(room) {
            return Err(self.no_space(0, wanted, &self.eviction_set()));
        }
        Ok(())
    }

    /// Pages needed for leases, a match and further slots of each group together.
    fn pages_with(&self, arena: &Arena, wanted: &[u64], matched: Matched<'_>) -> u64 {
        let leased = self.leased_slots(matched);
        let pages = leased.pages(arena);
        let more = wanted.iter().enumerate().map(|(group, &wanted)| {
            let per_page = u64::from(arena.per_page(group));
            let of_group = |&&(of, _): &&(GroupId, u32)| of == group;
            let pages = pages.iter().filter(of_group).count() as u64;
            let live = leased.slots.iter().filter(|&&(of, _)| of == group).count() as u64;
            wanted.saturating_sub(pages * per_page - live).div_ceil(per_page)
        });
        pages.len() as u64 + more.sum::<u64>()
    }

    /// Number of slots of the first group of a tier held by leases.
    fn leased(&self, tier: TierId) -> u64 {
        let private: u64 = self
            .private_slots
            .iter()
            .filter(|(_, private)| private.tier == tier && private.refs > 0)
            .map(|(_, private)| self.tiers.units(tier, private.layers))
            .sum();
        let (mut blocks, mut plain) = (BTreeSet::new(), 0);
        for lease in self.leases.values() {
            blocks.extend(lease.path.blocks().iter().copied());
            let open = lease.groups[0].written.slots();
            plain += open.filter_map(OpenSlot::plain).count() as u64;
        }
        let shared: u64 = blocks
            .into_iter()
            .map(|block| self.expected(tier, block))
            .filter(|layers| !layers.is_empty())
            .map(|layers| self.tiers.units(tier, layers))
            .sum();
        private + plain * self.tiers.units(tier, self.all_layers()) + shared
    }

    /// Slots of all groups held by leases and a match on the first tier, without spare slots, which
    /// are returned on demand.
    fn leased_slots(&self, matched: Matched<'_>) -> Leased {
        let mut leased = Leased::default();
        self.lease_match(&mut leased, matched);
        for lease in self.leases.values() {
            let groups = lease.groups.all();
            self.lease_match(&mut leased, Matched { path: lease.path.blocks(), groups });
            // Forks share the slot of their tail until they reserve.
            let tail = match lease.tail_from {
                TailFrom::Shared(private) => Some(private),
                TailFrom::OpenSlot | TailFrom::Block(_) => None,
            };
            let private = lease.path.private_slots().chain(tail);
            leased.slots.extend(private.map(|id| (0, self.private_slot(id, 0))));
            for (group, slots) in groups.iter().enumerate() {
                let written = slots.written.slots();
                leased.slots.extend(written.map(|open| (group, self.open_slot(open, 0))));
            }
        }
        leased
    }

    /// Adds the first tier's blocks of a match, its held blocks, and the points on its path.
    fn lease_match(&self, leased: &mut Leased, Matched { path, groups }: Matched<'_>) {
        let slot = |group, block| (group, self.residency(Place::new(0, group), block).slot);
        for (group, slots) in groups.iter().enumerate() {
            leased.slots.extend(blocks_at(path, &slots.held).map(|block| slot(group, block)));
        }
        for (at, &block) in path.iter().enumerate().rev() {
            if !leased.blocks.insert(block) {
                break;
            }
            if self.residency(0, block).state != ResidencyState::Absent {
                leased.slots.insert(slot(0, block));
            }
            if self.points.has_on(0, block) {
                let path = &path[..=at];
                let needs = self.points.needs(path, path_border(path)).into_iter();
                leased.slots.extend(needs.map(|Part { group, block }| slot(group, block)));
            }
        }
    }

    /// The latest lease with spare slots before a given lease. The order is fixed so that equal
    /// calls take equal slots.
    pub(crate) fn spare_lease(&self, before: LeaseId) -> Option<&Lease> {
        let has = |lease: &&Lease| lease.id < before && lease.spare_slots().next().is_some();
        self.leases.values().map(Box::as_ref).filter(has).max_by_key(|lease| lease.id)
    }

    /// Returns the spare slots of leases.
    pub(crate) fn give_spare_slots(&mut self, leases: &[LeaseId]) {
        for id in leases {
            let Some(lease) = self.leases.get_mut(id) else { continue };
            for (group, slots) in lease.groups.all_mut().iter_mut().enumerate() {
                for (_, open) in std::mem::take(&mut slots.spare).iter() {
                    let slot = open.plain().expect("taken while room is free");
                    self.blocks.give_slot(Place::new(0, group), slot);
                }
            }
        }
    }
}
