//! Audit of resume points: counts points, links, holds and slots again from scratch.
//!
//! Invariant: nothing changes. Cost: O(everything), so only tests call it after each operation.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::block::{Part, Place, TierId};
use crate::manager::Manager;
use crate::manager::points::Points;
use crate::manager::request::matching::path::blocks_at;
use crate::tier::{Kind, ResidencyState};
use crate::transfer::End;

/// Number of holders of each part of a block.
type Holds = FxHashMap<Part, u16>;

impl Manager {
    /// Checks that points, links and holds agree with each other, with the leases and with the
    /// moves in flight.
    pub(in crate::manager) fn audit_points(&self, broken: &mut Vec<String>) {
        let points = &self.points;
        self.audit_links(points, broken);
        for tier in 0..self.tiers.len() {
            let mut holds = self.point_holds(tier, points, broken);
            if self.tiers[tier].spec.kind == Kind::Remote {
                for &part in self.shared_stores.held() {
                    *holds.entry(part).or_default() += 1;
                }
            }
            let mut live = vec![0_u64; points.groups.len()];
            if tier == 0 {
                self.count_leases(&mut holds, &mut live, broken);
            }
            self.audit_groups(tier, &holds, live, broken);
        }
    }

    /// Number of holds by points and pins on a tier, by part.
    fn point_holds(&self, tier: TierId, points: &Points, broken: &mut Vec<String>) -> Holds {
        let mut holds = Holds::default();
        for (block, point) in points.all().filter(|(_, point)| point.tiers >> tier & 1 == 1) {
            let path = self.path_to(Some(block));
            if !self.can_resume(tier, &path, point.border) {
                broken.push(format!("nothing resumes on tier {tier} after block {block}"));
            }
            for held in self.points.needs(&path, point.border) {
                *holds.entry(held).or_default() += 1;
            }
        }
        for pinned in self.pins.parts(tier) {
            *holds.entry(pinned).or_default() += 1;
        }
        holds
    }

    /// Adds the holds of leases on the first tier.
    fn count_leases(&self, holds: &mut Holds, live: &mut [u64], broken: &mut Vec<String>) {
        let Some(arena) = self.blocks.arena(0) else { return };
        for lease in self.leases.values() {
            for (group, slots) in lease.groups.all().iter().enumerate() {
                for block in blocks_at(lease.path.blocks(), &slots.held) {
                    *holds.entry(Part { group, block }).or_default() += 1;
                }
            }
            let mut seen = BTreeSet::new();
            let open = lease.groups.open().filter_map(|(group, open)| Some((group, open.plain()?)));
            for (group, slot) in open {
                live[group] += 1;
                if !arena.is_live(group, slot) || !seen.insert((group, slot)) {
                    broken.push(format!("lease {} has a slot of group {group} twice", lease.id));
                }
            }
        }
    }

    /// Checks that residencies, holds and slots of a tier agree. `live` is the number of slots
    /// without a block, by group.
    fn audit_groups(
        &self,
        tier: TierId,
        holds: &Holds,
        mut live: Vec<u64>,
        broken: &mut Vec<String>,
    ) {
        let Some(arena) = self.blocks.arena(tier) else { return };
        for block in self.living() {
            for (group, live) in live.iter_mut().enumerate().skip(1) {
                let place = Place::new(tier, group);
                let seen = holds.get(&Part { group, block }).copied().unwrap_or(0);
                let residency = self.residency(place, block);
                let present = residency.state != ResidencyState::Absent;
                *live += u64::from(present);
                let (mut reads, mut writes) = (0, 0);
                for known in self.moves.values().filter(|known| usize::from(known.group) == group) {
                    let this = known.block == Some(self.trie().handle(block));
                    let written = known.to == End::Resident && known.dst == tier;
                    writes += u16::from(this && written);
                    let reading = self.blocks.readers(place, block).contains(&known.id);
                    reads += u16::from(this && known.src == tier && reading);
                }
                let arriving = residency.state == ResidencyState::Arriving;
                let lost = present && !arena.is_live(group, residency.slot);
                let moves = residency.busy != reads + writes || (writes == 1) != arriving;
                let kept = self.blocks.holds(place, block);
                if seen != kept || lost || moves || (seen > 0 && !present) {
                    broken.push(format!(
                        "block {block} is {residency:?} in group {group} on tier {tier} with \
                         {kept} holds, {seen} seen, read by {reads} moves and written by {writes}"
                    ));
                }
            }
        }
        for (group, counted) in live.into_iter().enumerate().skip(1) {
            if counted != arena.live(group) {
                broken.push(format!(
                    "group {group} has {counted} slots on tier {tier}, {} in its pages",
                    arena.live(group)
                ));
            }
        }
        let ended = arena.draining().find(|&id| !self.moves.contains(id));
        broken.extend(ended.map(|id| format!("move {id} has ended and drains a page")));
    }

    /// Checks the links of the points.
    fn audit_links(&self, points: &Points, broken: &mut Vec<String>) {
        let marked = self.living().filter(|&block| points.has(block)).count();
        if marked != points.at.len() {
            broken.push(format!("{marked} blocks are marked for {} points", points.at.len()));
        }
        for (block, point) in points.all() {
            let path = self.path_to(Some(block));
            if path.len() != point.border as usize || point.tiers == 0 {
                broken.push(format!("the point after block {block} is {point:?}"));
                continue;
            }
            let before = path[..path.len() - 1].iter().rev();
            let before = before.copied().find(|&block| points.has(block));
            let named = before.is_none_or(|before| points.at[&before].after.contains(&block));
            if before != point.before || !named {
                broken.push(format!("the point after block {block} is linked to {before:?}"));
            }
        }
        let linked: usize = points.all().map(|(_, point)| point.after.len()).sum();
        if linked != points.all().filter(|(_, point)| point.before.is_some()).count() {
            broken.push(format!("{linked} points are linked as after another"));
        }
    }
}
