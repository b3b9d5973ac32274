//! Directories: block locations by machine, for routers and peers.
//!
//! Invariant: a directory only answers queries. Answers may be stale, so callers verify them on the
//! machine. Cost: see each directory.

mod events;
mod exact;

use std::fmt::Debug;

use kvtrie_core::{BlockEvent, Nanos, Result, Settings, TierId};

use crate::event::MachineId;
use crate::machine::{Machine, Sources};
use crate::request::Prompt;

pub use events::EventMap;
pub use exact::Exact;

/// How a directory gets its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Learning {
    /// Query every manager each time.
    #[default]
    Exact,
    /// Apply each change after this many nanoseconds.
    Events(Nanos),
}

impl Learning {
    /// Open an empty directory for machines with these settings. Leaves out the shared tier,
    /// because its blocks are available to all machines.
    #[must_use]
    pub fn open(
        self,
        settings: &Settings,
        machines: usize,
        shared: Option<TierId>,
    ) -> Box<dyn Directory> {
        match self {
            Self::Exact => Box::new(Exact),
            Self::Events(_) => Box::new(EventMap::new(settings, machines, shared)),
        }
    }
}

/// Consecutive blocks a machine can send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sendable {
    /// Number of blocks.
    pub blocks: usize,
    /// Number of blocks only on its disk.
    pub on_disk: usize,
}

/// Block locations by machine.
pub trait Directory: Debug + Send {
    /// Return the number of leading prompt blocks with all layers on each machine.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::resident`].
    fn resident(
        &self,
        prompt: Prompt<'_>,
        machines: &mut dyn Iterator<Item = &Machine>,
    ) -> Result<Vec<usize>>;

    /// Return the number of blocks after the first `own` each machine can send.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::probe`].
    fn sendable(
        &self,
        prompt: Prompt<'_>,
        own: usize,
        sources: Sources,
        machines: &mut dyn Iterator<Item = &Machine>,
        now: Nanos,
    ) -> Result<Vec<Sendable>>;

    /// Apply the block events of a machine.
    fn update(&mut self, _machine: MachineId, _events: &[BlockEvent]) {}
}
