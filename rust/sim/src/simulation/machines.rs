//! Checks of the machines of a run, and their shared lane queues.
//!
//! Invariant: all checks run before the simulation. Cost: O(machines).

use std::collections::BTreeMap;

use kvtrie_core::{Error, Kind, Result, Settings, TierSpec};

use super::Hardware;
use crate::machine::Machine;
use crate::network::{PeerSpec, SharedQueue};
use crate::remote::Lookup;
use crate::transfer::Mode;

/// Maximum number of blocks of a tier.
const MOST_BLOCKS: u32 = u32::MAX - 1;

/// Shared queues by name: of the network and of the shared store.
pub(super) struct Queues(BTreeMap<String, SharedQueue>);

impl Queues {
    pub(super) fn new(network: Option<&PeerSpec>, store: Option<&TierSpec>) -> Self {
        let lanes = store.into_iter().flat_map(|tier| [&tier.read, &tier.store]);
        let names = network.into_iter().filter_map(|spec| spec.shares.as_ref());
        let names = names.chain(lanes.filter_map(|lane| lane.shares.as_ref()));
        Self(names.map(|name| (name.clone(), SharedQueue::default())).collect())
    }

    /// Queue with a name, or a new queue.
    pub(super) fn of(&self, name: Option<&String>) -> SharedQueue {
        name.and_then(|name| self.0.get(name)).cloned().unwrap_or_default()
    }

    /// Attach the lanes of a machine to the queues with their names.
    pub(super) fn enter(&self, machine: &mut Machine, mode: Mode) -> Result<()> {
        for (name, queue) in &self.0 {
            if machine.executor.share(name, queue) && mode == Mode::Predicted {
                return Err(Error::config(format!(
                    "lanes of a tier share {name} with the network or other machines, and predicted \
                     moves do not wait for them: transfer 'executor' wanted"
                )));
            }
        }
        Ok(())
    }
}

/// Size the last tier as a machine's view of the shared store: the blocks of the store and of the
/// local tiers, and the same number of blocks evicted from the store without its knowledge.
pub(super) fn track_store(tiers: &mut [TierSpec]) {
    let own = tiers.iter().fold(0_u32, |sum, tier| sum.saturating_add(tier.blocks));
    if let Some(store) = tiers.last_mut() {
        store.blocks = own.saturating_mul(2).min(MOST_BLOCKS);
    }
}

/// Check for a single layer group, required for exchanging blocks.
pub(super) fn check_groups(settings: &Settings) -> Result<()> {
    let Some(groups) = &settings.groups else { return Ok(()) };
    Err(Error::config(format!(
        "machines exchange blocks of one group of layers, and {} are kept apart: no peers, no network \
         and no shared store wanted",
        groups.groups.len()
    )))
}

/// Check the tiers for several machines.
pub(super) fn check_machines(
    settings: &Settings,
    machines: usize,
    hardware: &[Hardware],
    remote: Option<Lookup>,
) -> Result<()> {
    if !hardware.is_empty() && hardware.len() != machines {
        return Err(Error::config(format!(
            "machines is {machines}, and the hardware of {} is given",
            hardware.len()
        )));
    }
    let kinds = |tiers: &[TierSpec]| tiers.iter().map(|tier| tier.kind.name()).collect::<Vec<_>>();
    let wanted = kinds(&settings.tiers);
    for (at, one) in hardware.iter().enumerate() {
        let found = kinds(&one.tiers);
        if found != wanted {
            return Err(Error::config(format!(
                "machine {at} has tiers {found:?}: those of all machines, {wanted:?}, wanted"
            )));
        }
    }
    let last = settings.tiers.last().filter(|tier| tier.kind == Kind::Remote);
    if remote.is_none() && last.is_some() && machines > 1 {
        return Err(Error::config(format!(
            "machines is {machines}, and a tier is 'remote', which belongs to one machine: 1 machine, \
             or a store that all share, wanted"
        )));
    }
    if remote.is_some() && last.is_none() {
        return Err(Error::config(format!(
            "machines share their last tier, and tiers are {wanted:?}: 'remote' wanted at the end"
        )));
    }
    let known = |tier: &TierSpec| (tier.blocks, tier.read.clone(), tier.store.clone());
    let other = |one: &Hardware| one.tiers.last().map(known) != last.map(known);
    let other = hardware.iter().position(other);
    if let (Some(at), true) = (other, remote.is_some()) {
        return Err(Error::config(format!(
            "machine {at} has a different tier 'remote': the {} blocks of the shared store wanted",
            last.map_or(0, |tier| tier.blocks)
        )));
    }
    Ok(())
}
