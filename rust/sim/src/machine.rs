//! A machine: a manager and the executor that carries its moves.
//!
//! Invariant: whatever the manager wants moved is taken over before time goes on. Cost: that of the
//! manager's calls.

use kvtrie_core::error::Result;
use kvtrie_core::manager::{LoadMode, Settings};
use kvtrie_core::time::Nanos;

use crate::call::Calls;
use crate::event::MachineId;
use crate::transfer::{Executor, Transfer};

/// One machine.
#[derive(Debug)]
pub struct Machine {
    /// Its number.
    pub number: MachineId,
    /// Its manager.
    pub calls: Calls,
    /// What carries its moves.
    pub executor: Executor,
}

impl Machine {
    /// A machine without a block.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::new`].
    pub fn new(
        number: MachineId,
        settings: &Settings,
        load: LoadMode,
        transfer: Transfer,
        logged: bool,
    ) -> Result<Self> {
        let calls = Calls::new(settings.clone(), load, logged)?;
        Ok(Self { number, calls, executor: Executor::new(settings, transfer) })
    }

    /// Takes over what the manager wants moved.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::moves`].
    pub fn take(&mut self, now: Nanos) -> Result<()> {
        self.take_with(Vec::new(), now)
    }

    fn take_with(&mut self, mut freed: Vec<u64>, now: Nanos) -> Result<()> {
        loop {
            let handed = self.calls.moves()?;
            if handed.is_empty() && freed.is_empty() {
                return Ok(());
            }
            self.executor.take(&handed, std::mem::take(&mut freed), now);
        }
    }

    /// A transmission ends: its moves are reported, and what waited for them enters. Returns them.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::complete`].
    pub fn transmission_ends(&mut self, number: u64, now: Nanos) -> Result<Vec<u64>> {
        let (moves, freed) = self.executor.end(number, now);
        if !moves.is_empty() {
            self.calls.complete(&moves, now)?;
            self.take_with(freed, now)?;
        }
        Ok(moves)
    }
}
