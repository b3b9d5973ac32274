//! Slots by their place on a path, in runs of consecutive places.
//!
//! A lease's slots of the first group are a single run, and a window's slots are a run per border.
//! So slots are taken and returned run by run. Invariant: runs ascend, and none is empty. Cost:
//! O(log runs) to find a place, O(runs) to add or remove a place, O(1) at both ends of a run.

use std::collections::VecDeque;
use std::ops::Range;

use smallvec::SmallVec;

use crate::group::Places;
use crate::manager::request::slots::lease_slots::OpenSlot;

/// Slots of consecutive places.
#[derive(Clone, Debug)]
struct Run {
    first: u32,
    slots: VecDeque<OpenSlot>,
}

impl Run {
    fn places(&self) -> Range<u32> {
        self.first..self.first + u32::try_from(self.slots.len()).expect("fewer than 2^32 blocks")
    }

    fn iter(&self) -> impl Iterator<Item = (u32, OpenSlot)> {
        self.places().zip(self.slots.iter().copied())
    }
}

/// Slots by place.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlacedSlots(SmallVec<[Run; 1]>);

impl PlacedSlots {
    /// The run and index of a place's slot, or the index of the run after a place without a slot.
    fn find(&self, place: u32) -> Result<(usize, usize), usize> {
        let at = self.0.partition_point(|run| run.places().end <= place);
        let within = self.0.get(at).and_then(|run| place.checked_sub(run.first));
        within.map(|within| (at, within as usize)).ok_or(at)
    }

    /// Number of slots.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match &self.0[..] {
            [] => 0,
            // The usual case.
            [run] => run.slots.len(),
            runs => runs.iter().map(|run| run.slots.len()).sum(),
        }
    }

    /// Whether there are no slots.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The slot of a place.
    pub(crate) fn get(&self, place: u32) -> Option<OpenSlot> {
        self.find(place).ok().map(|(run, at)| self.0[run].slots[at])
    }

    /// Whether a place has a slot.
    pub(crate) fn has(&self, place: u32) -> bool {
        self.find(place).is_ok()
    }

    /// The places without a slot among `places`.
    pub(crate) fn lacking(&self, places: &Places) -> Places {
        let mut lacking: Vec<Range<u32>> = places.ranges().collect();
        for known in self.0.iter().map(Run::places) {
            let split = |range: Range<u32>| {
                let before = range.start..range.end.min(known.start);
                [before, range.start.max(known.end)..range.end]
            };
            lacking = lacking.into_iter().flat_map(split).collect();
        }
        Places::of(lacking)
    }

    /// Adds a slot for a place without a slot.
    pub(crate) fn insert(&mut self, place: u32, slot: OpenSlot) {
        self.add(place, vec![slot]);
    }

    /// Adds slots for the places from `first` on. They must have no slots.
    pub(crate) fn add(&mut self, first: u32, slots: Vec<OpenSlot>) {
        debug_assert!(!self.has(first), "place {first} has a slot");
        if slots.is_empty() {
            return;
        }
        if self.0.is_empty() {
            self.0.push(Run { first, slots: slots.into() });
            return;
        }
        let at = self.0.partition_point(|run| run.first < first);
        match at.checked_sub(1).map(|before| &mut self.0[before]) {
            Some(run) if run.places().end == first => run.slots.extend(slots),
            _ => self.0.insert(at, Run { first, slots: slots.into() }),
        }
    }

    /// Replaces the slot of a place.
    pub(crate) fn replace(&mut self, place: u32, slot: OpenSlot) {
        let (run, at) = self.find(place).expect("a place with a slot");
        self.0[run].slots[at] = slot;
    }

    /// Adds slots at the front, and renumbers all places from `first` on.
    pub(crate) fn renumber(&mut self, first: u32, mut before: Vec<OpenSlot>) {
        before.extend(self.slots());
        self.clear();
        self.add(first, before);
    }

    /// Takes the slot of a place.
    pub(crate) fn remove(&mut self, place: u32) -> Option<OpenSlot> {
        let (at, within) = self.find(place).ok()?;
        let run = &mut self.0[at];
        if within == 0 {
            run.first += 1;
            let slot = run.slots.pop_front();
            if run.slots.is_empty() {
                self.0.remove(at);
            }
            return slot;
        }
        let (slots, first) = (run.slots.split_off(within + 1), place + 1);
        let slot = run.slots.pop_back();
        if !slots.is_empty() {
            self.0.insert(at + 1, Run { first, slots });
        }
        slot
    }

    /// Takes the first slots of the first run, at most `count`.
    pub(crate) fn take_first(&mut self, count: usize) -> Vec<OpenSlot> {
        let Some(run) = self.0.first_mut() else { return Vec::new() };
        let mut taken = std::mem::take(&mut run.slots);
        if taken.len() > count {
            run.slots = taken.split_off(count);
            run.first += u32::try_from(count).expect("fewer than the run has");
        } else {
            self.0.remove(0);
        }
        taken.into()
    }

    /// Takes the slots at places with a false `stays`.
    pub(crate) fn take_unless(&mut self, stays: impl Fn(u32) -> bool) -> Vec<OpenSlot> {
        let gone = self.iter().map(|(place, _)| place).filter(|&place| !stays(place));
        let gone: Vec<u32> = gone.collect();
        gone.into_iter().filter_map(|place| self.remove(place)).collect()
    }

    /// Takes the last run.
    pub(crate) fn pop(&mut self) -> Option<VecDeque<OpenSlot>> {
        self.0.pop().map(|run| run.slots)
    }

    /// All slots with their places, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, OpenSlot)> {
        self.0.iter().flat_map(Run::iter)
    }

    /// All slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = OpenSlot> {
        self.0.iter().flat_map(|run| run.slots.iter().copied())
    }

    /// Removes all slots.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::PlacedSlots;
    use crate::group::Places;
    use crate::manager::request::slots::lease_slots::OpenSlot;

    proptest! {
        #[test]
        fn placed_slots_equal_a_map(steps in prop::collection::vec((0_u8..6, 0_u32..12), 0..60)) {
            let (mut placed, mut naive) = (PlacedSlots::default(), BTreeMap::new());
            for (number, (what, place)) in (100_u32..).map(OpenSlot::Plain).zip(steps) {
                match what {
                    0..3 => {
                        if !placed.has(place) {
                            placed.insert(place, number);
                        }
                        naive.entry(place).or_insert(number);
                    }
                    3 => prop_assert_eq!(placed.remove(place), naive.remove(&place)),
                    4 => {
                        let taken = placed.take_unless(|known| known >= place);
                        let left = naive.split_off(&place);
                        prop_assert!(taken.into_iter().eq(std::mem::replace(&mut naive, left).into_values()));
                    }
                    _ if place == 0 => {
                        let mut taken: Vec<OpenSlot> = Vec::new();
                        while let Some(run) = placed.pop() {
                            taken.splice(0..0, run);
                        }
                        prop_assert!(taken.into_iter().eq(std::mem::take(&mut naive).into_values()));
                    }
                    _ => prop_assert_eq!(placed.get(place), naive.get(&place).copied()),
                }
                prop_assert_eq!(placed.has(place), naive.contains_key(&place));
                let lacking: Vec<u32> = (place..12).filter(|at| !naive.contains_key(at)).collect();
                let whole = std::iter::once(place..12);
                prop_assert!(placed.lacking(&Places::of(whole)).iter().eq(lacking));
                prop_assert!(placed.iter().eq(naive.iter().map(|(&place, &slot)| (place, slot))));
            }
        }
    }
}
