//! A matched path held for a request, with its plan and its room to grow.
//!
//! Invariant: every block of the path carries one reference per lease that goes through it; the
//! tail's tokens are fewer than a block. Cost: O(path) to make and to release.

use std::collections::BTreeSet;
use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockId, Layers, LeaseId, MoveId, NO_SLOT, Slot, Structure, TierId, Token};
use crate::error::{Error, Result};
use crate::scope::{Scope, ScopeId};
use crate::tier::State;
use crate::time::{Nanos, stamp};

use super::Manager;
use super::node::Runs;
use super::own::{Open, OwnId};
use super::path::{Path, Step};
use super::session::SessionId;
use super::told::Visit;

/// What a plan does with a span of blocks and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// It stands on the first tier, or arrives there for somebody else.
    Reuse,
    /// It is copied up from a lower tier.
    Load,
    /// The engine computes it at its own positions.
    Recompute,
}

/// What happens to some layers of consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block on the path.
    pub start: u32,
    /// One behind the last block.
    pub stop: u32,
    /// Which layers.
    pub layers: Layers,
    /// What happens.
    pub action: Action,
    /// Where the bytes are.
    pub tier: TierId,
    /// Predicted time at which the first layer is there.
    pub first_ready: Nanos,
    /// Predicted time at which all of it is there.
    pub ready: Nanos,
}

/// How a request's prefix comes to stand on the first tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In logical order.
    pub spans: Vec<Span>,
    /// Predicted time at which all of the match is there.
    pub stands: Nanos,
    /// Predicted time at which the rest of the prompt is computed too.
    pub finish: Nanos,
    /// Whether no plan can finish earlier under the lanes' and the cost model's predictions.
    pub exact: bool,
}

/// Where the tokens of the tail stand, if not in the lease's own open slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum TailFrom {
    /// In the first open slot.
    Open,
    /// In a slot shared with forks.
    Shared(OwnId),
    /// In a block of the trie that the path was cut in.
    Block(Step),
}

/// Whether a lease holds its path.
#[derive(Clone, Debug)]
pub(super) enum Hold {
    Active,
    /// Preempted: only its tokens are left.
    Suspended(Vec<Token>),
}

/// A request's hold on blocks and slots.
#[derive(Clone, Debug)]
pub struct Lease {
    pub(super) id: LeaseId,
    pub(super) scope: Scope,
    pub(super) scope_id: ScopeId,
    pub(super) session: Option<SessionId>,
    pub(super) path: Path,
    pub(super) tail: Vec<Token>,
    pub(super) tail_from: TailFrom,
    /// Slots behind the path; the first one holds the tail.
    pub(super) open: Vec<Open>,
    pub(super) matched: usize,
    pub(super) plan: Plan,
    /// Whether its plans count with loads and computation side by side, layer by layer.
    pub(super) layerwise: bool,
    /// Whether a step of the path is fresh.
    pub(super) unconfirmed: bool,
    pub(super) hold: Hold,
    pub(super) visit: Visit,
    /// When it was acquired or resumed: the last use of what it commits, until it ends.
    pub(super) acquired: Nanos,
}

impl Lease {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Tokens of the given ones that need not be computed behind the match: a multiple of the
    /// block size.
    #[must_use]
    pub fn matched(&self) -> usize {
        self.matched
    }

    /// What was planned.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether it is suspended.
    #[must_use]
    pub fn suspended(&self) -> bool {
        matches!(self.hold, Hold::Suspended(_))
    }

    /// Whether it computes into an own slot, or will.
    pub(super) fn keeps(&self, own: OwnId) -> bool {
        self.open.contains(&Open::Own(own)) || self.path.owns().any(|known| known == own)
    }

    /// The blocks that the engine must compute, with the layers to write for each.
    pub fn recompute(&self) -> impl Iterator<Item = (u32, Layers)> + '_ {
        let place = |at| u32::try_from(at).expect("fewer than 2^32 blocks");
        let computed = self.path.apart().filter(|(_, step)| !step.compute.is_empty());
        computed.map(move |(at, step)| (place(at), step.compute))
    }
}

impl Manager {
    /// A lease by id; it outlives scheduler steps.
    ///
    /// # Errors
    /// [`Error::Closed`] if it is released or never was.
    pub fn lease(&self, id: LeaseId) -> Result<&Lease> {
        self.open()?;
        let lease = self.leases.get(&id).map(|lease| &**lease);
        lease.ok_or_else(|| Error::closed(format!("lease {id} is not held")))
    }

    /// All leases, the oldest first.
    pub(super) fn leases_in_order(&self) -> Vec<&Lease> {
        let mut leases: Vec<&Lease> = self.leases.values().map(|lease| &**lease).collect();
        leases.sort_unstable_by_key(|lease| lease.id);
        leases
    }

    pub(super) fn active(&self, id: LeaseId) -> Result<&Lease> {
        let lease = self.lease(id)?;
        if lease.suspended() {
            return Err(Error::closed(format!("lease {id} is suspended; resume it first")));
        }
        Ok(lease)
    }

    pub(super) fn lease_mut(&mut self, id: LeaseId) -> &mut Lease {
        self.leases.get_mut(&id).expect("a lease that was just seen")
    }

    /// How many tokens a lease holds: its path and its tail.
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

    /// The moves that must end before the engine may read its path and write its open slots.
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

    /// Names what a lease awaits, some of it perhaps more than once.
    pub(super) fn each_await(&self, lease: &Lease, mut name: impl FnMut(MoveId)) {
        self.awaits.of(lease.id).iter().copied().for_each(&mut name);
        self.each_reader(lease, name);
    }

    /// Names the stores that still read slots that a lease is to write.
    pub(super) fn each_reader(&self, lease: &Lease, mut name: impl FnMut(MoveId)) {
        if self.tiers[0].space.quiet() {
            return;
        }
        let computed = lease.path.apart().filter(|(_, step)| !step.compute.is_empty());
        let computed = computed.filter_map(|(_, step)| step.own.map(Open::Own));
        for open in computed.chain(lease.open.iter().copied()) {
            self.open_waits(open).into_iter().for_each(&mut name);
        }
    }

    /// The block table of a lease on a tier, in logical order; with layer slots one row of it per
    /// layer. What is not there is [`NO_SLOT`]. Open slots follow the path on the first tier.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Config`] if there is no such tier.
    pub fn slots(&self, id: LeaseId, tier: TierId) -> Result<(usize, Vec<Slot>)> {
        let lease = self.lease(id)?;
        if tier >= self.tiers.len() {
            return Err(Error::config(format!(
                "there is no tier {tier}, only {}",
                self.tiers.len()
            )));
        }
        let rows = if self.tiers[tier].spec.layer_slots { self.settings.layers } else { 1 };
        let mut table = Vec::new();
        for layer in 0..rows {
            table.extend(lease.path.steps().map(|step| self.step_slot(tier, step, layer)));
            if tier == 0 {
                table.extend(self.tail_slot(lease, layer));
                table.extend(lease.open.iter().map(|&open| self.open_slot(open, layer)));
            }
        }
        Ok((usize::from(rows), table))
    }

    /// The slot that a lease uses for one layer of one block of its path.
    fn step_slot(&self, tier: TierId, step: Step, layer: u16) -> Slot {
        if let (0, Some(own)) = (tier, step.own) {
            let own = &self.owns[own];
            if own.layers.contains(layer) || !self.tiers[0].spec.layer_slots {
                return self.own_slot(own, layer);
            }
        }
        if self.residency(tier, step.block).state == State::Bad {
            return NO_SLOT;
        }
        self.slot_of(tier, step.block, layer)
    }

    fn tail_slot(&self, lease: &Lease, layer: u16) -> Option<Slot> {
        match lease.tail_from {
            TailFrom::Open => None,
            TailFrom::Shared(own) => Some(self.own_slot(&self.owns[own], layer)),
            TailFrom::Block(step) => Some(self.step_slot(0, step, layer)),
        }
    }

    /// Pins consecutive blocks of a path.
    pub(super) fn pin(&mut self, path: &[BlockId]) {
        let mut runs = Runs::new();
        let (first, lower) = self.tiers.split_first().expect("at least one tier");
        self.trie.change(path, |run, node| {
            node.refs += 1;
            for tier in lower {
                tier.retention.warm(run.end - 1);
            }
            if node.refs == 1 {
                first.retention.warm(run.end - 1);
                runs.push(run);
            }
        });
        let Some(first) = runs.first() else { return };
        let structure = self.structure(first.start);
        for run in runs {
            for block in self.edge(0, run, structure) {
                self.tiers[0].retention.unlink(block);
            }
        }
    }

    /// Unpins consecutive blocks of a path, last first, and removes what nothing holds any more.
    /// Where they have been used until now, that is told.
    pub(super) fn unpin(&mut self, path: &[BlockId], until: Option<Nanos>) {
        let mut runs: SmallVec<[(Range<BlockId>, bool); 12]> = SmallVec::new();
        let Some(&last) = path.last() else { return };
        self.tiers[0].here.warm(last);
        self.tiers[0].retention.warm(last);
        self.trie.warm_path(path);
        self.warm_path(path);
        let lower = &self.tiers[1..];
        self.trie.change(path, |run, node| {
            for tier in lower {
                tier.retention.warm(run.end - 1);
            }
            node.refs -= 1;
            node.access = until.map_or(node.access, stamp);
            runs.push((run, node.refs == 0));
        });
        self.trie.trim(last);
        let structure = self.structure(last);
        if until.is_some() {
            self.refused.used(path);
            for (run, _) in &runs {
                self.refresh_from(1, run.clone(), structure);
            }
        }
        let leaf_only = structure == Structure::LeafOnly;
        // Nothing is removed then.
        let all = self.holds_all(0);
        let mut carries = false;
        for (run, free) in runs.into_iter().rev() {
            let stands = std::mem::take(&mut carries);
            if !free {
                continue;
            }
            let whole = all || self.tiers[0].here.wholly(run.clone());
            carries = whole && leaf_only;
            if carries && stands {
                // What stands behind it keeps it from leaving.
                continue;
            }
            for block in if carries { run.end - 1..run.end } else { run }.rev() {
                if !self.trie.alive(block) {
                    continue;
                }
                self.refresh_on(0, block);
                if !self.stands(block) {
                    self.prune(block);
                    self.sweep(block);
                }
            }
        }
    }

    /// Lets go of a path, or of its end: its own slots and its pins.
    pub(super) fn let_go(&mut self, path: &Path, until: Option<Nanos>) {
        for own in path.owns() {
            self.unref_own(own);
        }
        self.unpin(path.blocks(), until);
    }

    /// Ends a lease. Returns the moves that still read slots of a tier that the engine owns: it
    /// may reuse those slots when they have ended. Releasing twice does nothing.
    ///
    /// # Errors
    /// [`Error::Closed`] or [`Error::Invariant`] of the manager itself.
    pub fn release(&mut self, id: LeaseId, now: Nanos) -> Result<Vec<MoveId>> {
        self.open()?;
        if !self.leases.contains_key(&id) {
            return Ok(Vec::new());
        }
        let now = self.tick(now);
        self.store_engine_blocks(id, now);
        let lease = self.leases.remove(&id).expect("seen above");
        self.awaits.forget(id);
        let reading = self.reads_of(&lease);
        self.abandon_lease(&lease, now);
        self.scopes.let_go(lease.scope_id);
        self.scopes.digests.retract(&lease.scope);
        self.forget_lease_hints(lease.scope_id, id);
        self.leave_session(lease.session, id);
        self.write_ahead(now);
        Ok(reading)
    }

    /// Unpins and frees all that a lease holds.
    pub(super) fn abandon_lease(&mut self, lease: &Lease, now: Nanos) {
        self.scopes.digests.free(&lease.tail);
        for &open in &lease.open {
            self.close_open(open);
        }
        match lease.tail_from {
            TailFrom::Open => {}
            TailFrom::Shared(own) => self.unref_own(own),
            TailFrom::Block(step) => self.let_go(&step.into(), None),
        }
        self.use_last(lease, now);
        self.let_go(&lease.path, Some(now));
    }

    /// The moves that still touch slots that an engine has named for a lease.
    pub(super) fn reads_of(&self, lease: &Lease) -> Vec<MoveId> {
        if !self.engine_owned() {
            return Vec::new();
        }
        let cut = match lease.tail_from {
            TailFrom::Open => None,
            TailFrom::Shared(own) => Some(own),
            TailFrom::Block(step) => step.own,
        };
        let all = lease.path.owns().chain(cut);
        let named = |own: &OwnId| self.owns[*own].slot != NO_SLOT;
        let owns: BTreeSet<OwnId> =
            all.chain(lease.open.iter().filter_map(|open| open.own())).filter(named).collect();
        let touches = |end| matches!(end, super::moves::End::Own(own) if owns.contains(&own));
        let under_way = self.moves.values().filter(|m| touches(m.from) || touches(m.to));
        let mut reads: Vec<MoveId> = under_way.map(|m| m.id).collect();
        reads.sort_unstable();
        reads
    }
}
