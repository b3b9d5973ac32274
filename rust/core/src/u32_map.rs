//! Hash multimap from `u32` to `u32`: open addressing with linear probing and backward-shift
//! deletion.
//!
//! A key may have several values. A predicate of the caller selects a value. An entry is at the
//! home place of its key, given by the hash, or after it. Invariant: there is no vacant place
//! between the home and the entry, and a quarter of each table is vacant. Cost: O(1), mostly a
//! single CPU cache line. 8 bytes per place, so 11 to 22 per entry. The keys are spread over 256
//! tables, so no call pays for the growth of a large table.
//!
//! ```text
//! hash   63..56 table   .. 24 and up: home in the table
//! ```

/// Number of tables.
const TABLES: usize = 256;

/// Minimum number of places of a non-empty table.
const LEAST: usize = 8;

/// Value of a vacant place.
const VACANT: u32 = u32::MAX;

/// Multiplier of the hash: 2^64 divided by the golden ratio, made odd (Fibonacci hashing).
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Clone, Copy, Debug)]
struct MapEntry {
    key: u32,
    value: u32,
}

/// Table with no places or a power of two.
#[derive(Clone, Debug, Default)]
struct Table {
    places: Vec<MapEntry>,
    len: usize,
}

/// Multimap with values below `u32::MAX`.
#[derive(Clone, Debug)]
pub(crate) struct U32Map {
    tables: Vec<Table>,
    len: usize,
}

impl Default for U32Map {
    fn default() -> Self {
        Self { tables: vec![Table::default(); TABLES], len: 0 }
    }
}

impl U32Map {
    /// Number of entries.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Value of a key selected by `meant`.
    #[inline]
    #[must_use]
    pub(crate) fn find(&self, key: u32, meant: impl FnMut(u32) -> bool) -> Option<u32> {
        let table = &self.tables[table(key)];
        Some(table.places[table.find(key, meant)?].value)
    }

    /// Adds an entry.
    pub(crate) fn insert(&mut self, key: u32, value: u32) {
        debug_assert!(value != VACANT, "{value} is reserved for vacant places");
        self.len += 1;
        self.tables[table(key)].insert(MapEntry { key, value });
    }

    /// Removes the entry of a key selected by `meant`, and returns its value.
    pub(crate) fn remove(&mut self, key: u32, meant: impl FnMut(u32) -> bool) -> Option<u32> {
        let table = &mut self.tables[table(key)];
        let at = table.find(key, meant)?;
        self.len -= 1;
        Some(table.vacate(at))
    }
}

impl Table {
    /// First place to look for a key.
    #[inline]
    fn home(&self, key: u32) -> usize {
        usize::try_from(hash(key) >> 24).unwrap_or_default() & (self.places.len() - 1)
    }

    fn next_place(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    #[inline]
    fn find(&self, key: u32, mut meant: impl FnMut(u32) -> bool) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let mut at = self.home(key);
        loop {
            let pair = self.places[at];
            if pair.value == VACANT {
                return None;
            }
            if pair.key == key && meant(pair.value) {
                return Some(at);
            }
            at = self.next_place(at);
        }
    }

    fn insert(&mut self, pair: MapEntry) {
        if 4 * (self.len + 1) > 3 * self.places.len() {
            self.grow();
        }
        self.len += 1;
        self.put(pair);
    }

    fn put(&mut self, pair: MapEntry) {
        let mut at = self.home(pair.key);
        while self.places[at].value != VACANT {
            at = self.next_place(at);
        }
        self.places[at] = pair;
    }

    /// Vacates a place, and moves up entries that would become unreachable.
    fn vacate(&mut self, mut gap: usize) -> u32 {
        let mask = self.places.len() - 1;
        let value = self.places[gap].value;
        let mut at = self.next_place(gap);
        while self.places[at].value != VACANT {
            let pair = self.places[at];
            // An entry may move to the gap if the gap is not before its home.
            let (home, away) = (at.wrapping_sub(self.home(pair.key)), at.wrapping_sub(gap));
            if home & mask >= away & mask {
                self.places[gap] = pair;
                gap = at;
            }
            at = self.next_place(at);
        }
        self.places[gap].value = VACANT;
        self.len -= 1;
        value
    }

    fn grow(&mut self) {
        let places = vec![MapEntry { key: 0, value: VACANT }; (2 * self.places.len()).max(LEAST)];
        let old = std::mem::replace(&mut self.places, places);
        old.into_iter().filter(|pair| pair.value != VACANT).for_each(|pair| self.put(pair));
    }
}

fn hash(key: u32) -> u64 {
    u64::from(key).wrapping_mul(FACTOR)
}

/// Table of a key, by the highest bits of its hash.
#[inline]
fn table(key: u32) -> usize {
    usize::try_from(hash(key) >> 56).unwrap_or_default() % TABLES
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::{LEAST, TABLES, U32Map, table};

    /// Keys of a single table, to fill it. The last keys are far apart.
    fn keys() -> Vec<u32> {
        (0..1 << 20).filter(|&key| table(key) == 7).step_by(5).take(40).collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_pairs(
            ops in prop::collection::vec((0..40_usize, 0..3_u32, any::<bool>()), 0..400),
        ) {
            let keys = keys();
            let (mut pairs, mut model) = (U32Map::default(), BTreeSet::new());
            for (key, value, add) in ops {
                let key = keys[key];
                if !add {
                    let known = pairs.remove(key, |known| known == value);
                    prop_assert_eq!(known.is_some(), model.remove(&(key, value)));
                } else if model.insert((key, value)) {
                    pairs.insert(key, value);
                }
                prop_assert_eq!(pairs.len(), model.len());
                prop_assert_eq!(pairs.is_empty(), model.is_empty());
                for &key in &keys {
                    for value in 0..3 {
                        let known = pairs.find(key, |known| known == value);
                        prop_assert_eq!(known.is_some(), model.contains(&(key, value)));
                    }
                }
                let places: usize = pairs.tables.iter().map(|table| table.places.len()).sum();
                prop_assert!(4 * pairs.len() <= 3 * places);
            }
        }
    }

    /// Consecutive keys, like block ids, fill all tables evenly and are near their homes.
    #[test]
    fn numbers_in_a_row_are_spread() {
        let mut pairs = U32Map::default();
        (0..100_000).for_each(|key| pairs.insert(key, key));
        let sizes: BTreeSet<usize> = pairs.tables.iter().map(|table| table.places.len()).collect();
        assert!(
            sizes.iter().all(|places| (LEAST..=4 * 100_000 / TABLES).contains(places)),
            "{sizes:?}"
        );
        let away = |table: &super::Table| {
            let far = |(at, pair): (usize, &super::MapEntry)| {
                at.wrapping_sub(table.home(pair.key)) & (table.places.len() - 1)
            };
            let used =
                table.places.iter().enumerate().filter(|(_, pair)| pair.value != super::VACANT);
            used.map(far).sum::<usize>()
        };
        let away: usize = pairs.tables.iter().map(away).sum();
        assert!(away < 100_000, "{away}");
    }
}
