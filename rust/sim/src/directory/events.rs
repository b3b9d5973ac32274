//! Event-driven directory: a map from block keys to machines.
//!
//! Invariant: after all events it agrees with the exact directory. Cost: O(1) per event. A query
//! hashes the prompt once, up to the first block missing on every machine, and answers for all
//! machines.

use kvtrie_core::{
    BlockEvent, BlockEventKind, BlockKey, Group, Layers, Nanos, Result, Settings, TierId, keys_of,
    longest_resume, scope_key,
};
use rustc_hash::FxHashMap;

use super::{Directory, Sendable};
use crate::event::MachineId;
use crate::machine::{Machine, Sources};
use crate::request::Prompt;

/// Maximum number of tiers per machine.
const TIERS: usize = 4;

/// Residency of a block on a machine.
#[derive(Clone, Copy, Debug)]
struct Holder {
    machine: MachineId,
    /// Valid layers of the first group on each tier.
    valid: [Layers; TIERS],
    /// Bit set of the groups after the first, by tier.
    others: [u64; TIERS],
}

/// Block map maintained by events.
#[derive(Debug)]
pub struct EventMap {
    /// Machines by block key, ordered by number.
    holders: FxHashMap<BlockKey, Vec<Holder>>,
    scope: BlockKey,
    block_tokens: usize,
    all: Layers,
    /// Groups after the first. A prefix needs only part of their blocks.
    others: Vec<Group>,
    machines: usize,
    /// Tier shared by the machines.
    shared: Option<TierId>,
}

impl EventMap {
    /// Create an empty map for machines with these settings, without the shared tier.
    #[must_use]
    pub fn new(settings: &Settings, machines: usize, shared: Option<TierId>) -> Self {
        let groups = settings.groups.as_ref().map_or(&[][..], |kept| &kept.groups);
        let others = groups.get(1..).unwrap_or_default().to_vec();
        debug_assert!(others.len() <= 64, "a bit for each");
        Self {
            holders: FxHashMap::default(),
            scope: scope_key(&settings.fingerprint, settings.block_tokens, &[], ""),
            block_tokens: settings.block_tokens as usize,
            all: Layers::new(0, settings.layers),
            others,
            machines,
            shared,
        }
    }

    /// Walk a prompt after its first `skip` blocks while any machine's run continues.
    /// `visit` gets the block position and a holder, and returns whether the holder's run
    /// continues.
    fn walk(&self, prompt: Prompt<'_>, skip: usize, mut visit: impl FnMut(usize, &Holder) -> bool) {
        let usable = prompt.tokens.len().saturating_sub(prompt.keep);
        let keys = keys_of(self.scope, &prompt.tokens[..usable], self.block_tokens);
        for (at, key) in keys.skip(skip).enumerate() {
            let Some(holders) = self.holders.get(&key) else { return };
            if holders.iter().filter(|holder| visit(at, holder)).count() == 0 {
                return;
            }
        }
    }

    fn whole(&self, holder: &Holder, tier: TierId) -> bool {
        holder.valid[tier] == self.all
    }

    /// Whether the tiers together have all layers of the first group.
    fn covered(&self, holder: &Holder) -> bool {
        let valid = |layer| holder.valid.iter().any(|layers| layers.contains(layer));
        holder.valid.contains(&self.all) || self.all.iter().all(valid)
    }
}

impl Directory for EventMap {
    fn resident(
        &self,
        prompt: Prompt<'_>,
        _: &mut dyn Iterator<Item = &Machine>,
    ) -> Result<Vec<usize>> {
        let mut found = vec![0; self.machines];
        // By machine: groups after the first present on any tier, for each block of the run.
        let mut parts: Vec<Vec<u64>> = vec![Vec::new(); self.machines];
        self.walk(prompt, 0, |at, holder| {
            let row = &mut found[holder.machine];
            let goes_on = *row == at && self.covered(holder);
            *row += usize::from(goes_on);
            if goes_on && !self.others.is_empty() {
                let groups = holder.others.iter().fold(0, |groups, tier| groups | tier);
                parts[holder.machine].push(groups);
            }
            goes_on
        });
        let tokens = self.block_tokens as u64;
        for (row, parts) in found.iter_mut().zip(parts) {
            let most = u32::try_from(*row).expect("fewer than 2^32 blocks");
            let has = |group: usize, block: u32| parts[block as usize] & (1 << group) != 0;
            *row = longest_resume(&self.others, tokens, most, has) as usize;
        }
        Ok(found)
    }

    fn sendable(
        &self,
        prompt: Prompt<'_>,
        own: usize,
        sources: Sources,
        _: &mut dyn Iterator<Item = &Machine>,
        _: Nanos,
    ) -> Result<Vec<Sendable>> {
        let mut found = vec![Sendable::default(); self.machines];
        self.walk(prompt, own, |at, holder| {
            let row = &mut found[holder.machine];
            let in_host = self.whole(holder, sources.host);
            let on_disk = !in_host && sources.disk.is_some_and(|disk| self.whole(holder, disk));
            let goes_on = row.blocks == at && (in_host || on_disk);
            row.blocks += usize::from(goes_on);
            row.on_disk += usize::from(goes_on && on_disk);
            goes_on
        });
        Ok(found)
    }

    fn update(&mut self, machine: MachineId, events: &[BlockEvent]) {
        let own = events.iter().filter(|event| Some(event.tier) != self.shared);
        for BlockEvent { kind, key, tier, group, layers, .. } in own {
            let holders = self.holders.entry(*key).or_default();
            let place = holders.binary_search_by_key(&machine, |holder| holder.machine);
            let at = place.unwrap_or_else(|at| {
                let (valid, others) = ([Layers::NONE; TIERS], [0; TIERS]);
                holders.insert(at, Holder { machine, valid, others });
                at
            });
            let holder = &mut holders[at];
            let (valid, others) = (&mut holder.valid[*tier], &mut holder.others[*tier]);
            // The layers of a copy are contiguous before and after each event. Layers of a later
            // group are stored and removed together.
            match (kind, group.checked_sub(1)) {
                (BlockEventKind::Stored, None) => {
                    *valid = valid.join(*layers).unwrap_or(Layers::NONE);
                }
                (BlockEventKind::Removed, None) => {
                    *valid = valid.without(*layers).unwrap_or(Layers::NONE);
                }
                (BlockEventKind::Stored, Some(bit)) => *others |= 1 << bit,
                (BlockEventKind::Removed, Some(bit)) => *others &= !(1 << bit),
            }
            if holder.valid.iter().all(|valid| valid.is_empty()) && holder.others == [0; TIERS] {
                holders.remove(at);
            }
            if holders.is_empty() {
                self.holders.remove(key);
            }
        }
    }
}
