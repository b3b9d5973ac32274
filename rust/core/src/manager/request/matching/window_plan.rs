//! Plan of windows: the border at which a request resumes, and those at which later ones will.
//!
//! Invariant: every group has or expects what the border needs. Cost: O(path · groups) per request.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::block::{BlockId, LeaseId, Part, Token};
use crate::error::Result;
use crate::group::{Group, GroupKind};
use crate::manager::Manager;
use crate::manager::points::Stay;
use crate::manager::request::life::acquire::Acquire;
use crate::manager::request::slots::placed_slots::PlacedSlots;
use crate::manager::request::slots::window_slots::{LATER, Windows, span};
use crate::residency::GroupSlots;
use crate::scope::Scope;
use crate::time::Nanos;
use crate::trie::Query;

impl Manager {
    /// Cuts the path of a request to the border at which all groups resume, and plans the borders at
    /// which the next ones will.
    pub(crate) fn plan_windows(
        &self,
        ask: &Acquire<'_>,
        path: &mut Vec<BlockId>,
        now: Nanos,
    ) -> Option<Box<Windows>> {
        let points = &self.points;
        if !points.several() {
            return None;
        }
        let place = |blocks: usize| u32::try_from(blocks).expect("fewer than 2^32 blocks");
        let blocks = |tokens: usize| place(tokens / self.block_tokens());
        let (known, end) = (place(path.len()), blocks(ask.tokens.len()));
        // A repeat of the prompt goes on here: its last tokens are computed again.
        let repeat = blocks(ask.tokens.len().saturating_sub(ask.keep));
        let last = if repeat < end { Stay::Next } else { Stay::Newest };
        // The prompt leaves a path that is known further, or has come before.
        let leaves = path.last().is_some_and(|&last| self.trie().children(last).next().is_some());
        path.truncate(self.choose_border(ask, path, now) as usize);
        let from = place(path.len());
        let mut borders: Vec<(u32, Stay)> = Vec::new();
        if points.every > 0 {
            let regular = (from + 1..=end).filter(|border| border % points.every == 0);
            borders.extend(regular.map(|border| (border, Stay::Always)));
        } else {
            let leaves = leaves.then_some((known, Stay::Always));
            for (border, stay) in leaves.into_iter().chain([(repeat, last), (end, Stay::Newest)]) {
                if border > borders.last().map_or(from, |&(before, _)| before) {
                    borders.push((border, stay));
                }
            }
        }
        let named = self.named_borders(&ask.scope, ask.tokens);
        add_named(&mut borders, named.iter().copied().filter(|&border| border > from));
        // Blocks after the prompt's last full one: its partial one, and those of the answer.
        let written = ask.tokens.len().saturating_add(ask.reserve).div_ceil(self.block_tokens());
        let more = place(written) - end;
        let owned = !self.tiers.engine_owned();
        let more = if owned { more } else { 0 };
        let others = points.others();
        let wanted =
            others.map(|(_, group)| self.window_places(group, &borders, from..end.max(from), more));
        let stays = (leaves && known == from).then_some(Stay::Always);
        let here = stays.or((from == repeat).then_some(last));
        let here = here.filter(|_| points.every == 0 && from > 0);
        let here = if named.contains(&from) { Some(Stay::Always) } else { here };
        Some(Box::new(Windows {
            wanted: std::iter::once(Vec::new()).chain(wanted).collect(),
            loads: Vec::new(),
            held: vec![Vec::new(); points.groups.len()],
            open: vec![PlacedSlots::default(); points.groups.len()],
            spare: vec![PlacedSlots::default(); points.groups.len()],
            bound: vec![BTreeMap::new(); points.groups.len()],
            borders,
            done: from,
            end,
            here,
        }))
    }

    /// Places on a path for which a lease takes slots of a group: what its borders need of the blocks
    /// `new`, and `more` blocks after them as far as a token attends.
    pub(in crate::manager::request) fn window_places(
        &self,
        group: &Group,
        borders: &[(u32, Stay)],
        new: Range<u32>,
        more: u32,
    ) -> Vec<u32> {
        let size = self.points.block_tokens;
        let ends = borders.iter().map(|&(border, _)| border);
        // A state is there only at borders; a token attends to what the end of the prompt needs.
        let last = (group.kind != GroupKind::State).then_some(new.end);
        let needed = group.needed_at(ends.chain(last), size, new.clone());
        let after = new.end..new.end.saturating_add(more.min(span(group.kind, size)));
        // Where no bytes are written, the state of the end is let go before the next one has its slot.
        let later = last.is_none() && more > 1 && self.tiers.writes_bytes();
        needed.iter().chain(after).chain(later.then_some(LATER)).collect()
    }

    /// The borders, in blocks, at which a pass of a lease should end: each becomes a resume point.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn resume_borders(&self, id: LeaseId) -> Result<Vec<u32>> {
        Ok(self.lease(id)?.resume_borders().collect())
    }

    /// Which blocks of a sequence each group has or expects on any tier, of those up to the last one
    /// that the first group has.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
    pub fn group_map(&self, tokens: &[Token], scope: &Scope) -> Result<Vec<Vec<bool>>> {
        self.open()?;
        let Some(id) = self.scopes.find(scope)? else { return Ok(Vec::new()) };
        let content = self.scopes.digests.content(scope, 0, tokens);
        let path = self.path(id, Query::Tokens(&content), 0, 0);
        let on = |part| self.part_on(part, self.tiers.len());
        let has = |group| path.iter().map(|&block| on(Part { group, block })).collect();
        let others = self.points.other_numbers().map(has);
        let mut first = vec![true; path.len()];
        for hole in self.holes(&path) {
            first[hole as usize] = false;
        }
        Ok(std::iter::once(first).chain(others).collect())
    }

    /// Slots of each group on a tier; none of a model with one group.
    #[must_use]
    pub fn group_slots(&self, tier: usize) -> Vec<GroupSlots> {
        self.blocks.group_slots(tier)
    }
}

/// Adds borders that stay to those of a pass, which are ascending.
fn add_named(borders: &mut Vec<(u32, Stay)>, named: impl Iterator<Item = u32>) {
    for border in named {
        match borders.binary_search_by_key(&border, |&(known, _)| known) {
            Ok(at) => borders[at].1 = Stay::Always,
            Err(at) => borders.insert(at, (border, Stay::Always)),
        }
    }
}
