//! Queued requests: new, suspended and handed over.
//!
//! Invariant: suspended requests arrived earlier and resume first. Cost: O(log suspended) per
//! request.

use std::collections::{BTreeMap, VecDeque};

use super::relay::Handoff;
use super::running::Running;
use crate::request::Request;

/// Requests waiting for admission.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) fresh: VecDeque<Request>,
    /// Suspended requests by id.
    pub(super) suspended: BTreeMap<u64, Running>,
    /// Requests prefilled on a different machine.
    pub(super) handed: VecDeque<Handoff>,
    /// The first request found no room, and none was freed since.
    pub(super) blocked: bool,
}

impl Queue {
    /// Number of queued requests.
    pub(super) fn len(&self) -> u64 {
        (self.fresh.len() + self.handed.len() + self.suspended.len()) as u64
    }
}
