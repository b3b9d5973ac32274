//! Borders: the border where a request resumes, and the borders where its passes end so that later
//! requests can resume there.
//!
//! With a single group every border is resumable: a request resumes after its match. With several
//! groups, a missing window or state cannot be computed alone: that takes a pass from an earlier
//! border. So the border with the earliest ready time is chosen: its needs are loaded, and the rest
//! of the prompt is computed. A hole before it is computed if the windows before the hole are
//! resident. Invariant: nothing changes. Cost: O(blocks) per compared border: the longest border,
//! the longest border on the first tier alone and the points between them.

use std::ops::Range;

use crate::block::{BlockId, Part, Place};
use crate::group::{Group, GroupKind, Places};
use crate::manager::Manager;
use crate::manager::kinds::LoadMode;
use crate::manager::points::Stay;
use crate::manager::request::life::acquire::Acquire;
use crate::manager::request::matching::path::path_border;
use crate::manager::request::slots::lease_slots::{LATER, LeaseGroups};
use crate::time::Nanos;

impl Manager {
    /// Cuts the path of a request to a border resumable in all groups, and plans the resume borders
    /// for later requests.
    pub(crate) fn plan_borders(
        &self,
        ask: &Acquire<'_>,
        path: &mut Vec<BlockId>,
        now: Nanos,
    ) -> Box<LeaseGroups> {
        let points = &self.points;
        let mut groups = Box::new(LeaseGroups::of(points.groups.len()));
        if !points.several() {
            return groups;
        }
        let (known, end) = (path_border(path), self.full_blocks(ask.tokens.len()));
        // A repeated prompt resumes here, because its last tokens are computed again. An engine
        // with a shorter promised match keeps more tokens now than for the repeat.
        let keep = if self.tiers.engine_owned() { ask.keep.min(1) } else { ask.keep };
        let repeat = self.full_blocks(ask.tokens.len().saturating_sub(keep));
        let last = if repeat < end { Stay::Next } else { Stay::Newest };
        // Whether the prompt leaves a longer known path, or has come before.
        let leaves = path.last().is_some_and(|&last| self.trie().children(last).next().is_some());
        path.truncate(self.choose_border(ask, path, now) as usize);
        let from = path_border(path);
        let borders = &mut groups.borders;
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
        add_named(borders, named.iter().copied().filter(|&border| border > from));
        let stays = (leaves && known == from).then_some(Stay::Always);
        let match_stay = stays.or((from == repeat).then_some(last));
        let match_stay = match_stay.filter(|_| points.every == 0 && from > 0);
        groups.match_stay = if named.contains(&from) { Some(Stay::Always) } else { match_stay };
        (groups.done, groups.end) = (from, end);
        groups
    }

    /// Places on a path with new slots of a group for a lease: the needs of its borders within the
    /// blocks `new`, and `more` later blocks as far as a token attends.
    pub(in crate::manager::request) fn places_of(
        &self,
        group: &Group,
        borders: &[(u32, Stay)],
        new: Range<u32>,
        more: u32,
    ) -> Places {
        let size = self.points.block_tokens;
        let ends = borders.iter().map(|&(border, _)| border);
        // A state exists only at borders. A token attends to the needs of the prompt's end.
        let last = (group.kind != GroupKind::State).then_some(new.end);
        let after = new.end..new.end.saturating_add(more.min(group.span(size)));
        // If no bytes are written, the state of the end is released before the next state has its
        // slot.
        let later = last.is_none() && more > 1 && self.tiers.writes_bytes();
        let later = later.then_some(LATER..LATER + 1);
        let needed = group.needed_at(ends.chain(last), size, new);
        Places::of(needed.ranges().chain([after]).chain(later))
    }

    fn full_blocks(&self, tokens: usize) -> u32 {
        u32::try_from(tokens / self.block_tokens()).expect("fewer than 2^32 blocks")
    }

    /// The border of a path where a request resumes.
    pub(crate) fn choose_border(&self, ask: &Acquire<'_>, path: &[BlockId], now: Nanos) -> u32 {
        if self.tiers.len() == 1 {
            return self.usable_border(path, 1);
        }
        let missing = self.scan(path, now);
        // Without holes the match ends before a block that cannot be loaded.
        let computed = missing.iter().find(|miss| !miss.compute.is_empty());
        let computed = computed.filter(|_| self.holes(path).is_empty());
        let path = &path[..computed.map_or(path.len(), |miss| miss.at)];
        let absent = missing.iter().find(|miss| miss.compute.is_empty() && !miss.lacks.is_empty());
        let resident = &path[..absent.map_or(path.len(), |miss| miss.at).min(path.len())];
        let resident = self.usable_border(resident, 1);
        let far = self.usable_border(path, self.tiers.len());
        match ask.load {
            // An engine that owns the first tier chooses later what to load.
            LoadMode::None if !self.tiers.engine_owned() => resident,
            LoadMode::None | LoadMode::All => far,
            LoadMode::Plan => {
                let points = (resident + 1..far).filter(|&border| {
                    let before = &path[..border as usize];
                    self.points.has(before[before.len() - 1])
                        && self.usable_border(before, self.tiers.len()) == border
                });
                let borders = std::iter::once(resident).chain(points).chain([far]);
                // Of equal borders the longest: its blocks need no new slots.
                let ready = |&border: &u32| {
                    let ready = self.ready_from(ask, &path[..border as usize], now);
                    (border > resident && ready.is_none(), ready, u32::MAX - border)
                };
                borders.min_by_key(ready).unwrap_or(resident)
            }
        }
    }

    /// Ready time of a request that resumes after a path, or `None` if its loads miss the deadline.
    fn ready_from(&self, ask: &Acquire<'_>, path: &[BlockId], now: Nanos) -> Option<Nanos> {
        let mut missing = self.scan(path, now);
        let plan = self.decide_loads(&mut missing, now, self.prefill(ask, path.len()));
        let loaded = self.windows_ready(path, plan.resident_at, now);
        let late = ask.deadline.is_some_and(|deadline| loaded > deadline && loaded > now);
        (!late).then(|| plan.finish.saturating_add(loaded - plan.resident_at))
    }

    /// Time when the groups after the first have the needs of a resume after a path, and of its
    /// holes, on the first tier. Their loads start after the loads that end at `since`.
    fn windows_ready(&self, path: &[BlockId], since: Nanos, now: Nanos) -> Nanos {
        let free = self.tiers.iter().map(|tier| since.max(self.lanes.free_at(tier.read)));
        let (mut ready, mut free) = (since, free.collect::<Vec<_>>());
        let holes = self.holes(path);
        let needed = self.points.needed_over(&holes, path).into_iter().enumerate();
        let places = needed.flat_map(|(group, places)| {
            let places: Vec<u32> = places.iter().collect();
            places.into_iter().map(move |place| (group, place))
        });
        for (group, place) in places.filter(|(_, place)| holes.binary_search(place).is_err()) {
            let block = path[place as usize];
            let tier = self.nearest(Part { group, block });
            let arrival = self.arrival(Place::new(tier, group), block);
            let mut arrives = arrival.map_or(now, |arrival| arrival.ready);
            if tier > 0 {
                let bytes = self.points.groups[group].slot_bytes;
                let takes = self.lanes.takes(self.tiers[tier].read, bytes);
                free[tier] = free[tier].max(arrives).saturating_add(takes);
                arrives = free[tier];
            }
            ready = ready.max(arrives);
        }
        ready
    }
}

/// Adds lasting borders to the ascending borders of a pass.
fn add_named(borders: &mut Vec<(u32, Stay)>, named: impl Iterator<Item = u32>) {
    for border in named {
        match borders.binary_search_by_key(&border, |&(known, _)| known) {
            Ok(at) => borders[at].1 = Stay::Always,
            Err(at) => borders.insert(at, (border, Stay::Always)),
        }
    }
}
