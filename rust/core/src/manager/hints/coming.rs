//! Waiting loads: blocks wanted on a tier by a deadline, loaded as late as the lanes allow.
//!
//! Loads run consecutively in the order of their deadlines. So the latest start of a load follows
//! from the start of the next load:
//!
//! ```text
//! by    = deadline - slack - takes / jitter
//! start = min(by, start of the next load) - takes
//! ```
//!
//! Invariant: the first load has the earliest start, and `start` is up to date. Cost: O(log loads)
//! to find a load, O(loads) per added, measured or removed load.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::block::{LeaseId, TierId, Token};
use crate::manager::request::life::session::SessionId;
use crate::scope::Scope;
use crate::time::{NEVER, Nanos};
use crate::visits;

/// The blocks of a load. A later hint for the same blocks replaces it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LoadKey {
    /// The path of a session, until its next request.
    Session(SessionId),
    /// The path of a lease, until it ends.
    Lease(LeaseId),
    /// A sequence.
    Tokens(Arc<(Scope, Vec<Token>)>),
}

/// A load waiting for its latest start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    /// Destination tier.
    pub(crate) tier: TierId,
    /// Time at which the blocks are wanted.
    pub(crate) deadline: Nanos,
    /// Whether blocks that would miss the deadline are not loaded.
    pub(crate) strict: bool,
    /// Time from its end to the deadline, without `jitter`.
    pub(crate) slack: Nanos,
    /// Divisor of its time on the lanes, for an additional margin: copy times vary.
    pub(crate) jitter: Nanos,
    /// Its time on the lanes, at the last measurement.
    pub(crate) takes: Nanos,
    /// Bit set of its source tiers.
    pub(crate) sources: u64,
    /// Time of the next measurement: the latest start for blocks on the slowest tier.
    pub(crate) look: Option<Nanos>,
}

impl Load {
    /// A load without a measurement.
    pub(crate) fn unmeasured(tier: TierId, deadline: Nanos, slack: Nanos, jitter: Nanos) -> Self {
        let (strict, takes, sources, look) = (false, 0, 0, None);
        Self { tier, deadline, strict, slack, jitter, takes, sources, look }
    }

    /// Its latest start if it takes `takes` and no further load waits.
    pub(crate) fn latest_start(&self, takes: Nanos) -> Nanos {
        Self { takes, ..*self }.by().saturating_sub(takes)
    }

    /// Target end time of its last copy.
    fn by(&self) -> Nanos {
        self.deadline.saturating_sub(self.slack.saturating_add(self.takes / self.jitter))
    }
}

/// The waiting loads.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingLoads {
    loads: BTreeMap<LoadKey, Load>,
    /// Index by end time, with the duration of each load.
    order: BTreeMap<(Nanos, LoadKey), Nanos>,
    /// The latest start of the first load.
    start: Nanos,
    /// Index by the time of the next measurement.
    looks: BTreeSet<(Nanos, LoadKey)>,
}

impl WaitingLoads {
    /// Adds a load. Replaces a load of the same blocks.
    pub(crate) fn put(&mut self, key: LoadKey, load: Load) {
        self.take(&key);
        self.order.insert((load.by(), key.clone()), load.takes);
        if let Some(look) = load.look {
            self.looks.insert((look, key.clone()));
        }
        self.loads.insert(key, load);
        self.plan();
    }

    /// Removes a load.
    pub(crate) fn remove(&mut self, key: &LoadKey) -> Option<Load> {
        let load = self.take(key)?;
        self.plan();
        Some(load)
    }

    fn take(&mut self, key: &LoadKey) -> Option<Load> {
        let load = self.loads.remove(key)?;
        self.order.remove(&(load.by(), key.clone()));
        if let Some(look) = load.look {
            self.looks.remove(&(look, key.clone()));
        }
        Some(load)
    }

    /// A waiting load.
    pub(crate) fn get(&self, key: &LoadKey) -> Option<Load> {
        self.loads.get(key).copied()
    }

    /// The load to start first, and its latest start.
    pub(crate) fn first(&self) -> Option<(&LoadKey, &Load, Nanos)> {
        let ((_, key), _) = self.order.first_key_value()?;
        Some((key, &self.loads[key], self.start))
    }

    /// The load to measure first, and the time.
    pub(crate) fn first_look(&self) -> Option<&(Nanos, LoadKey)> {
        self.looks.first()
    }

    /// Number of waiting sequences of a tenant and adapter, and of their tokens.
    pub(crate) fn held_by(&self, scope: &Scope) -> (usize, usize) {
        let (tenant, lora) = (scope.tenant.clone(), scope.lora.clone());
        let from = Scope { tenant, lora, ..Scope::default() };
        let mine = self.loads.range(LoadKey::Tokens(Arc::new((from, Vec::new())))..);
        mine.map_while(|(key, _)| match key {
            LoadKey::Tokens(path)
                if (&path.0.tenant, &path.0.lora) == (&scope.tenant, &scope.lora) =>
            {
                visits::note(1);
                Some(path.1.len())
            }
            _ => None,
        })
        .fold((0, 0), |(number, all), tokens| (number + 1, all + tokens))
    }

    /// Plans the starts, from the last load to the first.
    fn plan(&mut self) {
        visits::note(self.order.len());
        self.start = self
            .order
            .iter()
            .rev()
            .fold(NEVER, |next, ((by, _), takes)| next.min(*by).saturating_sub(*takes));
    }

    /// Checks the table against living sessions and leases.
    pub(crate) fn audit(
        &self,
        session: impl Fn(SessionId) -> bool,
        lease: impl Fn(LeaseId) -> bool,
    ) -> Vec<String> {
        let alive = |key: &LoadKey| match key {
            LoadKey::Session(id) => session(*id),
            LoadKey::Lease(id) => lease(*id),
            LoadKey::Tokens(_) => true,
        };
        let wrong = self.loads.iter().filter(|(key, load)| {
            let key_in_order = (load.by(), (*key).clone());
            !alive(key) || self.order.get(&key_in_order) != Some(&load.takes)
        });
        let mut broken: Vec<String> =
            wrong.map(|(key, load)| format!("{load:?} waits for {key:?}")).collect();
        if self.order.len() != self.loads.len() {
            broken.push(format!(
                "{} of {} loads have an order",
                self.order.len(),
                self.loads.len()
            ));
        }
        broken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Load, LoadKey, WaitingLoads};

    fn load(deadline: u64, takes: u64) -> Load {
        Load { takes, ..Load::unmeasured(1, deadline, 3, 8) }
    }

    proptest! {
        /// Compares with a queue: all loads end in time if the first starts at its latest start,
        /// but not if it starts a nanosecond later.
        #[test]
        fn the_first_load_begins_as_late_as_all_allow(
            steps in prop::collection::vec((0_u64..6, 200_u64..2000, 0_u64..80, any::<bool>()), 1..40),
        ) {
            let mut coming = WaitingLoads::default();
            let mut known = std::collections::BTreeMap::new();
            for (id, deadline, takes, removes) in steps {
                if removes {
                    prop_assert_eq!(coming.remove(&LoadKey::Session(id)).is_some(), known.remove(&id).is_some());
                } else {
                    coming.put(LoadKey::Session(id), load(deadline, takes));
                    known.insert(id, (deadline - 3 - takes / 8, takes));
                }
                prop_assert!(coming.audit(|id| known.contains_key(&id), |_| false).is_empty());
                let mut queue: Vec<(u64, u64)> = known.values().copied().collect();
                queue.sort_unstable();
                let in_time = |start: u64| {
                    let mut at = start;
                    queue.iter().all(|(by, takes)| { at += takes; at <= *by })
                };
                let Some((_, _, start)) = coming.first() else {
                    prop_assert!(queue.is_empty());
                    continue;
                };
                prop_assert!(start == 0 || in_time(start), "{} for {:?}", start, queue);
                prop_assert!(!in_time(start + 1), "{} for {:?}", start, queue);
            }
        }
    }
}
