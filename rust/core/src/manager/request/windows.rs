//! Windows: the slots of a lease in the groups after the first.
//!
//! A request matches up to a border at which every group can resume. Its lease holds what that needs,
//! takes slots for what its own borders will need, and gives each block its slots as it is committed:
//!
//! ```text
//!   match   border          branch            end of the prompt
//!   |-------|----------------|-----------------|------ answer
//!    [held ]            [ window of a point ]  [ window of a point ]   the rest: slots that are free
//! ```
//!
//! Invariant: a lease holds on the first tier what its border needs. Cost: O(blocks committed · groups).

use std::collections::BTreeSet;

use crate::block::{BlockId, LeaseId, MoveId, NO_SLOT, Slot, TierId, Token};
use crate::error::{Error, Result};
use crate::group::{Group, GroupKind};
use crate::manager::Manager;
use crate::manager::request::acquire::Acquire;
use crate::manager::request::lease::{Lease, Plan};
use crate::manager::request::residency_scan::MissingBlock;
use crate::residency::GroupSlots;
use crate::scope::{Scope, ScopeId};
use crate::tier::ResidencyState;
use crate::time::Nanos;
use crate::transfer::MoveKind;
use crate::trie::Query;

/// Slots of a lease in the groups after the first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows {
    /// Borders after the match that become resume points, ascending, and whether newer points leave
    /// them.
    pub(crate) borders: Vec<(u32, bool)>,
    /// By group, places on the path of the blocks that the lease holds, ascending.
    pub(crate) held: Vec<Vec<u32>>,
    /// By group, slots that no block has yet.
    pub(crate) open: Vec<Vec<Slot>>,
    /// Slots to take, by group.
    wanted: Vec<u64>,
    /// Groups and places on the path of what the match needs from the tier below.
    loads: Vec<(usize, u32)>,
    /// Blocks of the path that have their slots.
    pub(crate) done: u32,
    /// Whether the prompt leaves a known path at the end of the match, or ends there.
    here: Option<bool>,
}

impl Manager {
    /// Cuts the path of a request to the border at which all groups resume, and plans the borders at
    /// which the next ones will.
    pub(crate) fn plan_windows(
        &self,
        ask: &Acquire<'_>,
        scope: Option<ScopeId>,
        path: &mut Vec<BlockId>,
        now: Nanos,
    ) -> Option<Box<Windows>> {
        let points = self.points.as_ref()?;
        let place = |blocks: usize| u32::try_from(blocks).expect("fewer than 2^32 blocks");
        let (known, end) = (place(path.len()), place(ask.tokens.len() / self.block_tokens()));
        let leaves = scope.is_some_and(|scope| self.leaves_path(ask, scope, path));
        path.truncate(self.choose_border(ask, path, now) as usize);
        let from = place(path.len());
        let mut borders: Vec<(u32, bool)> = Vec::new();
        if points.every > 0 {
            let regular = (from + 1..=end).filter(|border| border % points.every == 0);
            borders.extend(regular.map(|border| (border, true)));
        } else {
            if leaves && known > from {
                borders.push((known, true));
            }
            if end > from {
                borders.push((end, false));
            }
        }
        // Blocks after the prompt's last full one: its partial one, and those of the answer.
        let written = ask.tokens.len().saturating_add(ask.reserve).div_ceil(self.block_tokens());
        let more = place(written) - end;
        let wanted = points
            .groups
            .iter()
            .map(|group| self.window_slots(group, &borders, from..end.max(from), u64::from(more)));
        let here = (points.every == 0 && from > 0)
            .then_some(leaves && known == from)
            .filter(|&leaves| leaves || from == end);
        Some(Box::new(Windows {
            wanted: wanted.collect(),
            loads: Vec::new(),
            held: vec![Vec::new(); points.groups.len()],
            open: vec![Vec::new(); points.groups.len()],
            borders,
            done: from,
            here,
        }))
    }

    /// Whether a prompt goes on after `path` with other tokens than a path that is known.
    fn leaves_path(&self, ask: &Acquire<'_>, scope: ScopeId, path: &[BlockId]) -> bool {
        let size = self.block_tokens();
        let content = self.scopes.digests.content(&ask.scope, 0, ask.tokens);
        let next = content.get(path.len() * size..(path.len() + 1) * size);
        let (Some(&last), Some(next)) = (path.last(), next) else { return false };
        let root = self.scopes.get(scope).root;
        self.trie().children(last).next().is_some()
            && self.trie().child(root, Some(last), next).is_none()
    }

    /// Slots of a group that a lease takes for blocks `new` of its path, their borders, and `more`
    /// blocks after them.
    fn window_slots(
        &self,
        group: &Group,
        borders: &[(u32, bool)],
        new: std::ops::Range<u32>,
        more: u64,
    ) -> u64 {
        let size = self.points.as_ref().map_or(1, |points| points.block_tokens);
        let span = match group.kind {
            GroupKind::State => return borders.len() as u64 + u64::from(more > 0),
            GroupKind::Full => u64::MAX,
            GroupKind::Sliding { window, .. } => window.div_ceil(size) + 1,
            GroupKind::Chunked { chunk } => chunk.div_ceil(size) + 1,
        };
        let ends = borders.iter().map(|&(border, _)| border).chain(std::iter::once(new.end));
        let needed = ends.flat_map(|end| group.needed(end, size).iter());
        let needed: BTreeSet<u32> = needed.filter(|block| new.contains(block)).collect();
        needed.len() as u64 + more.min(span)
    }

    /// The borders, in blocks, at which a pass of a lease should end: each becomes a resume point.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn resume_borders(&self, id: LeaseId) -> Result<Vec<u32>> {
        let windows = self.lease(id)?.windows.as_ref();
        let borders = windows.into_iter().flat_map(|windows| &windows.borders);
        Ok(borders.map(|&(border, _)| border).collect())
    }

    /// Which blocks of a sequence each group has or expects on any tier, of those that the first group
    /// has.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
    pub fn group_map(&self, tokens: &[Token], scope: &Scope) -> Result<Vec<Vec<bool>>> {
        self.open()?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, tokens);
        let path = self.path(id, Query::Tokens(&content), 0, 0);
        let others = self.points.as_ref().map_or(0, |points| points.groups.len());
        let has = |at| path.iter().map(move |&block| self.group_on(at, block, self.tiers.len()));
        let others = (0..others).map(|at| has(at).collect());
        Ok(std::iter::once(vec![true; path.len()]).chain(others).collect())
    }

    /// Slots of each group on a tier; none of a model with one group.
    #[must_use]
    pub fn group_slots(&self, tier: usize) -> Vec<GroupSlots> {
        self.blocks.group_slots(tier)
    }

    /// Holds what the match needs, and takes room for `open` blocks and their windows.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing but the holds has changed then.
    pub(crate) fn open_windows(
        &mut self,
        windows: Option<&mut Windows>,
        path: &[BlockId],
        (open, missing): (usize, &[MissingBlock]),
        now: Nanos,
    ) -> Result<()> {
        let Some(windows) = windows else { return Ok(()) };
        let points = self.points.as_ref().expect("a model of several groups");
        let border = path_border(path);
        let needed = points.groups.iter().map(|group| group.needed(border, points.block_tokens));
        let needed: Vec<Vec<u32>> = needed.map(|needed| needed.iter().collect()).collect();
        let loads = missing.iter().filter(|miss| !miss.lacks.is_empty()).count();
        let mut wanted = vec![(open + loads) as u64];
        wanted.extend(&windows.wanted);
        for (at, needed) in needed.into_iter().enumerate() {
            for place in needed {
                // What is loaded stays below until the load has begun.
                let here = self.blocks.group_here(0, at, path[place as usize]);
                self.blocks.hold_group(usize::from(!here), at, path[place as usize]);
                if here {
                    windows.held[at].push(place);
                } else {
                    windows.loads.push((at, place));
                    wanted[at + 1] += 1;
                }
            }
        }
        self.make_group_room(&wanted, (path, &windows.held), now)?;
        for (at, &slots) in windows.wanted.iter().enumerate() {
            let take = |_| self.blocks.take_group_slot(0, at).expect("room was made");
            windows.open[at] = (0..slots).map(take).collect();
        }
        Ok(())
    }

    /// Begins the loads that a match needs, into slots for which there is room, and delays the plan
    /// until they end. The border of the match is a resume point on the first tier again if it is one
    /// below, or if the prompt leaves a known path or ends there. Returns all moves that bring what
    /// the match needs.
    pub(crate) fn load_windows(
        &mut self,
        windows: Option<&mut Windows>,
        path: &[BlockId],
        id: LeaseId,
        plan: &mut Plan,
        now: Nanos,
    ) -> Vec<MoveId> {
        let Some(windows) = windows else { return Vec::new() };
        for (at, place) in std::mem::take(&mut windows.loads) {
            let needed = (at, path[place as usize]);
            self.move_group((MoveKind::Load, id), needed, (1, 0), now);
            self.blocks.unhold_group(1, at, needed.1);
            self.blocks.hold_group(0, at, needed.1);
            windows.held[at].push(place);
            windows.held[at].sort_unstable();
        }
        if let Some(&last) = path.last()
            && self.has_point(last)
            && !self.has_point_on(0, last)
        {
            self.hold_point(0, path, path_border(path));
        }
        let held = windows.held.iter().enumerate();
        let held = held.flat_map(|(at, held)| held.iter().map(move |&place| (at, place)));
        let moves: Vec<MoveId> =
            held.flat_map(|(at, place)| self.bringing_group(0, at, path[place as usize])).collect();
        let ready = moves.iter().filter_map(|&id| self.moves.get(id)).map(|known| known.ready);
        plan.wait_until(ready.max().unwrap_or(0));
        if let Some(kept) = windows.here {
            self.add_point(path, path_border(path), kept);
        }
        moves
    }

    /// The block table of a lease in a group of layers, as [`Manager::slots`]. In a group after the
    /// first a slot on the first tier is one of those that the lease holds, and open slots have no
    /// block before it is committed.
    ///
    /// # Errors
    /// As [`Manager::slots`]; [`Error::Config`] if there is no such group.
    pub fn group_table(
        &self,
        id: LeaseId,
        tier: TierId,
        group: usize,
    ) -> Result<(usize, Vec<Slot>)> {
        let first = self.slots(id, tier)?;
        let groups = self.points.as_ref().map_or(1, |points| points.groups.len() + 1);
        if group >= groups {
            return Err(Error::config(format!(
                "there is no group {group}, the manager keeps {groups} apart"
            )));
        }
        let lease = &self.leases[&id];
        Ok(if group == 0 { first } else { (1, self.window_table(lease, tier, group - 1)) })
    }

    fn window_table(&self, lease: &Lease, tier: TierId, at: usize) -> Vec<Slot> {
        let held = lease.windows.as_ref().map_or(&[][..], |windows| &windows.held[at]);
        let path = (0..).zip(lease.path.blocks());
        let slot = |(place, &block): (u32, &BlockId)| {
            let has = tier > 0 || held.binary_search(&place).is_ok();
            let here = self.blocks.group_residency(tier, at, block);
            if has && here.state != ResidencyState::Bad { here.slot } else { NO_SLOT }
        };
        path.map(slot).collect()
    }

    /// The moves that still read slots which a lease is to write in groups after the first.
    pub(crate) fn window_waits<'a>(
        &'a self,
        lease: &'a Lease,
    ) -> impl Iterator<Item = MoveId> + 'a {
        let open = lease.windows.iter().flat_map(|windows| windows.open.iter().enumerate());
        let open = open.flat_map(|(at, open)| open.iter().map(move |&slot| (at, slot)));
        open.flat_map(|(at, slot)| self.blocks.group_waits(0, at, slot))
    }

    /// Gives all slots and holds of a lease back.
    pub(crate) fn close_windows(&mut self, windows: Option<&mut Windows>, path: &[BlockId]) {
        let Some(windows) = windows else { return };
        for (at, (held, open)) in windows.held.iter_mut().zip(&mut windows.open).enumerate() {
            for block in held.drain(..) {
                self.blocks.unhold_group(0, at, path[block as usize]);
            }
            for slot in open.drain(..) {
                self.blocks.give_group_slot(0, at, slot);
            }
        }
        for (at, place) in windows.loads.drain(..) {
            self.blocks.unhold_group(1, at, path[place as usize]);
        }
    }

    /// Gives the blocks that a lease has committed their slots, makes its borders resume points, and
    /// releases what no later token attends to.
    pub(crate) fn settle_windows(&mut self, id: LeaseId) {
        if self.points.is_none() {
            return;
        }
        let lease = self.lease_mut(id);
        let Some(mut windows) = lease.windows.take() else { return };
        let path = lease.path.blocks().to_vec();
        let end = path_border(&path);
        for at in 0..windows.held.len() {
            self.settle_group(at, &mut windows, &path, end);
        }
        let reached = windows.borders.partition_point(|&(border, _)| border <= end);
        for (border, kept) in windows.borders.drain(..reached) {
            self.add_point(&path, border, kept);
        }
        for at in 0..windows.held.len() {
            self.slide(at, &mut windows, &path, end);
        }
        windows.done = end;
        self.lease_mut(id).windows = Some(windows);
    }

    /// The same for one group: a slot for each new block that a border or the end needs, and for
    /// others as long as room is free.
    fn settle_group(&mut self, at: usize, windows: &mut Windows, path: &[BlockId], end: u32) {
        let points = self.points.as_ref().expect("a model of several groups");
        let (group, size) = (points.groups[at], points.block_tokens);
        let state = group.kind == GroupKind::State;
        let mut needed: BTreeSet<u32> = group.needed(end, size).iter().collect();
        for &(border, _) in &windows.borders {
            needed.extend(group.needed(border, size).iter());
        }
        for place in windows.done..end {
            let block = path[place as usize];
            let wanted = needed.contains(&place);
            if self.blocks.group_residency(0, at, block).slot == NO_SLOT {
                // A state is there only where a pass ends.
                if state && !wanted {
                    continue;
                }
                let slot = if wanted {
                    self.window_slot(at, windows, path, end)
                } else {
                    self.blocks.take_group_slot(0, at)
                };
                let Some(slot) = slot else { continue };
                self.blocks.settle_group(at, block, slot);
            }
            // A failed move may still write the slot that the block has.
            if wanted && self.blocks.group_here(0, at, block) {
                self.blocks.hold_group(0, at, block);
                windows.held[at].push(place);
            }
        }
    }

    /// A slot of a group for the next block of a lease: one that it has, one that it needs no more, or
    /// a free or released one.
    fn window_slot(
        &mut self,
        at: usize,
        windows: &mut Windows,
        path: &[BlockId],
        end: u32,
    ) -> Option<Slot> {
        if let Some(slot) = windows.open[at].pop() {
            return Some(slot);
        }
        self.slide(at, windows, path, end);
        loop {
            if let Some(slot) = self.blocks.take_group_slot(0, at) {
                return Some(slot);
            }
            if !self.blocks.take_released(0) {
                return None;
            }
        }
    }

    /// Releases what neither the end of a lease nor one of its borders needs.
    fn slide(&mut self, at: usize, windows: &mut Windows, path: &[BlockId], end: u32) {
        let points = self.points.as_ref().expect("a model of several groups");
        let (group, size) = (points.groups[at], points.block_tokens);
        let ends = windows.borders.iter().map(|&(border, _)| border).chain(std::iter::once(end));
        let needed: Vec<_> = ends.map(|end| group.needed(end, size)).collect();
        let blocks = &mut self.blocks;
        windows.held[at].retain(|&place| {
            let stays = needed.iter().any(|needed| needed.contains(place));
            if !stays {
                blocks.unhold_group(0, at, path[place as usize]);
            }
            stays
        });
    }

    /// Keeps the end of an answer as a resume point, and gives all slots and holds back.
    pub(crate) fn end_windows(&mut self, lease: &Lease) {
        let Some(windows) = &lease.windows else { return };
        let path = lease.path.blocks();
        let end = path_border(path);
        if self.points.as_ref().is_some_and(|points| points.every == 0) && windows.done == end {
            self.add_point(path, end, false);
        }
        self.close_windows(Some(&mut windows.as_ref().clone()), path);
    }
}

/// The border after a path.
pub(super) fn path_border(path: &[BlockId]) -> u32 {
    u32::try_from(path.len()).expect("fewer than 2^32 blocks")
}
