//! `lru`: the least recently used block leaves first. The baseline.
//!
//! Invariant: there is a single class, ordered by last use. Cost: constant.

use super::{Facts, Order, Policy, Terms};
use crate::cost::CostModel;

/// Least recently used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lru;

impl Policy for Lru {
    fn deepens(&self) -> bool {
        true
    }

    fn terms(&self, _facts: &Facts, _cost: &CostModel) -> Terms {
        Terms::NONE
    }

    fn order(&self) -> Order {
        Order::Rank
    }
}

#[cfg(test)]
mod tests {
    use super::Lru;
    use crate::cost::CostModel;
    use crate::error::Result;
    use crate::policy::Policy;
    use crate::policy::sample::{facts, layer};

    #[test]
    fn all_entries_are_of_one_class() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        let class = Lru.class(&facts(0, 0, 1), &cost);
        assert_eq!(Lru.class(&facts(99_999, 7, 9), &cost), class);
        assert_eq!(Lru.class(&layer(39, 40, 3, 4), &cost), class);
        Ok(())
    }
}
