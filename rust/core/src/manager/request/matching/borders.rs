//! Borders: where a request of a model with several groups goes on.
//!
//! A missing window or state cannot be computed by itself: that takes a pass from an earlier border.
//! So of all borders the one is chosen at which a request is ready first: what it needs is loaded, and
//! the rest of the prompt computed. A hole before it is computed where the windows before the hole are
//! there. Invariant: nothing changes. Cost: O(blocks) per border that is
//! compared: the longest one, the longest on the first tier alone and the points between them.

use crate::block::{BlockId, Part, Place};
use crate::manager::Manager;
use crate::manager::kinds::LoadMode;
use crate::manager::request::life::acquire::Acquire;
use crate::time::Nanos;

impl Manager {
    /// The border of a path at which a request goes on.
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
        let near = &path[..absent.map_or(path.len(), |miss| miss.at).min(path.len())];
        let near = self.usable_border(near, 1);
        let far = self.usable_border(path, self.tiers.len());
        match ask.load {
            LoadMode::None => near,
            LoadMode::All => far,
            LoadMode::Plan => {
                let points = (near + 1..far).filter(|&border| {
                    let before = &path[..border as usize];
                    self.points.has(before[before.len() - 1])
                        && self.usable_border(before, self.tiers.len()) == border
                });
                let borders = std::iter::once(near).chain(points).chain([far]);
                // Of equal ones the longest: its blocks need no slots of their own.
                let ready = |&border: &u32| {
                    let ready = self.ready_from(ask, &path[..border as usize], now);
                    (border > near && ready.is_none(), ready, u32::MAX - border)
                };
                borders.min_by_key(ready).unwrap_or(near)
            }
        }
    }

    /// When a request that goes on after a path is ready; `None` if its loads miss the deadline.
    fn ready_from(&self, ask: &Acquire<'_>, path: &[BlockId], now: Nanos) -> Option<Nanos> {
        let mut missing = self.scan(path, now);
        let plan = self.decide_loads(&mut missing, now, self.prefill(ask, path.len()));
        let loaded = self.windows_ready(path, plan.resident_at, now);
        let late = ask.deadline.is_some_and(|deadline| loaded > deadline && loaded > now);
        (!late).then(|| plan.finish.saturating_add(loaded - plan.resident_at))
    }

    /// When all that a resume after a path, and the holes in it, need of the groups after the first is on
    /// the first tier, if its loads begin after those that end at `since`.
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
            let mut there = arrival.map_or(now, |arrival| arrival.ready);
            if tier > 0 {
                let bytes = self.points.groups[group].slot_bytes;
                let takes = self.lanes.takes(self.tiers[tier].read, bytes);
                free[tier] = free[tier].max(there).saturating_add(takes);
                there = free[tier];
            }
            ready = ready.max(there);
        }
        ready
    }
}
