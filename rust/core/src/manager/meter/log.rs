//! Eviction log: a ring of the last victims, with the figures that ranked them.
//!
//! Invariant: it has at most the number of entries in the settings, in order of time, and computes
//! nothing if the limit is zero. Cost: O(1) per entry, and a search for the next victim: O(log
//! classes) or, under a policy with `Order::Own`, a scan.

use std::collections::VecDeque;

use crate::block::{BlockId, Handle, Layers, TierId};
use crate::error::Result;
use crate::policy::Terms;
use crate::scope::Whose;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::kinds::{Cause, Evicted, Reason};

/// Entry of the eviction log.
#[derive(Clone, Debug, PartialEq)]
pub struct Eviction {
    /// Time.
    pub at: Nanos,
    /// Block.
    pub block: Handle,
    /// Its index in its sequence.
    pub position: u32,
    /// Salt of its tenant.
    pub tenant: Vec<u8>,
    /// Name of its adapter.
    pub lora: String,
    /// Tier it left.
    pub tier: TierId,
    /// Destination of its write-back.
    pub to: Option<TierId>,
    /// Layers that left.
    pub layers: Layers,
    /// Event that caused the eviction.
    pub cause: Cause,
    /// Whether a copy remains.
    pub reason: Reason,
    /// Number of requests that used it.
    pub uses: u32,
    /// Time since its last use.
    pub idle: Nanos,
    /// Factors of its price, and their product.
    pub terms: Terms,
    /// Cost per second of idle time. Infinite at zero idle time.
    pub value: f64,
    /// Value of the next victim, or `None`.
    pub next: Option<f64>,
}

/// Line of the log, without copies of tenant and adapter.
#[derive(Debug)]
struct Line {
    /// Owner, shared with the scope. The scope may be forgotten since.
    whose: Whose,
    entry: Eviction,
}

/// The log.
#[derive(Debug)]
pub(crate) struct Log {
    most: usize,
    lines: VecDeque<Line>,
}

impl Log {
    /// An empty log of at most `most` entries.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, lines: VecDeque::with_capacity(most) }
    }
}

impl Manager {
    /// The last `limit` entries of the eviction log, the oldest first. They remain in the log.
    ///
    /// # Errors
    /// [`crate::error::Error::Closed`] or [`crate::error::Error::Invariant`].
    pub fn evictions(&self, limit: usize) -> Result<Vec<Eviction>> {
        self.open()?;
        let lines = &self.meter.log.lines;
        let known = lines.iter().skip(lines.len().saturating_sub(limit));
        let whose = |line: &Line| {
            let (tenant, lora) = (line.whose.tenant().to_vec(), line.whose.lora().to_owned());
            Eviction { tenant, lora, ..line.entry.clone() }
        };
        Ok(known.map(whose).collect())
    }

    /// Logs an eviction before the residency changes.
    pub(crate) fn log_eviction(&mut self, evicted: &Evicted, block: BlockId, now: Nanos) {
        let Evicted { tier, layers, reason, cause, .. } = *evicted;
        // Terms and the next victim cost more than the rest of an eviction.
        if self.meter.log.most == 0 {
            return;
        }
        let idle = self.idle(block, now);
        let (terms, value) = self.value(tier, block, self.residency(tier, block).have, idle);
        let next = self.tiers[tier].eviction.victim(stamp(now)).map(|entry| {
            let have = self.residency(tier, entry.id).have;
            self.value(tier, entry.id, have, self.idle(entry.id, now)).1
        });
        let entry = Eviction {
            at: now,
            block: self.trie().handle(block),
            position: self.trie().depth(block),
            tenant: Vec::new(),
            lora: String::new(),
            tier,
            to: (reason == Reason::Demoted).then_some(tier + 1),
            layers,
            cause,
            reason,
            uses: self.node(block).uses,
            idle,
            terms,
            value,
            next,
        };
        let whose = self.scopes.get(self.node(block).scope).whose.clone();
        let log = &mut self.meter.log;
        if log.lines.len() == log.most {
            log.lines.pop_front();
        }
        log.lines.push_back(Line { whose, entry });
    }

    /// The terms of a copy's price on a tier, and its value.
    fn value(&self, tier: TierId, block: BlockId, have: Layers, idle: Nanos) -> (Terms, f64) {
        let policy = self.tiers[tier].eviction.policy();
        let facts = self.facts(tier, block, have);
        let terms = policy.terms(&facts, &self.settings.cost);
        (terms, policy.value(&facts, terms.cost, idle))
    }
}
