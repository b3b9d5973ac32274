//! Ends of lists under a rule of the policy's own: which end of each list leaves first, and its worth.
//!
//! A list's worth does not change within a request, so it is computed once per list and again when
//! an end of the list changes. Invariant: a worth that is not marked stale is that of the list's
//! ends now. Cost: O(1) per change of an end; a victim costs a look at each list.

use std::cmp::Ordering;

use crate::policy::{Entry, Policy};
use crate::time::Nanos;

use super::list::List;
use super::tournament::Leaf;

/// The end of each list that leaves first.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// By list: worth and entry, none if it is empty.
    least: Vec<Option<(f64, Entry)>>,
    /// Lists whose ends changed.
    stale: Vec<bool>,
    /// Whether all are stale: another request began.
    all_stale: bool,
}

impl Ends {
    /// An end of a list changed.
    pub(super) fn change(&mut self, leaf: Leaf) {
        if let Some(stale) = self.stale.get_mut(leaf as usize) {
            *stale = true;
        }
    }

    /// The worth of all entries changed.
    pub(super) fn change_all(&mut self) {
        self.all_stale = true;
    }

    /// The end that leaves first.
    pub(super) fn victim(
        &mut self,
        lists: &[List],
        policy: &dyn Policy,
        now: Nanos,
    ) -> Option<Entry> {
        // Lists that were added since are stale too.
        self.stale.resize(lists.len(), true);
        self.least.resize(lists.len(), None);
        let mut first: Option<(f64, Entry)> = None;
        for ((list, stale), least) in lists.iter().zip(&mut self.stale).zip(&mut self.least) {
            if self.all_stale || *stale {
                *stale = false;
                *least = list.ends().map(|(oldest, youngest)| {
                    let [a, b] = [oldest, youngest].map(|key| key.entry(list.class));
                    let (a, b) = ((policy.worth(&a), a), (policy.worth(&b), b));
                    if precedes(&b, &a, policy, now) { b } else { a }
                });
            }
            if let Some(least) = least
                && first.is_none_or(|first| precedes(least, &first, policy, now))
            {
                first = Some(*least);
            }
        }
        self.all_stale = false;
        first.map(|(_, entry)| entry)
    }
}

/// Whether `a` leaves before `b`: worth is compared first, and where it is equal the policy decides.
fn precedes(a: &(f64, Entry), b: &(f64, Entry), policy: &dyn Policy, now: Nanos) -> bool {
    match a.0.total_cmp(&b.0) {
        Ordering::Less => true,
        Ordering::Equal => policy.compare(&a.1, &b.1, now).is_lt(),
        Ordering::Greater => false,
    }
}
