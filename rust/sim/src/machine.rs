//! A machine: a manager and the executor that carries its moves.
//!
//! Invariant: whatever the manager wants moved is taken over before time goes on. Cost: that of the
//! manager's calls.

mod remote;

use std::sync::Arc;

use kvtrie_core::{Handle, LoadMode, Locked, Nanos, Query, Result, Scope, TierId};

use crate::call::Calls;
use crate::event::MachineId;
use crate::remote::SharedStore;
use crate::request::Prompt;
use crate::transfer::{Executor, Transfer};
use remote::Remote;

/// The tiers of a peer that blocks are read from.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Its host memory.
    pub host: TierId,
    /// Its disk, if it has one.
    pub disk: Option<TierId>,
}

/// One machine.
#[derive(Debug)]
pub struct Machine {
    /// Its number.
    pub number: MachineId,
    /// Its manager.
    pub calls: Calls,
    /// The executor of its moves.
    pub executor: Executor,
    /// The store that it shares with others.
    remote: Option<Remote>,
}

impl Machine {
    /// A machine with a manager that has no moves under way.
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

    /// The last tier is a store that machines share.
    pub(crate) fn share(&mut self, store: SharedStore) {
        self.remote = Some(Remote::new(self.calls.settings(), store));
    }

    /// The blocks of a prompt after the first `own` that it can send, up to the first that neither
    /// its host nor its disk has whole, each with the first of them that has.
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
                let here = block.copies.iter().find(|copy| (copy.tier, copy.group) == (*tier, 0));
                here.is_some_and(|copy| !copy.leaving && copy.layers.len() == layers)
            };
            let tier = Some(sources.host).filter(whole).or(sources.disk.filter(whole))?;
            Some((block.block, tier))
        });
        Ok(sent.collect())
    }

    /// Takes over what the manager wants moved.
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

    /// A transmission ends: its moves are reported, and what waited for them enters. Returns them.
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
