//! Exact directory: queries every manager each time.
//!
//! Invariant: stateless, so never stale. Cost: a trie walk per machine and query.

use kvtrie_core::{Nanos, Result};

use super::{Directory, Sendable};
use crate::machine::{Machine, Sources};
use crate::request::Prompt;

/// Queries every manager.
#[derive(Debug, Default)]
pub struct Exact;

impl Directory for Exact {
    fn resident(
        &self,
        prompt: Prompt<'_>,
        machines: &mut dyn Iterator<Item = &Machine>,
    ) -> Result<Vec<usize>> {
        machines.map(|machine| machine.resident(prompt)).collect()
    }

    fn sendable(
        &self,
        prompt: Prompt<'_>,
        own: usize,
        sources: Sources,
        machines: &mut dyn Iterator<Item = &Machine>,
        now: Nanos,
    ) -> Result<Vec<Sendable>> {
        let of = |machine: &Machine| {
            let blocks = machine.sendable(prompt, own, sources, now)?;
            let on_disk = blocks.iter().filter(|(_, tier)| Some(*tier) == sources.disk).count();
            Ok(Sendable { blocks: blocks.len(), on_disk })
        };
        machines.map(of).collect()
    }
}
