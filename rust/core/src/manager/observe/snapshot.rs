//! Snapshot: the whole state as text, for comparison: equal states give equal bytes.
//!
//! Invariant: clock and counters are excluded, so a refused call does not change the snapshot.
//! Cost: O(everything).

use std::fmt::Write;

use crate::block::BlockId;
use crate::tier::ResidencyState;

use crate::manager::Manager;

impl Manager {
    /// The state in a canonical, readable form.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = String::new();
        self.write_snapshot(&mut out).expect("writing to a string does not fail");
        out.into_bytes()
    }

    fn write_snapshot(&self, out: &mut String) -> std::fmt::Result {
        for (id, scope) in self.scopes.all() {
            if !self.scopes.in_use(id, self.trie()) {
                // The next call removes it.
                continue;
            }
            let (whose, structure) = (&scope.whose, scope.structure.name());
            writeln!(out, "scope {id} {:?} {:?} {structure}", whose.tenant(), whose.lora())?;
            let mut stack: Vec<BlockId> = self.trie().first_blocks(scope.root).collect();
            while let Some(block) = stack.pop() {
                self.write_block(block, out)?;
                stack.extend(self.trie().children(block));
            }
        }
        for lease in self.leases_in_order() {
            writeln!(out, "{lease:?}")?;
        }
        writeln!(out, "{:?}", self.awaits)?;
        writeln!(out, "{:?} {:?}", self.private_slots, self.ahead)?;
        let mut in_flight: Vec<_> = self.moves.values().collect();
        in_flight.sort_unstable_by_key(|flight| flight.id);
        for flight in in_flight {
            writeln!(out, "{flight:?}")?;
        }
        writeln!(out, "{} {:?}", self.moves.queues(), self.marked)?;
        for store in self.shared_stores.iter() {
            writeln!(out, "{store:?}")?;
        }
        writeln!(out, "{:?}", self.shared_stores.held())?;
        writeln!(out, "{:?}", self.failed)?;
        writeln!(out, "{:?} {:?} {:?}", self.sessions, self.ages, self.refused)?;
        self.write_hints(out)?;
        writeln!(out, "{:?}", self.prices)?;
        for point in self.points.all() {
            writeln!(out, "{point:?}")?;
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            let name = tier.spec.kind.name();
            if self.blocks.arena(number).is_some() {
                // Free slots of the first group are in its space or in the arena.
                writeln!(out, "{name} {:?}", self.blocks.group_slots(number))?;
            } else {
                writeln!(out, "{name} {:?}", self.blocks.space(number).spare())?;
            }
            for entry in tier.eviction.entries() {
                writeln!(out, "{entry:?}")?;
            }
        }
        Ok(())
    }

    fn write_block(&self, block: BlockId, out: &mut String) -> std::fmt::Result {
        let node = *self.node(block);
        let handle = self.trie().handle(block).0;
        write!(out, "block {handle:#x} {:?} {node:?}", self.trie().tokens(block))?;
        if let Some(producers) = self.producers.of(block) {
            write!(out, " {producers:x?}")?;
        }
        for tier in 0..self.tiers.len() {
            let residency = self.residency(tier, block);
            if residency.state != ResidencyState::Absent {
                write!(out, " {tier}:{residency:?}")?;
                if let Some(arrival) = self.arrival(tier, block) {
                    write!(out, "{arrival:?}")?;
                }
                if self.tiers[tier].spec.layer_slots {
                    write!(out, "{:?}", self.blocks.space(tier).row(residency.slot))?;
                }
            }
        }
        writeln!(out)
    }
}
