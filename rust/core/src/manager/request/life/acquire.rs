//! Acquire: lookup, pin and room for a request, in a single atomic step.
//!
//! Invariant: all or nothing. Until there is room only refcounts and eviction entries change, and
//! both are restored on failure. Cost: O(tokens) to match, O(blocks) to plan and pin, O(log n) per
//! victim.

use crate::block::{BlockId, LeaseId, MoveId, Structure, Token};
use crate::error::{Error, Result};
use crate::policy::Needs;
use crate::scope::{Scope, ScopeId};
use crate::time::Nanos;
use crate::trie::Query;

use crate::manager::Manager;
use crate::manager::kinds::LoadMode;
use crate::manager::meter::late_hits::Undecided;
use crate::manager::request::life::lease::{Hold, Lease, Plan, TailFrom};
use crate::manager::request::matching::path::{LeasePath, path_border};
use crate::manager::request::matching::residency_scan::{MissingBlock, Prefill};
use crate::manager::request::slots::lease_slots::LeaseGroups;

/// Maximum growth of a path, in tokens, with memory allocated in advance.
const FAR: usize = 1 << 20;

/// Request: a prompt and how to serve it.
#[derive(Clone, Debug, Default)]
pub struct Acquire<'a> {
    /// The prompt.
    pub tokens: &'a [Token],
    /// Scope within which its blocks are shared.
    pub scope: Scope,
    /// Name of its conversation.
    pub session: Option<&'a str>,
    /// Expected total number of blocks of the conversation, if known.
    pub session_blocks: Option<u32>,
    /// Number of tokens at the end of the prompt that are always computed.
    pub keep: usize,
    /// Number of tokens after the prompt to make room for.
    pub reserve: usize,
    /// Whether blocks of lower tiers are loaded.
    pub load: LoadMode,
    /// Latest ready time of planned loads.
    pub deadline: Option<Nanos>,
    /// Whether the engine computes a layer while the next layers are loaded. Otherwise it waits for
    /// all layers.
    pub layerwise: bool,
}

/// Pinned path, slots and plan of a request before it becomes a lease.
struct Taken {
    path: LeasePath,
    groups: Box<LeaseGroups>,
    awaits: Vec<MoveId>,
    plan: Plan,
}

impl Manager {
    /// Looks a prompt up, pins the reused and loaded blocks of its plan, and makes room for loads,
    /// recomputation and growth.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if a tier lacks room, [`Error::Config`] for a bad argument. Nothing has
    /// changed then.
    pub fn acquire(&mut self, ask: &Acquire<'_>, now: Nanos) -> Result<LeaseId> {
        self.open()?;
        self.scopes.sweep(&mut self.blocks);
        self.scopes.digests.check(&ask.scope, ask.tokens)?;
        self.scopes.digests.check_room(&ask.scope)?;
        let scope = self.scopes.find(&ask.scope)?;
        let now = self.tick(now);
        let taken = self.take(ask, scope, self.next_lease, now);
        self.meter.requested.refused += u64::from(matches!(taken, Err(Error::NoSpace { .. })));
        let taken = taken?;
        let id = self.next_lease;
        self.next_lease += 1;
        self.count_producers(&ask.scope);
        // A refused request adds no scope.
        let scope = scope.unwrap_or_else(|| {
            self.scopes.add(&ask.scope, self.settings.structure, &mut self.blocks)
        });
        self.begin(id, ask, scope, taken, now);
        Ok(id)
    }

    /// Makes a lease of a request that has its room.
    fn begin(
        &mut self,
        id: LeaseId,
        ask: &Acquire<'_>,
        scope_id: ScopeId,
        taken: Taken,
        now: Nanos,
    ) {
        let name = ask.session.map(|name| ask.scope.local(name));
        let session = self.sessions.open(
            scope_id,
            name.as_deref(),
            self.tiers.need(Needs::SESSION_BLOCKS),
            id,
        );
        if let (Some(session), Some(blocks)) = (session, ask.session_blocks) {
            self.sessions.expect_blocks(session, blocks);
        }
        let matched = taken.path.len() * self.block_tokens();
        // Ages are counted before `touch` makes them 0.
        self.count_request(ask.tokens.len(), taken.path.blocks(), &taken.plan, now);
        let undecided = if ask.load == LoadMode::None {
            self.count_undecided(&taken.path)
        } else {
            Undecided::default()
        };
        self.touch(taken.path.blocks(), now);
        let unconfirmed = taken.path.fresh();
        self.awaits.add(id, taken.awaits);
        self.scopes.hold(scope_id);
        self.scopes.digests.promise(&ask.scope);
        self.leases.insert(
            id,
            Box::new(Lease {
                id,
                scope: ask.scope.clone(),
                scope_id,
                session,
                path: taken.path,
                tail: Vec::new(),
                tail_from: TailFrom::OpenSlot,
                groups: taken.groups,
                matched,
                plan: taken.plan,
                undecided,
                layerwise: ask.layerwise,
                unconfirmed,
                hold: Hold::Active,
                request: self.feed.request,
                acquired: now,
            }),
        );
        // Sessions and hints look the lease up, so it must be in the table.
        self.track_session(id);
        self.use_path(id, 0, now);
        self.trim_sessions();
        self.grant(id, 0, now);
        self.write_ahead(now);
    }

    /// Plans again for a suspended lease.
    pub(crate) fn reacquire(
        &mut self,
        id: LeaseId,
        tokens: &[Token],
        reserve: usize,
        load: LoadMode,
        now: Nanos,
    ) -> Result<()> {
        let Lease { ref scope, scope_id, layerwise, .. } = *self.leases[&id];
        let scope = scope.clone();
        let ask = Acquire { tokens, scope, reserve, load, layerwise, ..Acquire::default() };
        let taken = self.take(&ask, Some(scope_id), id, now)?;
        let matched = taken.path.len() * self.block_tokens();
        self.touch(taken.path.blocks(), now);
        let request = self.feed.request;
        self.awaits.add(id, taken.awaits);
        let lease = self.lease_mut(id);
        lease.unconfirmed = taken.path.fresh();
        lease.path = taken.path;
        lease.groups = taken.groups;
        lease.plan = taken.plan;
        lease.matched = matched;
        lease.hold = Hold::Active;
        lease.request = request;
        lease.acquired = now;
        self.track_session(id);
        self.use_path(id, 0, now);
        self.grant(id, 0, now);
        self.write_ahead(now);
        Ok(())
    }

    /// The atomic part: plan, pin, make room, start the loads.
    fn take(
        &mut self,
        ask: &Acquire<'_>,
        scope: Option<ScopeId>,
        id: LeaseId,
        now: Nanos,
    ) -> Result<Taken> {
        let mut path = scope.map_or_else(Vec::new, |scope| self.requested_path(ask, scope));
        let mut groups = self.plan_borders(ask, &mut path, now);
        let mut missing = self.scan(&path, now);
        let mut plan = self.decide_loads(&mut missing, now, self.prefill(ask, path.len()));
        let mut open = self.open_slots_needed(path.len(), ask)?;
        // Pinned before room is made, so that its own blocks are no victims.
        self.pin(&path);
        let mut slots = self.hold_match(&mut groups, &path, open, &missing);
        let mut room = self.room_for(&missing, &slots, &groups, &path, now);
        if room.is_err() && self.avoid_transit(&mut missing) {
            // Its own sources may fill host. Compute blocks that would pass through host instead,
            // with all later blocks for an engine that loads a full prefix or none.
            if let Some(end) = self.prefix(&missing, scope, ask.load) {
                self.unpin(&path, None);
                path.truncate(end);
                missing.retain(|miss| miss.at < end);
                open = self.open_slots_needed(end, ask)?;
                self.pin(&path);
                // With several groups nothing passes through host.
                let from = path_border(&path);
                slots.places.first = from..from + u32::try_from(open).expect("slots of a tier");
            }
            plan = self.decide_loads(&mut missing, now, self.prefill(ask, path.len()));
            room = self.room_for(&missing, &slots, &groups, &path, now);
        }
        let mut transit = room.inspect_err(|_| {
            self.release_match(&mut groups, &slots, &path);
            self.unpin(&path, None);
        })?;
        // From here on nothing fails.
        let mut awaits =
            self.load_match(&mut groups, &slots, &path, (id, ask.load), &mut plan, now);
        self.feed_request(ask, scope, &path, now);
        for miss in missing.iter().filter(|miss| miss.reclaim) {
            self.reclaim(miss.block);
        }
        let mut path = LeasePath::of(path);
        let moves = self.begin_missing(ask, id, &missing, &mut path, &mut transit, now);
        self.close_transit(transit);
        awaits.extend(moves.iter().flatten());
        // Layers in flight for earlier requests must arrive too.
        for miss in missing.iter().filter(|miss| !miss.load || miss.lacks != self.all_layers()) {
            awaits.extend(self.bringing(0, miss.block, self.all_layers()));
        }
        self.spans(path.len(), &missing, &moves, &mut plan, now);
        self.take_places(&mut groups, &slots.places);
        self.take_spare_slots(&mut groups);
        Ok(Taken { path, groups, awaits, plan })
    }

    /// The blocks of a request's tokens in the trie.
    fn requested_path(&self, ask: &Acquire<'_>, scope: ScopeId) -> Vec<BlockId> {
        let content = self.scopes.digests.content(&ask.scope, 0, ask.tokens);
        // The path grows into this capacity. The reserve may be far larger than the written tokens.
        let beyond = ask.keep.saturating_add(ask.reserve).min(ask.tokens.len().min(FAR));
        self.path(scope, &ask.scope, Query::Tokens(&content), ask.keep, beyond)
    }

    /// Feeds a request that found `path` to the policies.
    fn feed_request(
        &mut self,
        ask: &Acquire<'_>,
        scope: Option<ScopeId>,
        path: &[BlockId],
        now: Nanos,
    ) {
        let run = if self.feed.learns() {
            let content = self.scopes.digests.content(&ask.scope, 0, ask.tokens);
            self.next_turn(scope, path, &content)
        } else {
            0
        };
        self.feed.begin_request(ask.tokens.len() / self.block_tokens(), run, now);
        self.pass_request();
    }

    /// The planner's input for a prompt with `matched` known blocks.
    pub(in crate::manager::request) fn prefill(
        &self,
        ask: &Acquire<'_>,
        matched: usize,
    ) -> Prefill {
        let weight = u64::from(self.settings.token_weight);
        let context = matched * self.block_tokens();
        let tokens = (ask.tokens.len() - context) as u64 * weight;
        let rest = self.settings.cost.compute_ns(context as u64 * weight, tokens);
        // A border of several groups was chosen for loading, so all its needs are loaded.
        let all = self.points.several() && ask.load == LoadMode::Plan;
        let mode = if all { LoadMode::All } else { ask.load };
        Prefill { mode, deadline: ask.deadline, rest, layerwise: ask.layerwise }
    }

    /// Number of open slots needed by a request after `matched` blocks.
    fn open_slots_needed(&self, matched: usize, ask: &Acquire<'_>) -> Result<usize> {
        let rest = (ask.tokens.len() - matched * self.block_tokens())
            .checked_add(ask.reserve)
            .ok_or_else(|| Error::config(format!("reserve of {} tokens", ask.reserve)))?;
        let open = if self.tiers.engine_owned() { 0 } else { rest.div_ceil(self.block_tokens()) };
        self.check_memory(open)?;
        Ok(open)
    }

    /// End of the loadable prefix, if an engine loads it in full or not at all.
    fn prefix(
        &self,
        missing: &[MissingBlock],
        scope: Option<ScopeId>,
        load: LoadMode,
    ) -> Option<usize> {
        let prefix_only = scope.is_some_and(|id| {
            load == LoadMode::All && self.scopes.get(id).structure == Structure::LeafOnly
        });
        missing.iter().find(|miss| prefix_only && !miss.compute.is_empty()).map(|miss| miss.at)
    }
}
