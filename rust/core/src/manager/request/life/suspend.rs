//! Preemption: suspends a lease to its tokens, and resumes it.
//!
//! Invariant: suspending never fails, and writes back blocks as far as there is room. Cost: O(path
//! · log n).

use crate::block::{BlockId, LeaseId, MoveId, TierId, Token};
use crate::error::{Error, Result};
use crate::tier::{Kind, ResidencyState};
use crate::time::{Nanos, Stamp};

use crate::manager::Manager;
use crate::manager::kinds::{Cause, LoadMode};
use crate::manager::request::life::lease::Hold;

impl Manager {
    /// Unpins a lease's blocks and keeps only its tokens.
    ///
    /// Writes the blocks back to the next tier as far as there is room, and drops the rest from the
    /// first tier. The partial block is dropped. Like `release`, returns the moves still using
    /// slots of an engine's tier.
    ///
    /// # Errors
    /// [`Error::Config`] if `to` is not the next tier below the first.
    pub fn suspend(&mut self, id: LeaseId, to: Kind, now: Nanos) -> Result<Vec<MoveId>> {
        self.active(id)?;
        let below = self.tiers.get(1).map(|tier| tier.spec.kind);
        if below.is_some_and(|below| below != to) {
            return Err(Error::config(format!(
                "suspend to '{}', the tier below '{}' is '{}'",
                to.name(),
                self.tiers[0].spec.kind.name(),
                below.map_or("none", Kind::name)
            )));
        }
        let now = self.tick(now);
        self.take_back(id);
        self.store_engine_blocks(id, now);
        let mut lease = self.leases[&id].clone();
        let mut tokens: Vec<Token> = Vec::with_capacity(self.lease_tokens(id)?);
        for &block in lease.path.blocks() {
            tokens.extend_from_slice(self.trie().tokens(block));
        }
        tokens.extend_from_slice(&lease.tail);
        // Numbers of digests may be reused while no block refers to them.
        let tokens = self.scopes.digests.tokens(tokens);
        // The lease is emptied first, so that no failure below is reported to it.
        let touching = self.reads_of(&lease);
        self.empty_lease(id, Hold::Suspended(tokens));
        self.abandon_lease(&mut lease, now);
        self.carry_out();
        for &block in lease.path.blocks().iter().rev() {
            // Unpinning may have removed it.
            if !self.trie().alive(block) {
                continue;
            }
            self.evict_first(block, now);
        }
        Ok(touching)
    }

    /// Plans again for a suspended lease, with room for `reserve` tokens after its end. Blocks that
    /// no longer match must be computed and committed again. `load` decides on loads.
    ///
    /// # Errors
    /// [`Error::NoSpace`], and the lease stays suspended. [`Error::Config`] if it is not suspended.
    pub fn resume(
        &mut self,
        id: LeaseId,
        reserve: usize,
        load: LoadMode,
        now: Nanos,
    ) -> Result<()> {
        let Hold::Suspended(tokens) = &self.lease(id)?.hold else {
            return Err(Error::config(format!("lease {id} is not suspended")));
        };
        let tokens = tokens.clone();
        let now = self.tick(now);
        self.reacquire(id, &tokens, reserve, load, now)
    }

    /// Evicts a block and its resume point from the first tier, if nothing else needs the block
    /// there.
    fn evict_first(&mut self, block: BlockId, now: Nanos) {
        const FIRST: TierId = 0;
        let shared = self.tiers.writes_shared(FIRST);
        if self.node(block).refs == 0 && self.points.has_on(FIRST, block) {
            if shared {
                self.copy_point(FIRST, block, now);
            } else {
                self.demote_point(FIRST, block, now);
            }
        }
        // It stays until a shared tier below has it or its slot is needed.
        if shared && self.node(block).refs == 0 {
            self.write_down(FIRST, block, None, Stamp::MAX, now);
            return;
        }
        // With layer slots a single range of layers leaves at a time.
        while self.evictable(FIRST, block)
            && self.residency(FIRST, block).state == ResidencyState::Resident
        {
            let mut set = self.eviction_set_for(Cause::Suspended);
            self.choose(&mut set, FIRST, block, now);
            let evicted = !set.victims.is_empty();
            self.apply(&set, now);
            if !evicted || !self.trie().alive(block) {
                return;
            }
        }
    }
}
