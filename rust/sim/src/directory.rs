//! Directories: which machine has which blocks, as routers and peers learn it.
//!
//! Invariant: a directory only answers; what it says may have been true a while ago, and whoever goes
//! by it looks again. Cost: stated by each.

mod events;
mod exact;

use std::fmt::Debug;

use kvtrie_core::error::Result;
use kvtrie_core::manager::{BlockEvent, Settings};
use kvtrie_core::time::Nanos;

use crate::event::MachineId;
use crate::machine::{Machine, Sources};
use crate::request::Prompt;

pub use events::EventMap;
pub use exact::Exact;

/// How a directory learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Learning {
    /// It asks every manager each time.
    #[default]
    Exact,
    /// It hears of each change, so many nanoseconds late.
    Events(Nanos),
}

impl Learning {
    /// A directory that knows nothing yet, of machines of these settings.
    #[must_use]
    pub fn open(self, settings: &Settings, machines: usize) -> Box<dyn Directory> {
        match self {
            Self::Exact => Box::new(Exact),
            Self::Events(_) => Box::new(EventMap::new(settings, machines)),
        }
    }
}

/// Blocks in a row that one machine can send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sendable {
    /// How many.
    pub blocks: usize,
    /// How many of them only its disk has.
    pub on_disk: usize,
}

/// Knows which machine has which blocks.
pub trait Directory: Debug + Send {
    /// How many blocks at the front of a prompt each machine has with all their layers.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::resident`].
    fn resident(
        &self,
        prompt: Prompt<'_>,
        machines: &mut dyn Iterator<Item = &Machine>,
    ) -> Result<Vec<usize>>;

    /// How many blocks behind the first `own` each machine can send.
    ///
    /// # Errors
    /// As [`kvtrie_core::manager::Manager::probe`].
    fn sendable(
        &self,
        prompt: Prompt<'_>,
        own: usize,
        sources: Sources,
        machines: &mut dyn Iterator<Item = &Machine>,
        now: Nanos,
    ) -> Result<Vec<Sendable>>;

    /// A machine reports changes.
    fn update(&mut self, _machine: MachineId, _events: &[BlockEvent]) {}
}
