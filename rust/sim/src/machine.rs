//! A machine: a manager and an executor for its moves.
//!
//! Invariant: all pending moves are taken before time advances. Cost: the manager's calls.

mod remote;

use std::sync::Arc;

use kvtrie_core::{Handle, LoadMode, Locked, Nanos, Query, Result, Scope, TierId};

use crate::call::Calls;
use crate::event::MachineId;
use crate::remote::SharedStore;
use crate::request::Prompt;
use crate::transfer::{Executor, Transfer};
use remote::Remote;

/// Tiers of a peer used as copy sources.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Host memory tier.
    pub host: TierId,
    /// Disk tier, if any.
    pub disk: Option<TierId>,
}

/// A simulated machine.
#[derive(Debug)]
pub struct Machine {
    /// Machine number.
    pub number: MachineId,
    /// Calls to its manager.
    pub calls: Calls,
    /// Executor of its moves.
    pub executor: Executor,
    /// Store shared with the other machines.
    remote: Option<Remote>,
}

impl Machine {
    /// Create a machine. The manager has no moves in flight.
    #[must_use]
    pub fn new(
        number: MachineId,
        manager: Arc<Locked>,
        load: LoadMode,
        transfer: Transfer,
        logged: bool,
    ) -> Self {
        let calls = Calls::new(manager, load, logged);
        let executor = Executor::new(calls.settings(), transfer);
        Self { number, calls, executor, remote: None }
    }

    /// Use a shared store as the last tier.
    pub(crate) fn share(&mut self, store: SharedStore) {
        self.remote = Some(Remote::new(self.calls.settings(), store));
    }

    /// Return the prompt blocks after the first `own` this machine can send, each with the fastest
    /// tier holding a full copy. Stops at the first block without a full copy in host memory or on
    /// disk.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::probe`].
    pub fn sendable(
        &self,
        prompt: Prompt<'_>,
        own: usize,
        sources: Sources,
        now: Nanos,
    ) -> Result<Vec<(Handle, TierId)>> {
        let manager = self.calls.manager();
        let known = manager.probe(Query::Tokens(prompt.tokens), &Scope::default(), prompt.keep)?;
        let layers = manager.settings().layers;
        let blocks = manager.describe(known.get(own..).unwrap_or_default(), now);
        let sent = blocks.into_iter().map_while(|block| {
            let whole = |tier: &TierId| {
                let held = block.copies.iter().find(|copy| (copy.tier, copy.group) == (*tier, 0));
                held.is_some_and(|copy| !copy.leaving && copy.layers.len() == layers)
            };
            let tier = Some(sources.host).filter(whole).or(sources.disk.filter(whole))?;
            Some((block.block, tier))
        });
        Ok(sent.collect())
    }

    /// Take the manager's pending moves.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::moves`].
    pub fn take(&mut self, now: Nanos) -> Result<()> {
        self.take_with(Vec::new(), now)
    }

    fn take_with(&mut self, mut freed: Vec<u64>, now: Nanos) -> Result<()> {
        loop {
            let stores = self.remote.as_ref().map_or(usize::MAX, Remote::free);
            let handed = self.calls.moves(stores)?;
            if handed.is_empty() && freed.is_empty() {
                return Ok(());
            }
            if let Some(remote) = &mut self.remote {
                remote.begin(&handed);
            }
            self.executor.take(&handed, std::mem::take(&mut freed), now);
        }
    }

    /// End a transmission: report its moves, and start the jobs waiting for them. Returns the
    /// moves.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::complete`].
    pub fn transmission_ends(&mut self, number: u64, now: Nanos) -> Result<Vec<u64>> {
        let (moves, freed) = self.executor.end(number, now);
        if !moves.is_empty() {
            self.calls.complete(&moves, now)?;
            self.written(&moves, now);
            self.take_with(freed, now)?;
        }
        Ok(moves)
    }
}
