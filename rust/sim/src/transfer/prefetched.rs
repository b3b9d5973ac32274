//! Residency of prefetched blocks before their first use.
//!
//! A prefetched copy below the first tier is counted from its arrival until a load reads its slot
//! or a different block takes the slot. Invariant: a slot holds at most one counted copy. Cost:
//! O(1) per move.

use kvtrie_core::{MoveId, MoveKind, NO_MOVE, Nanos, Slot, TierId};
use rustc_hash::FxHashMap;

use crate::call::Handed;

/// Tier, layer group and slot.
type Place = (TierId, u8, Slot);

/// Byte-nanoseconds of prefetched copies, by tier.
#[derive(Debug, Default)]
pub(super) struct Prefetched {
    /// Copies in flight, with their bytes.
    coming: FxHashMap<MoveId, (Place, u64)>,
    /// Bytes and arrival time by place.
    held: FxHashMap<Place, (u64, Nanos)>,
    /// Byte-nanoseconds of copies used or replaced.
    ended: FxHashMap<TierId, u128>,
}

impl Prefetched {
    /// Record an issued move of `bytes` bytes.
    pub(super) fn handed(&mut self, order: &Handed, bytes: u64, now: Nanos) {
        let source = (order.src, order.group, order.src_slot);
        let place = (order.dst, order.group, order.dst_slot);
        if order.kind == MoveKind::Load {
            self.leave(source, now);
            // A load waiting for an arrival at its source uses the copy at once.
            if order.after != NO_MOVE {
                self.coming.remove(&order.after);
            }
        }
        self.leave(place, now);
        if order.kind == MoveKind::Load && order.lease == 0 && order.dst > 0 {
            self.coming.insert(order.id, (place, bytes));
        }
    }

    /// Start counting a copy at the end of its move.
    pub(super) fn arrived(&mut self, id: MoveId, now: Nanos) {
        if let Some((place, bytes)) = self.coming.remove(&id) {
            self.leave(place, now);
            self.held.insert(place, (bytes, now));
        }
    }

    fn leave(&mut self, place: Place, now: Nanos) {
        // Without prefetches no move pays for a lookup.
        if self.held.is_empty() {
            return;
        }
        if let Some((bytes, since)) = self.held.remove(&place) {
            *self.ended.entry(place.0).or_default() += product(bytes, since, now);
        }
    }

    /// Byte-seconds on a tier until now.
    pub(super) fn byte_seconds(&self, tier: TierId, now: Nanos) -> u64 {
        let held = self.held.iter().filter(|((at, ..), _)| *at == tier);
        let held: u128 = held.map(|(_, &(bytes, since))| product(bytes, since, now)).sum();
        let all = held + self.ended.get(&tier).copied().unwrap_or(0);
        u64::try_from(all / 1_000_000_000).unwrap_or(u64::MAX)
    }
}

fn product(bytes: u64, since: Nanos, now: Nanos) -> u128 {
    u128::from(bytes) * u128::from(now.saturating_sub(since))
}

#[cfg(test)]
mod tests {
    use kvtrie_core::{BlockKey, Layers, MoveKind, NO_MOVE};

    use super::Prefetched;
    use crate::call::Handed;

    const S: u64 = 1_000_000_000;

    fn load(
        id: u64,
        lease: u64,
        (src, src_slot): (usize, u32),
        (dst, dst_slot): (usize, u32),
    ) -> Handed {
        Handed {
            id,
            kind: MoveKind::Load,
            lease,
            block: None,
            key: BlockKey::default(),
            src,
            dst,
            src_slot,
            dst_slot,
            group: 0,
            layers: Layers::new(0, 4),
            after: NO_MOVE,
            tokens: 4,
            first: 0,
            ready: 0,
        }
    }

    #[test]
    fn a_copy_counts_from_its_arrival_to_its_first_use() {
        let mut all = Prefetched::default();
        all.handed(&load(1, 0, (2, 7), (1, 3)), 10, S);
        assert_eq!(all.byte_seconds(1, 4 * S), 0);
        all.arrived(1, 5 * S);
        assert_eq!(all.byte_seconds(1, 8 * S), 30);
        all.handed(&load(2, 9, (1, 3), (0, 1)), 10, 9 * S);
        all.arrived(2, 10 * S);
        assert_eq!([0, 1, 2].map(|tier| all.byte_seconds(tier, 99 * S)), [0, 40, 0]);
    }

    #[test]
    fn a_copy_counts_until_another_takes_its_slot() {
        let mut all = Prefetched::default();
        all.handed(&load(1, 0, (2, 7), (1, 3)), 10, S);
        all.arrived(1, 5 * S);
        let store = Handed { kind: MoveKind::Store, ..load(2, 0, (1, 3), (2, 8)) };
        all.handed(&store, 10, 6 * S);
        all.handed(&load(3, 9, (2, 4), (1, 3)), 10, 7 * S);
        assert_eq!(all.byte_seconds(1, 99 * S), 20);
    }

    #[test]
    fn a_copy_that_a_load_waits_for_does_not_count() {
        let mut all = Prefetched::default();
        all.handed(&load(1, 0, (2, 7), (1, 3)), 10, S);
        all.handed(&Handed { after: 1, ..load(2, 9, (1, 3), (0, 1)) }, 10, 2 * S);
        all.arrived(1, 5 * S);
        assert_eq!(all.byte_seconds(1, 99 * S), 0);
    }
}
