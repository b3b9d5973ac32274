//! Requests without a lease that computes: new ones and suspended ones.
//!
//! Invariant: suspended ones came earlier and go first. Cost: O(log suspended) per request.

use std::collections::{BTreeMap, VecDeque};

use super::relay::Handoff;
use super::running::Running;
use crate::request::Request;

/// Requests that wait to be taken in.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) fresh: VecDeque<Request>,
    /// By id.
    pub(super) suspended: BTreeMap<u64, Running>,
    /// Those whose prompt another machine has computed.
    pub(super) handed: VecDeque<Handoff>,
    /// The first one found no room, and none was given back since.
    pub(super) blocked: bool,
}

impl Queue {
    /// How many wait.
    pub(super) fn len(&self) -> u64 {
        (self.fresh.len() + self.handed.len() + self.suspended.len()) as u64
    }
}
