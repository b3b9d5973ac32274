//! Windows: the slots of a lease in the groups after the first, and room for all groups at once.
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
//! Invariant: room is made for all groups or for none. Cost: O(blocks committed · groups).

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;

use crate::block::{BlockId, LeaseId, Slot, Token};
use crate::error::{Error, Result};
use crate::group::{Group, GroupKind};
use crate::manager::Manager;
use crate::manager::request::acquire::Acquire;
use crate::manager::request::lease::Lease;
use crate::residency::GroupSlots;
use crate::scope::{Scope, ScopeId};
use crate::time::{Nanos, stamp};
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
    /// Blocks of the path that have their slots.
    done: u32,
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
    ) -> Option<Box<Windows>> {
        let points = self.points.as_ref()?;
        let place = |blocks: usize| u32::try_from(blocks).expect("fewer than 2^32 blocks");
        let (known, end) = (place(path.len()), place(ask.tokens.len() / self.block_tokens()));
        let leaves = scope.is_some_and(|scope| self.leaves_path(ask, scope, path));
        self.cut_to_groups(path);
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

    /// Which blocks of a sequence each group has, of those that the first group has.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
    pub fn group_map(&self, tokens: &[Token], scope: &Scope) -> Result<Vec<Vec<bool>>> {
        self.open()?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, tokens);
        let path = self.path(id, Query::Tokens(&content), 0, 0);
        let others = self.points.as_ref().map_or(0, |points| points.groups.len());
        let has = |at| path.iter().map(move |&block| self.blocks.group_slot(at, block).is_some());
        let others = (0..others).map(|at| has(at).collect());
        Ok(std::iter::once(vec![true; path.len()]).chain(others).collect())
    }

    /// Slots of each group on the first tier; none of a model with one group.
    #[must_use]
    pub fn group_slots(&self) -> Vec<GroupSlots> {
        self.blocks.group_slots()
    }

    /// Holds what the match needs, and takes room for `open` blocks and their windows.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; nothing but the holds has changed then.
    pub(crate) fn open_windows(
        &mut self,
        windows: Option<&mut Windows>,
        path: &[BlockId],
        open: usize,
        now: Nanos,
    ) -> Result<()> {
        let Some(windows) = windows else { return Ok(()) };
        let points = self.points.as_ref().expect("a model of several groups");
        let border = path_border(path);
        let needed = points.groups.iter().map(|group| group.needed(border, points.block_tokens));
        windows.held = needed.map(|needed| needed.iter().collect()).collect();
        for (at, held) in windows.held.iter().enumerate() {
            for &block in held {
                self.blocks.hold_group(at, path[block as usize]);
            }
        }
        let mut wanted = vec![open as u64];
        wanted.extend(&windows.wanted);
        self.make_group_room(&wanted, (path, &windows.held), now)?;
        for (at, &slots) in windows.wanted.iter().enumerate() {
            let taken = (0..slots).map(|_| self.blocks.take_group_slot(at).expect("room was made"));
            windows.open[at] = taken.collect();
        }
        Ok(())
    }

    /// Gives all slots and holds of a lease back.
    pub(crate) fn close_windows(&mut self, windows: Option<&mut Windows>, path: &[BlockId]) {
        let Some(windows) = windows else { return };
        for (at, (held, open)) in windows.held.iter_mut().zip(&mut windows.open).enumerate() {
            for block in held.drain(..) {
                self.blocks.unhold_group(at, path[block as usize]);
            }
            for slot in open.drain(..) {
                self.blocks.give_group_slot(at, slot);
            }
        }
    }

    /// Keeps the border of a match as a resume point where the prompt leaves a known path or ends.
    pub(crate) fn keep_matched(&mut self, windows: Option<&Windows>, path: &[BlockId]) {
        if let Some(kept) = windows.and_then(|windows| windows.here) {
            self.add_point(path, path_border(path), kept);
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
            if self.blocks.group_slot(at, block).is_none() {
                // A state is there only where a pass ends.
                if state && !wanted {
                    continue;
                }
                let slot = if wanted {
                    self.window_slot(at, windows, path, end)
                } else {
                    self.blocks.take_group_slot(at)
                };
                let Some(slot) = slot else { continue };
                self.blocks.settle_group(at, block, slot);
            }
            if wanted {
                self.blocks.hold_group(at, block);
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
            if let Some(slot) = self.blocks.take_group_slot(at) {
                return Some(slot);
            }
            if !self.blocks.take_released() {
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
                blocks.unhold_group(at, path[place as usize]);
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

    /// Makes room for this number of slots of each group: free slots, then released ones, then victims
    /// by value, or changes nothing. The first group's are in its space then.
    ///
    /// # Errors
    /// [`Error::NoSpace`] in bytes of pages, if leases hold too many.
    pub(crate) fn make_group_room(
        &mut self,
        wanted: &[u64],
        held: (&[BlockId], &[Vec<u32>]),
        now: Nanos,
    ) -> Result<()> {
        self.blocks.unstock();
        if !self.groups_fit(wanted) {
            self.check_group_room(wanted, held)?;
        }
        while !self.groups_fit(wanted) {
            if self.blocks.take_released() {
                continue;
            }
            let Some(victim) = self.tiers[0].eviction.victim(stamp(now)) else {
                return Err(self.no_pages(wanted));
            };
            if self.has_point(victim.id) {
                self.drop_point(victim.id);
                continue;
            }
            let slots = self.useless(victim.id, wanted);
            let set = self.decide_room(&[(0, slots)], &[], now)?;
            self.apply(&set, now);
            self.keep(set);
            self.blocks.unstock();
        }
        self.blocks.stock(wanted[0]);
        Ok(())
    }

    /// Blocks of a run up to a victim that serve no resume point, as far as room is wanted: they leave
    /// before any point.
    fn useless(&self, victim: BlockId, wanted: &[u64]) -> u64 {
        let (Some(points), Some(arena)) = (&self.points, self.blocks.arena()) else { return 1 };
        let run = self.trie().run(victim).start..victim + 1;
        let point =
            points.at.range(run.clone()).next_back().map_or(run.start, |(point, _)| point + 1);
        let pages = arena.lacking(wanted).max(1);
        u64::from(run.end - point).min(pages.saturating_mul(u64::from(arena.per_page(0))))
    }

    fn groups_fit(&self, wanted: &[u64]) -> bool {
        self.blocks.arena().is_some_and(|arena| arena.fits(wanted))
    }

    /// Fails if the slots that leases and the request at hand hold, and those of the points on their
    /// paths, leave too few pages. Cost: O(their paths).
    fn check_group_room(
        &self,
        wanted: &[u64],
        (path, held): (&[BlockId], &[Vec<u32>]),
    ) -> Result<()> {
        let Some(arena) = self.blocks.arena() else { return Ok(()) };
        let mut fixed: FxHashSet<(usize, Slot)> = FxHashSet::default();
        let mut leased: FxHashSet<BlockId> = FxHashSet::default();
        let mut fix = |path: &[BlockId], held: &[Vec<u32>]| {
            for (at, held) in held.iter().enumerate() {
                let slot = |&place| self.blocks.group_slot(at, path[place as usize]);
                fixed.extend(held.iter().filter_map(slot).map(|slot| (at + 1, slot)));
            }
            let shared = path.iter().copied().filter(|&block| leased.insert(block));
            for block in shared {
                fixed.insert((0, self.residency(0, block).slot));
                if self.has_point(block) {
                    let path = self.path_to(Some(block));
                    let needs = self.needs(&path, path_border(&path)).into_iter();
                    let slot = |(at, block)| Some((at + 1, self.blocks.group_slot(at, block)?));
                    fixed.extend(needs.filter_map(slot));
                }
            }
        };
        fix(path, held);
        for lease in self.leases.values() {
            let held = lease.windows.as_ref().map_or(&[][..], |windows| &windows.held);
            fix(lease.path.blocks(), held);
        }
        for lease in self.leases.values() {
            fixed.extend(lease.open.iter().map(|&open| (0, self.open_slot(open, 0))));
            fixed.extend(lease.path.private_slots().map(|id| (0, self.private_slot(id, 0))));
            let open = lease.windows.iter().flat_map(|windows| windows.open.iter().enumerate());
            fixed.extend(open.flat_map(|(at, open)| open.iter().map(move |&slot| (at + 1, slot))));
        }
        let mut spare = vec![0_u64; wanted.len().max(arena.groups())];
        let mut pages: FxHashSet<(usize, u32)> = FxHashSet::default();
        for &(group, slot) in &fixed {
            let per_page = arena.per_page(group);
            if pages.insert((group, slot / u32::from(per_page))) {
                spare[group] += u64::from(per_page);
            }
            spare[group] -= 1;
        }
        let lacking = wanted.iter().zip(&spare).enumerate().map(|(group, (wanted, spare))| {
            wanted.saturating_sub(*spare).div_ceil(u64::from(arena.per_page(group)))
        });
        if lacking.sum::<u64>() + pages.len() as u64 <= u64::from(arena.room()) {
            return Ok(());
        }
        Err(self.no_pages(wanted))
    }

    fn no_pages(&self, wanted: &[u64]) -> Error {
        self.no_space(0, wanted[0], &self.eviction_set())
    }
}

/// The border after a path.
fn path_border(path: &[BlockId]) -> u32 {
    u32::try_from(path.len()).expect("fewer than 2^32 blocks")
}
