//! `checkerboard`: by age class `floor(log2 idle)` of the session, then by layer in the order of
//! eviction, then by position from the leading block on, then by id.
//!
//! A block's session is its last user, and the session's last use is the last use of any of its
//! blocks. Invariant: a class is a (layer, block) pair, and classes ascend in the order of leaving.
//! Age classes double in width with age, so entries of a class do change places: the head is the
//! smallest id of the oldest age class. Cost: a head takes time linear in the number of entries of
//! the oldest age class.

use std::cmp::Ordering;

use super::{Entry, Facts, Key, Needs, Order, Policy, Terms};
use crate::block::Departure;
use crate::cost::{CostModel, layer_weight};
use crate::time::Nanos;

/// Evicts whole layers of the oldest session, in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checkerboard;

impl Policy for Checkerboard {
    /// Cost of losing the layer, for `explain` only. The order follows the class.
    fn terms(&self, facts: &Facts, cost: &CostModel) -> Terms {
        let base = facts.price_or(cost.worth(facts.context));
        let layer_weight = facts
            .layer
            .map_or(1.0, |layer| layer_weight(layer, facts.model_layers, facts.departure));
        let cost = layer_weight * base;
        Terms { base, layer_weight, position_weight: 1.0, uses: 1, cost }
    }

    fn class(&self, facts: &Facts, _cost: &CostModel) -> u64 {
        let turn = match (facts.layer, facts.departure) {
            // Whole blocks have no layers to order.
            (None, _) => 0,
            (Some(layer), Departure::Demote) => {
                facts.model_layers.saturating_sub(layer.saturating_add(1))
            }
            (Some(layer), Departure::Drop) => layer,
        };
        u64::from(turn) << 32 | u64::from(facts.block)
    }

    fn order(&self) -> Order {
        Order::Own
    }

    fn needs(&self) -> Needs {
        Needs::SESSION_ACCESS
    }

    fn compare(&self, a: &Entry, b: &Entry, now: Nanos) -> Ordering {
        age_class(b.place, now)
            .cmp(&age_class(a.place, now))
            .then_with(|| (a.class, a.id).cmp(&(b.class, b.id)))
    }

    fn head(&self, keys: &mut dyn DoubleEndedIterator<Item = Key>, now: Nanos) -> Option<Key> {
        // Keys ascend in time, so the oldest age class is the front of the list.
        let first = keys.next()?;
        let oldest = age_class(first.place, now);
        let same = keys.take_while(|key| age_class(key.place, now) == oldest);
        same.chain([first]).min_by_key(|key| key.id)
    }
}

/// `floor(log2 idle) + 1`, or 0 at zero idle time.
fn age_class(access: Nanos, now: Nanos) -> u32 {
    Nanos::BITS - now.saturating_sub(access).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::{Checkerboard, age_class};
    use crate::block::Departure;
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::sample::{evict_all, layer, order};
    use crate::policy::{Entry, Key, Policy};

    #[test]
    fn one_session_is_demoted_layer_by_layer_from_the_back() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let session = [vec![5; 4]];
        let victims = evict_all(&Checkerboard, &cost, 40, &session, Departure::Demote, 100);
        assert_eq!(victims[..5], [(39, 0), (39, 1), (39, 2), (39, 3), (38, 0)]);
        assert_eq!((victims.len(), victims[159]), (160, (0, 3)));
        let expected: Vec<(u16, u32)> =
            (0..40).rev().flat_map(|layer| (0..4).map(move |block| (layer, block))).collect();
        assert_eq!(victims, expected);
        Ok(())
    }

    #[test]
    fn last_copies_are_dropped_from_the_shallow_layers_on() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let session = [vec![5; 4]];
        let victims = evict_all(&Checkerboard, &cost, 40, &session, Departure::Drop, 100);
        let expected: Vec<(u16, u32)> =
            (0..40).flat_map(|layer| (0..4).map(move |block| (layer, block))).collect();
        assert_eq!(victims, expected);
        Ok(())
    }

    #[test]
    fn an_older_session_goes_whole_before_a_younger_one() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        let sessions = [vec![90; 2], vec![10; 2], vec![60; 2]];
        let victims = evict_all(&Checkerboard, &cost, 40, &sessions, Departure::Demote, 100);
        assert_eq!(victims[..3], [(39, 2), (39, 3), (38, 2)]);
        assert!(victims[..80].iter().all(|(_, id)| (2..4).contains(id)));
        assert!(victims[80..160].iter().all(|(_, id)| (4..6).contains(id)));
        Ok(())
    }

    #[test]
    fn an_age_class_is_the_floor_of_the_logarithm() {
        for idle in 1..5000u64 {
            assert_eq!(age_class(7, 7 + idle), idle.ilog2() + 1);
        }
        assert_eq!((age_class(7, 7), age_class(7, 3), age_class(0, u64::MAX)), (0, 0, 64));
    }

    #[test]
    fn within_an_age_class_the_smaller_id_goes_although_used_later() {
        let entry = |place, id| Entry { class: 3, place, tie: 0, id };
        let entries = vec![entry(0, 9), entry(30, 4), entry(40, 1)];
        // Idle 100, 70 and 60: 60 is in a younger age class.
        assert_eq!(order(&Checkerboard, entries.clone(), 100), [4, 9, 1]);
        let keys: Vec<Key> = entries.iter().map(Entry::key).collect();
        let head = |now| Checkerboard.head(&mut keys.iter().copied(), now).map(|key| key.id);
        assert_eq!((head(100), head(120)), (Some(4), Some(1)));
        assert_eq!(Checkerboard.head(&mut std::iter::empty(), 100), None);
    }

    #[test]
    fn it_shows_the_cost_of_losing_the_layer() -> Result<()> {
        let terms = Checkerboard.terms(&layer(39, 40, 1, 4), &CostModel::seed(1.0)?);
        assert!((terms.cost - 0.047 / 40.0).abs() < 1e-12);
        Ok(())
    }
}
