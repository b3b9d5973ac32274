//! Leases: a request's references to blocks and slots, with its plan.
//!
//! Invariant: each block has a reference from each lease with the block on its path, and the tail
//! is shorter than a block. Cost: O(path) to make and to release. A lease's tokens:
//!
//! ```text
//! | path: full blocks in the trie, pinned | tail | room          |
//!   residency, or a private slot           groups[0].written, one by one
//!                                          (or shared with forks: `tail_from`)
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, GroupId, Handle, Layers, LeaseId, MoveId, NO_SLOT, Structure, Token};
use crate::error::{Error, Result};
use crate::private_slots::PrivateSlotId;
use crate::scope::{Scope, ScopeId};
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::kinds::Span;
use crate::manager::meter::late_hits::Undecided;
use crate::manager::node::Runs;
use crate::manager::points::Stay;
use crate::manager::policy_feed::RequestContext;
use crate::manager::request::life::session::SessionId;
use crate::manager::request::matching::path::{LeasePath, PathBlock, path_border};
use crate::manager::request::slots::lease_slots::{LeaseGroups, OpenSlot};

/// Plan: how each block and layer of a prefix becomes resident on the first tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Rectangles of blocks and layers, in logical order.
    pub spans: Vec<Span>,
    /// Predicted time when the whole match is resident.
    pub resident_at: Nanos,
    /// Predicted time when the rest of the prompt is computed too.
    pub finish: Nanos,
    /// Whether no plan can finish earlier under the predictions of the lanes and the cost model.
    pub exact: bool,
}

impl Plan {
    /// Delays the plan to a later time of full residency.
    pub(crate) fn wait_until(&mut self, resident_at: Nanos) {
        let delay = resident_at.saturating_sub(self.resident_at);
        self.resident_at += delay;
        self.finish = self.finish.saturating_add(delay);
    }
}

/// Slot of the tail's tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TailFrom {
    /// In the first open slot.
    OpenSlot,
    /// In a private slot shared by forks.
    Shared(PrivateSlotId),
    /// In a block of the trie, at which the path was truncated.
    Block(PathBlock),
}

/// State of a lease.
#[derive(Clone, Debug)]
pub(crate) enum Hold {
    Active,
    /// Preempted: only its tokens are left.
    Suspended(Vec<Token>),
}

/// Lease: a request's references to blocks and slots.
#[derive(Clone, Debug)]
pub struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) scope: Scope,
    pub(crate) scope_id: ScopeId,
    pub(crate) session: Option<SessionId>,
    pub(crate) path: LeasePath,
    pub(crate) tail: Vec<Token>,
    pub(crate) tail_from: TailFrom,
    /// Its slots. In the first group they follow the path, and the first slot has the tail.
    pub(crate) groups: Box<LeaseGroups>,
    pub(crate) matched: usize,
    pub(crate) plan: Plan,
    /// Its blocks that may still become hits.
    pub(crate) undecided: Undecided,
    /// Whether its plans overlap loads and computation layer by layer.
    pub(crate) layerwise: bool,
    /// Whether a step of the path must still be offered to the trie.
    pub(crate) unconfirmed: bool,
    pub(crate) hold: Hold,
    pub(crate) request: RequestContext,
    /// Time of acquire or resume. Until the lease ends, it is the last use of its committed blocks.
    pub(crate) acquired: Nanos,
}

impl Lease {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Number of matched tokens of the prompt: a multiple of the block size.
    #[must_use]
    pub fn matched(&self) -> usize {
        self.matched
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether it is suspended.
    #[must_use]
    pub fn suspended(&self) -> bool {
        matches!(self.hold, Hold::Suspended(_))
    }

    /// Whether the engine computes into this private slot, now or later.
    pub(crate) fn keeps(&self, private: PrivateSlotId) -> bool {
        self.private_slots().any(|known| known == private)
    }

    /// The borders, in blocks, to end a pass at: each becomes a resume point.
    pub fn resume_borders(&self) -> impl Iterator<Item = u32> + '_ {
        self.groups.borders.iter().map(|&(border, _)| border)
    }

    /// The private slots it writes or uses, without the slot of a shared tail.
    pub(crate) fn private_slots(&self) -> impl Iterator<Item = PrivateSlotId> + '_ {
        let open = self.groups.open().filter_map(|(_, open)| open.private());
        self.path.private_slots().chain(open)
    }

    /// The slot of a tail outside the open slots.
    pub(crate) fn private_tail(&self) -> Option<PrivateSlotId> {
        match self.tail_from {
            TailFrom::OpenSlot => None,
            TailFrom::Shared(private) => Some(private),
            TailFrom::Block(step) => step.private,
        }
    }

    /// Slots it has while room is free, with their groups.
    pub(crate) fn spare_slots(&self) -> impl Iterator<Item = (GroupId, OpenSlot)> + '_ {
        let spare = self.groups.all().iter().map(|slots| &slots.spare).enumerate();
        spare.flat_map(|(group, spare)| spare.slots().map(move |slot| (group, slot)))
    }

    /// The blocks to be computed by the engine, with the layers to write for each.
    pub fn recompute(&self) -> impl Iterator<Item = (u32, Layers)> + '_ {
        let place = |at| u32::try_from(at).expect("fewer than 2^32 blocks");
        let computed = self.path.exceptions().filter(|(_, step)| !step.compute.is_empty());
        computed.map(move |(at, step)| (place(at), step.compute))
    }
}

impl Manager {
    /// Finds a lease by id. A lease outlives scheduler steps.
    ///
    /// # Errors
    /// [`Error::Closed`] if it is released or never existed.
    pub fn lease(&self, id: LeaseId) -> Result<&Lease> {
        self.open()?;
        let lease = self.leases.get(&id).map(|lease| &**lease);
        lease.ok_or_else(|| Error::closed(format!("lease {id} is not held")))
    }

    /// All leases, the oldest first.
    pub(crate) fn leases_in_order(&self) -> Vec<&Lease> {
        let mut leases: Vec<&Lease> = self.leases.values().map(|lease| &**lease).collect();
        leases.sort_unstable_by_key(|lease| lease.id);
        leases
    }

    /// A lease that is not suspended.
    pub(crate) fn active(&self, id: LeaseId) -> Result<&Lease> {
        let lease = self.lease(id)?;
        if lease.suspended() {
            return Err(Error::closed(format!("lease {id} is suspended; resume it first")));
        }
        Ok(lease)
    }

    pub(crate) fn lease_mut(&mut self, id: LeaseId) -> &mut Lease {
        self.leases.get_mut(&id).expect("a lease that was just seen")
    }

    /// Number of tokens of a lease, in its path and its tail.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn lease_tokens(&self, id: LeaseId) -> Result<usize> {
        let lease = self.lease(id)?;
        Ok(match &lease.hold {
            Hold::Suspended(tokens) => tokens.len(),
            Hold::Active => lease.path.len() * self.block_tokens() + lease.tail.len(),
        })
    }

    /// Handles of the full blocks of a lease, in logical order. Empty while it is suspended.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn lease_blocks(&self, id: LeaseId) -> Result<Vec<Handle>> {
        Ok(self.trie().handles(self.lease(id)?.path.blocks()))
    }

    /// The moves to finish before the engine may read the path and write the open slots.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn awaits(&self, id: LeaseId) -> Result<Vec<MoveId>> {
        let mut awaits = Vec::new();
        self.each_await(self.lease(id)?, |id| awaits.push(id));
        awaits.sort_unstable();
        awaits.dedup();
        Ok(awaits)
    }

    /// The borders, in blocks, to end a pass of a lease at: each becomes a resume point.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn resume_borders(&self, id: LeaseId) -> Result<Vec<u32>> {
        Ok(self.lease(id)?.resume_borders().collect())
    }

    /// Visits the moves awaited by a lease. May visit a move more than once.
    pub(crate) fn each_await(&self, lease: &Lease, mut visit: impl FnMut(MoveId)) {
        self.awaits.of(lease.id).iter().copied().for_each(&mut visit);
        if !self.blocks.none_draining(0) {
            self.readers(lease, usize::MAX).for_each(visit);
        }
    }

    /// The stores still reading slots to be written by a lease, up to `blocks` slots after its path
    /// in the first group.
    pub(crate) fn readers<'a>(
        &'a self,
        lease: &'a Lease,
        blocks: usize,
    ) -> impl Iterator<Item = MoveId> + 'a {
        let computed = lease.path.exceptions().filter(|(_, step)| !step.compute.is_empty());
        let computed = computed.filter_map(|(_, step)| step.private.map(OpenSlot::Private));
        let next = lease.groups[0].written.slots().take(blocks);
        let first = computed.chain(next).map(|open| (0, open));
        let others = lease.groups.open().filter(|&(group, _)| group > 0);
        first.chain(others).flat_map(|(group, open)| self.open_slot_waits(group, open))
    }

    /// Pins the blocks of a path.
    pub(crate) fn pin(&mut self, path: &[BlockId]) {
        let mut runs = Runs::new();
        self.blocks.change_values(path, |run, node| {
            node.refs += 1;
            // Only the first reference takes a block out of the eviction index.
            if node.refs == 1 {
                runs.push(run);
            }
        });
        let Some(first) = runs.first() else { return };
        let structure = self.departures(first.start);
        for run in runs {
            for block in self.edge(0, run.clone(), structure) {
                self.tiers[0].eviction.unlink(block);
            }
            if !self.points.is_empty() {
                for block in self.points.of_run(run) {
                    self.tiers[0].eviction.unlink(block);
                }
            }
        }
    }

    /// Unpins the blocks of a path, last first, and removes blocks without references. `until` is
    /// the time of their last use, if the lease used them.
    pub(crate) fn unpin(&mut self, path: &[BlockId], until: Option<Nanos>) {
        let mut runs: SmallVec<[(Range<BlockId>, bool); 12]> = SmallVec::new();
        let Some(&last) = path.last() else { return };
        self.blocks.change_values(path, |run, node| {
            node.refs -= 1;
            node.access = until.map_or(node.access, stamp);
            runs.push((run, node.refs == 0));
        });
        // Runs split at the path's end may join again.
        self.blocks.trim(last);
        let structure = self.departures(last);
        if until.is_some() {
            self.refused.used(path);
            for (run, _) in &runs {
                self.refresh_from(1, run.clone(), structure);
            }
        }
        let leaf_only = structure == Structure::LeafOnly;
        // If every block is resident, none is removed.
        let all = self.holds_all(0);
        let mut resident = false;
        for (run, free) in runs.into_iter().rev() {
            let child_resident = std::mem::take(&mut resident);
            // A run that is still pinned keeps all earlier runs pinned as well.
            if !free {
                continue;
            }
            self.refresh_points(0, run.clone());
            let full = all || self.blocks.table(0).all_full(run.clone());
            resident = full && leaf_only;
            if resident && child_resident {
                // A resident child keeps it from being a victim.
                continue;
            }
            for block in if resident { run.end - 1..run.end } else { run }.rev() {
                // Removing a child may have pruned it.
                if !self.trie().alive(block) {
                    continue;
                }
                self.refresh_on(0, block);
                // Only a block without all its layers here can have become unneeded.
                if !self.fully_resident(block) {
                    self.prune(block);
                    self.sweep(block);
                }
            }
        }
    }

    /// Releases a path, or its end: private slots and references.
    pub(crate) fn release_path(&mut self, path: &LeasePath, until: Option<Nanos>) {
        for private in path.private_slots() {
            self.unref_private(private);
        }
        self.unpin(path.blocks(), until);
    }

    /// Ends a lease. Returns the moves still reading slots of an engine's tier: the engine may
    /// reuse these slots once the moves have ended. Releasing twice does nothing.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`] of the manager itself.
    pub fn release(&mut self, id: LeaseId, now: Nanos) -> Result<Vec<MoveId>> {
        self.open()?;
        if !self.leases.contains_key(&id) {
            return Ok(Vec::new());
        }
        let now = self.tick(now);
        self.take_back(id);
        self.store_engine_blocks(id, now);
        let mut lease = self.leases.remove(&id).expect("seen above");
        self.awaits.forget(id);
        let reading = self.reads_of(&lease);
        self.abandon_lease(&mut lease, now);
        self.carry_out();
        self.scopes.release(lease.scope_id);
        self.scopes.digests.retract(&lease.scope);
        self.end_lease_hints(lease.scope_id, id, now);
        self.leave_session(lease.session, id);
        self.write_ahead(now);
        Ok(reading)
    }

    /// Drops all references of a lease to blocks and slots. The end of an answer stays a resume
    /// point.
    pub(crate) fn abandon_lease(&mut self, lease: &mut Lease, now: Nanos) {
        let (path, end) = (lease.path.blocks(), path_border(lease.path.blocks()));
        // Holes not computed yet are still there.
        if self.points.every == 0 && lease.groups.done == end && !lease.unconfirmed {
            self.add_point(0, path, end, Stay::Newest);
        }
        self.end_holds(&mut lease.groups, path);
        self.count_unloaded(&lease.undecided);
        self.scopes.digests.free(&lease.tail);
        self.close_slots(&mut lease.groups);
        match lease.tail_from {
            TailFrom::OpenSlot => {}
            TailFrom::Shared(private) => self.unref_private(private),
            TailFrom::Block(step) => self.release_path(&step.into(), None),
        }
        self.use_last(lease, now);
        self.release_path(&lease.path, Some(now));
    }

    /// The moves still using slots named by the engine for a lease.
    pub(crate) fn reads_of(&self, lease: &Lease) -> Vec<MoveId> {
        if !self.tiers.engine_owned() {
            return Vec::new();
        }
        let named = |private: &PrivateSlotId| self.private_slots[*private].slot != NO_SLOT;
        let private_slots: BTreeSet<PrivateSlotId> =
            lease.private_slots().chain(lease.private_tail()).filter(named).collect();
        let touches = |end| matches!(end, crate::transfer::End::PrivateSlot(private) if private_slots.contains(&private));
        let under_way = self.moves.values().filter(|m| touches(m.from) || touches(m.to));
        let mut reads: Vec<MoveId> = under_way.map(|m| m.id).collect();
        reads.sort_unstable();
        reads
    }
}
