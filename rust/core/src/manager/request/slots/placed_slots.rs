//! Slots by their place on a path, sorted.
//!
//! Places are added at the end and leave at the front as a lease goes on, so both ends are found without
//! a search. Invariant: places ascend. Cost: O(1) at the ends, O(log n) to find another place, O(n) to
//! add or remove one there.

use std::collections::VecDeque;

use crate::block::Slot;

/// Slots by place.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlacedSlots(VecDeque<(u32, Slot)>);

impl PlacedSlots {
    /// Where a place is, or would be.
    fn find(&self, place: u32) -> Result<usize, usize> {
        match (self.0.front(), self.0.back()) {
            (Some(&(first, _)), _) if place <= first => {
                if place == first {
                    Ok(0)
                } else {
                    Err(0)
                }
            }
            (_, Some(&(last, _))) if place <= last => {
                self.0.binary_search_by_key(&place, |&(known, _)| known)
            }
            _ => Err(self.0.len()),
        }
    }

    /// The slot of a place.
    pub(crate) fn get(&self, place: u32) -> Option<Slot> {
        self.find(place).ok().map(|at| self.0[at].1)
    }

    /// Whether a place has a slot.
    pub(crate) fn has(&self, place: u32) -> bool {
        self.find(place).is_ok()
    }

    /// The first place from `place` on that has a slot.
    pub(crate) fn next_from(&self, place: u32) -> Option<u32> {
        let at = self.find(place).unwrap_or_else(|at| at);
        self.0.get(at).map(|&(known, _)| known)
    }

    /// Gives a place that has none a slot.
    pub(crate) fn insert(&mut self, place: u32, slot: Slot) {
        match self.find(place) {
            Ok(_) => debug_assert!(false, "place {place} has a slot"),
            Err(at) => self.0.insert(at, (place, slot)),
        }
    }

    /// Takes the slot of a place.
    pub(crate) fn remove(&mut self, place: u32) -> Option<Slot> {
        let at = self.find(place).ok()?;
        self.0.remove(at).map(|(_, slot)| slot)
    }

    /// Keeps the slots for which `stays` holds.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(u32, Slot) -> bool) {
        self.0.retain(|&(place, slot)| stays(place, slot));
    }

    /// All slots with their places, which leave.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = (u32, Slot)> {
        std::mem::take(&mut self.0).into_iter()
    }

    /// All slots with their places, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Slot)> {
        self.0.iter().copied()
    }

    /// All slots.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.iter().map(|(_, slot)| slot)
    }

    /// No slots any more.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::PlacedSlots;

    proptest! {
        #[test]
        fn placed_slots_equal_a_map(steps in prop::collection::vec((0_u8..6, 0_u32..12), 0..60)) {
            let (mut placed, mut naive) = (PlacedSlots::default(), BTreeMap::new());
            for (number, (what, place)) in (100_u32..).zip(steps) {
                match what {
                    0..3 => {
                        if !placed.has(place) {
                            placed.insert(place, number);
                        }
                        naive.entry(place).or_insert(number);
                    }
                    3 => prop_assert_eq!(placed.remove(place), naive.remove(&place)),
                    4 => {
                        placed.retain(|known, _| known >= place);
                        naive.retain(|&known, _| known >= place);
                    }
                    _ if place == 0 => {
                        prop_assert!(placed.take().eq(std::mem::take(&mut naive)));
                    }
                    _ => prop_assert_eq!(placed.get(place), naive.get(&place).copied()),
                }
                let next = naive.range(place..).next().map(|(&known, _)| known);
                prop_assert_eq!(placed.next_from(place), next);
                prop_assert_eq!(placed.has(place), naive.contains_key(&place));
                prop_assert!(placed.iter().eq(naive.iter().map(|(&place, &slot)| (place, slot))));
            }
        }
    }
}
