//! Directories: which machine has which blocks, as routers and peers learn it.
//!
//! Invariant: a directory only answers queries; an answer may be stale, so callers verify it on the
//! machine. Cost: stated by each.

mod events;
mod exact;

use std::fmt::Debug;

use kvtrie_core::{BlockEvent, Nanos, Result, Settings, TierId};

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
    /// It learns of each change this many nanoseconds late.
    Events(Nanos),
}

impl Learning {
    /// A directory that knows nothing yet, of machines of these settings. It leaves out the tier that
    /// they share: each of them can have what is there.
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

/// Blocks in a row that one machine can send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sendable {
    /// How many.
    pub blocks: usize,
    /// Number of those that only its disk has.
    pub on_disk: usize,
}

/// Knows which machine has which blocks.
pub trait Directory: Debug + Send {
    /// Number of leading blocks of a prompt that each machine has with all their layers.
    ///
    /// # Errors
    /// As [`kvtrie_core::Manager::resident`].
    fn resident(
        &self,
        prompt: Prompt<'_>,
        machines: &mut dyn Iterator<Item = &Machine>,
    ) -> Result<Vec<usize>>;

    /// Number of blocks after the first `own` that each machine can send.
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

    /// A machine reports changes.
    fn update(&mut self, _machine: MachineId, _events: &[BlockEvent]) {}
}
