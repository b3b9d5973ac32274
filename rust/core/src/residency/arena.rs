//! Arena: a common pool of pages. Each group of a tier divides its pages into slots of its own
//! size.
//!
//! ```text
//!   page 0: group 0 | s s s s s    page 1: group 1 | S    page 2: free    ...
//!   slot = page · slots per page + place: a number of its group; its bytes are at
//!   page · page bytes + place · slot bytes
//! ```
//!
//! A slot may be freed while moves still read it. The next holder of a slot in the page waits for
//! these moves. Invariant: a page is free, or belongs to a group and has a live slot, so freeing
//! the last slot frees the page. Cost: O(1) per slot. O(draining pages) per ended move. A byte per
//! page, 4 per free page, and about 60 per page with both live and free slots.

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::arrival::MoveIds;
use crate::block::{MoveId, Slot};

/// Places of free slots in a page.
type FreePlaces = SmallVec<[u16; 8]>;

/// Group of a free page.
const FREE: u8 = u8::MAX;

/// A group's share of an arena.
#[derive(Clone, Debug, Default)]
struct Share {
    /// Slots per page.
    per_page: u16,
    /// Pages with both live and free slots, with the places of their free slots. The last is taken
    /// first.
    open: Vec<(u32, FreePlaces)>,
    /// Index of each page in `open`.
    at: FxHashMap<u32, u32>,
    /// Free slots in those pages.
    free: u64,
    live: u64,
}

/// Pages of a tier.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    /// Group of each page ever used, or [`FREE`].
    pages: Vec<u8>,
    /// Number of pages.
    room: u32,
    /// Free pages used before.
    free: Vec<u32>,
    shares: Vec<Share>,
    /// Pages with freed slots still being read, with the reading moves.
    draining: FxHashMap<u32, MoveIds>,
}

impl Arena {
    /// Creates `pages` free pages. Each group divides its pages into `per_page` slots.
    #[must_use]
    pub(crate) fn new(pages: u32, per_page: &[u16]) -> Self {
        let shares = per_page.iter().map(|&per_page| Share { per_page, ..Share::default() });
        Self {
            pages: Vec::new(),
            room: pages,
            free: Vec::new(),
            shares: shares.collect(),
            draining: FxHashMap::default(),
        }
    }

    /// Number of pages.
    #[must_use]
    pub(crate) fn room(&self) -> u32 {
        self.room
    }

    /// Number of groups.
    #[must_use]
    pub(crate) fn groups(&self) -> usize {
        self.shares.len()
    }

    /// Slots per page of a group.
    #[must_use]
    pub(crate) fn per_page(&self, group: usize) -> u16 {
        self.shares[group].per_page
    }

    /// Number of free pages.
    #[must_use]
    pub(crate) fn free_pages(&self) -> u64 {
        u64::from(self.room) - self.pages.len() as u64 + self.free.len() as u64
    }

    /// Free slots in the pages of a group.
    #[must_use]
    pub(crate) fn free(&self, group: usize) -> u64 {
        self.shares[group].free
    }

    /// Live slots of a group.
    #[must_use]
    pub(crate) fn live(&self, group: usize) -> u64 {
        self.shares[group].live
    }

    /// Number of slots available to a group.
    #[must_use]
    pub(crate) fn takeable(&self, group: usize) -> u64 {
        let Share { per_page, free, .. } = self.shares[group];
        free + self.free_pages() * u64::from(per_page)
    }

    /// Number of new pages needed for `slots` more slots of a group.
    #[must_use]
    pub(crate) fn pages_for(&self, group: usize, slots: u64) -> u64 {
        let Share { per_page, free, .. } = self.shares[group];
        slots.saturating_sub(free).div_ceil(u64::from(per_page))
    }

    /// Number of pages for this number of slots of a group, ignoring its existing pages.
    #[must_use]
    pub(crate) fn whole_pages(&self, group: usize, slots: u64) -> u64 {
        slots.div_ceil(u64::from(self.shares[group].per_page))
    }

    /// Number of missing pages for this number of slots of each group.
    #[must_use]
    pub(crate) fn lacking(&self, slots: &[u64]) -> u64 {
        let pages = slots.iter().enumerate().map(|(group, &slots)| self.pages_for(group, slots));
        pages.sum::<u64>().saturating_sub(self.free_pages())
    }

    /// Whether this number of slots of each group is available.
    #[must_use]
    pub(crate) fn fits(&self, slots: &[u64]) -> bool {
        self.lacking(slots) == 0
    }

    /// Allocates a slot of a group, preferably in an open page of the group.
    pub(crate) fn take(&mut self, group: usize) -> Option<Slot> {
        if self.shares[group].open.is_empty() {
            let page = self.free.pop().or_else(|| self.unused_page())?;
            return Some(self.cut(group, page, 0));
        }
        let share = &mut self.shares[group];
        let (page, places) = share.open.last_mut().expect("seen above");
        let (page, place) = (*page, places.pop().expect("an open page has a free slot"));
        if places.is_empty() {
            share.close(page);
        }
        (share.free, share.live) = (share.free - 1, share.live + 1);
        Some(page * u32::from(share.per_page) + u32::from(place))
    }

    /// Allocates a specific slot of a group, if it is free in a page of the group or in a free
    /// page. Cost: O(free pages).
    pub(crate) fn claim(&mut self, group: usize, slot: Slot) -> bool {
        let (page, place) = self.place(group, slot);
        if page >= self.room {
            return false;
        }
        while self.pages.len() as u64 <= u64::from(page) {
            let unused = self.unused_page().expect("no more than the room");
            self.free.push(unused);
        }
        if self.pages[page as usize] == FREE {
            let known = self.free.iter().rposition(|&free| free == page).expect("a free page");
            self.free.remove(known);
            self.cut(group, page, place);
            return true;
        }
        let share = &mut self.shares[group];
        // Pages of different groups are not in its list.
        let Some(&at) = share.at.get(&page) else { return false };
        let places = &mut share.open[at as usize].1;
        let Some(known) = places.iter().position(|&free| free == place) else { return false };
        places.remove(known);
        if places.is_empty() {
            share.close(page);
        }
        (share.free, share.live) = (share.free - 1, share.live + 1);
        true
    }

    /// Frees a live slot of a group, and the page with its last slot.
    pub(crate) fn give(&mut self, group: usize, slot: Slot) {
        debug_assert!(self.is_live(group, slot), "slot {slot} of group {group} is not live");
        let (page, place) = self.place(group, slot);
        let share = &mut self.shares[group];
        (share.free, share.live) = (share.free + 1, share.live - 1);
        let open = if share.per_page == 1 { None } else { share.at.get(&page) };
        let free = match open {
            Some(&at) => {
                let places = &mut share.open[at as usize].1;
                places.push(place);
                places.len()
            }
            None => 1,
        };
        if free == usize::from(share.per_page) {
            if free > 1 {
                share.close(page);
            }
            share.free -= free as u64;
            self.pages[page as usize] = FREE;
            self.free.push(page);
        } else if free == 1 {
            share.open(page, smallvec![place]);
        }
    }

    /// Adds an unused page for the caller.
    fn unused_page(&mut self) -> Option<u32> {
        let page = u32::try_from(self.pages.len()).ok().filter(|&page| page < self.room)?;
        self.pages.push(FREE);
        Some(page)
    }

    /// Divides a free page into slots of a group, and allocates the slot at `place`.
    fn cut(&mut self, group: usize, page: u32, place: u16) -> Slot {
        self.pages[page as usize] = u8::try_from(group).expect("few groups");
        let share = &mut self.shares[group];
        share.live += 1;
        share.free += u64::from(share.per_page - 1);
        if share.per_page > 1 {
            // The lowest place is taken first.
            let free = (0..share.per_page).rev().filter(|&other| other != place);
            share.open(page, free.collect());
        }
        page * u32::from(share.per_page) + u32::from(place)
    }

    /// Frees a slot still being read by these moves.
    pub(crate) fn drain(&mut self, group: usize, slot: Slot, by: &[MoveId]) {
        let (page, _) = self.place(group, slot);
        self.give(group, slot);
        self.draining.entry(page).or_default().extend_from_slice(by);
    }

    /// Ends a move's reads of freed slots.
    pub(crate) fn drained(&mut self, by: MoveId) {
        self.draining.retain(|_, moves| {
            moves.retain(|id| *id != by);
            !moves.is_empty()
        });
    }

    /// Moves to wait for before writing a slot.
    #[must_use]
    pub(crate) fn waits(&self, group: usize, slot: Slot) -> MoveIds {
        if self.draining.is_empty() {
            return MoveIds::new();
        }
        self.draining.get(&self.place(group, slot).0).cloned().unwrap_or_default()
    }

    /// All moves reading freed slots.
    pub(crate) fn draining(&self) -> impl Iterator<Item = MoveId> + '_ {
        self.draining.values().flatten().copied()
    }

    /// Page of a slot.
    #[must_use]
    pub(crate) fn page(&self, group: usize, slot: Slot) -> u32 {
        slot / u32::from(self.shares[group].per_page)
    }

    /// Live slots in a page of a group.
    #[must_use]
    pub(crate) fn live_in(&self, group: usize, page: u32) -> u16 {
        let share = &self.shares[group];
        let free = share.at.get(&page).map_or(0, |&at| share.open[at as usize].1.len());
        share.per_page - u16::try_from(free).expect("no more than a page has")
    }

    /// Page of a slot, and place in it.
    fn place(&self, group: usize, slot: Slot) -> (u32, u16) {
        let per_page = u32::from(self.shares[group].per_page);
        (slot / per_page, u16::try_from(slot % per_page).expect("a place of a page"))
    }

    /// Whether a slot of a group is live.
    #[must_use]
    pub(crate) fn is_live(&self, group: usize, slot: Slot) -> bool {
        let (page, place) = self.place(group, slot);
        let share = &self.shares[group];
        let owner = self.pages.get(page as usize).copied().unwrap_or(FREE);
        usize::from(owner) == group
            && share.at.get(&page).is_none_or(|&at| !share.open[at as usize].1.contains(&place))
    }
}

impl Share {
    /// Lists a page with these free slots.
    fn open(&mut self, page: u32, places: FreePlaces) {
        self.at.insert(page, u32::try_from(self.open.len()).expect("no more than pages"));
        self.open.push((page, places));
    }

    /// Removes a page from the list.
    fn close(&mut self, page: u32) {
        let at = self.at.remove(&page).expect("an open page");
        self.open.swap_remove(at as usize);
        if let Some(&(moved, _)) = self.open.get(at as usize) {
            self.at.insert(moved, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::Arena;

    /// An arena as a map of live slots. The slots determine the pages.
    #[derive(Default)]
    struct Naive(BTreeMap<(u32, u32), usize>);

    impl Naive {
        fn pages(&self) -> BTreeMap<u32, (usize, u64)> {
            let mut pages: BTreeMap<u32, (usize, u64)> = BTreeMap::new();
            for (&(page, _), &group) in &self.0 {
                let (owner, live) = pages.entry(page).or_insert((group, 0));
                assert_eq!(*owner, group, "page {page} has slots of two groups");
                *live += 1;
            }
            pages
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn an_arena_equals_a_map_of_its_live_slots(
            (per_page, pages) in (prop::collection::vec(1_u16..7, 1..5), 1_u32..9),
            steps in prop::collection::vec((0_usize..8, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut arena = Arena::new(pages, &per_page);
            let mut naive = Naive::default();
            for (what, which) in steps {
                let group = which.index(per_page.len());
                if what < 5 {
                    let known = naive.pages();
                    let room = known.iter().any(|(_, &(of, live))| of == group && live < u64::from(per_page[group]));
                    let free = known.len() < pages as usize;
                    let got = arena.take(group);
                    prop_assert_eq!(got.is_some(), room || free);
                    if let Some(slot) = got {
                        let at = (slot / u32::from(per_page[group]), slot % u32::from(per_page[group]));
                        prop_assert!(at.0 < pages);
                        prop_assert!(naive.0.insert(at, group).is_none(), "slot {} is live", slot);
                        // A page with room is used before a free page.
                        prop_assert_eq!(room, known.contains_key(&at.0));
                    }
                } else if what == 7 {
                    let slot = u32::try_from(which.index(70)).unwrap();
                    let at = (slot / u32::from(per_page[group]), slot % u32::from(per_page[group]));
                    let known = naive.pages();
                    let owner = known.get(&at.0).is_none_or(|&(of, _)| of == group);
                    let free = at.0 < pages && owner && !naive.0.contains_key(&at);
                    prop_assert_eq!(arena.claim(group, slot), free);
                    if free {
                        naive.0.insert(at, group);
                    }
                } else if !naive.0.is_empty() {
                    let (&(page, place), &group) = naive.0.iter().nth(which.index(naive.0.len())).unwrap();
                    naive.0.remove(&(page, place));
                    arena.give(group, page * u32::from(per_page[group]) + place);
                }
                let known = naive.pages();
                prop_assert_eq!(arena.free_pages(), u64::from(pages) - known.len() as u64);
                for (group, &per_page) in per_page.iter().enumerate() {
                    let own: Vec<u64> = known.values().filter(|page| page.0 == group).map(|page| page.1).collect();
                    prop_assert_eq!(arena.live(group), own.iter().sum::<u64>());
                    prop_assert_eq!(arena.free(group), own.len() as u64 * u64::from(per_page) - arena.live(group));
                    for slot in 0..pages * u32::from(per_page) {
                        let at = (slot / u32::from(per_page), slot % u32::from(per_page));
                        prop_assert_eq!(arena.is_live(group, slot), naive.0.get(&at) == Some(&group));
                    }
                }
            }
        }
    }

    #[test]
    fn room_is_counted_in_pages() {
        let mut arena = Arena::new(3, &[5, 1]);
        assert!(arena.fits(&[15, 0]) && arena.fits(&[10, 1]) && !arena.fits(&[11, 1]));
        let first = arena.take(0).unwrap();
        assert!(arena.fits(&[14, 0]) && arena.fits(&[4, 2]) && !arena.fits(&[5, 2]));
        arena.give(0, first);
        assert_eq!((arena.free_pages(), arena.room()), (3, 3));
    }
}
