//! Commit: appends tokens to a lease and adds full blocks to the trie.
//!
//! Invariant: only full blocks enter the trie. If two requests computed the same block, the first
//! copy stays and the second request keeps a private duplicate until release. Cost: O(1) without
//! allocation for a token within a block, O(log n) for a token that fills a block.

use rustc_hash::FxHashSet;

use crate::block::{BlockId, Handle, Layers, LeaseId, MoveId, Slot, Token};
use crate::error::{Error, Result};
use crate::scope::Scope;
use crate::time::{Nanos, stamp};

use crate::manager::Manager;
use crate::manager::node::Node;
use crate::manager::request::life::lease::{Lease, TailFrom};
use crate::manager::request::matching::path::{PathBlock, path_border};
use crate::manager::request::slots::lease_slots::OpenSlot;

/// Result of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Blocks added to the trie.
    pub new: Vec<Handle>,
    /// Private slots of blocks already committed by an earlier request.
    pub duplicate: Vec<Slot>,
    /// The cached block of each duplicate.
    pub canonical: Vec<Handle>,
    /// Number of new blocks stored ahead: their copies were adopted.
    pub ahead: usize,
}

impl Manager {
    /// Appends tokens with written KV. The first commit, which may be empty, also confirms the
    /// blocks computed by the engine for the plan.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no room for the tokens or awaited moves have not ended.
    /// Nothing has changed then.
    pub fn commit(&mut self, id: LeaseId, tokens: &[Token], now: Nanos) -> Result<Committed> {
        self.check_commit(id, tokens)?;
        self.commit_checked(id, tokens, now)
    }

    /// Commits checked tokens.
    fn commit_checked(&mut self, id: LeaseId, tokens: &[Token], now: Nanos) -> Result<Committed> {
        let content = self.with_digests(id, tokens)?;
        let out = self.commit_content(id, content.as_deref().unwrap_or(tokens), now);
        self.scopes.digests.free(content.as_deref().unwrap_or_default());
        Ok(out)
    }

    /// Commits tokens with digests replaced.
    fn commit_content(&mut self, id: LeaseId, tokens: &[Token], now: Nanos) -> Committed {
        let now = self.tick(now);
        let mut out = Committed::default();
        let lease = &self.leases[&id];
        let open = matches!(lease.tail_from, TailFrom::OpenSlot);
        self.feed.request = lease.request;
        // Only the first commit after a plan has computed blocks to confirm.
        if lease.unconfirmed {
            self.confirm(id, now, &mut out);
        }
        if tokens.is_empty() {
            return out;
        }
        let size = self.block_tokens();
        if !open {
            self.adopt_tail(id);
        }
        let mut rest = tokens;
        let lease = self.leases.get_mut(&id).expect("it was checked");
        let known = lease.path.len();
        if !lease.tail.is_empty() {
            let take = (size - lease.tail.len()).min(rest.len());
            self.scopes.digests.hold(&rest[..take]);
            lease.tail.extend_from_slice(&rest[..take]);
            rest = &rest[take..];
            // The usual end of a decoded token: the tail is no full block yet.
            if lease.tail.len() < size {
                return out;
            }
            let tail = std::mem::take(&mut lease.tail);
            self.seal(id, &tail, now, &mut out);
            // Restored only for its removal, so that its memory and digests are accounted for.
            self.lease_mut(id).tail = tail;
            self.remove_tail(id, 0);
        }
        let full = rest.len() - rest.len() % size;
        if full > 0 {
            self.seal(id, &rest[..full], now, &mut out);
        }
        if full < rest.len() {
            self.extend_tail(id, &rest[full..]);
        }
        // Only full blocks extend the session's path or become dirty.
        if self.leases[&id].path.len() > known {
            self.track_session(id);
            if self.points.several() {
                self.open_next(id);
            }
            self.write_ahead(now);
        }
        out
    }

    /// Commits the next tokens of many leases: all of them or, on an error, none.
    ///
    /// # Errors
    /// The errors of [`Manager::commit`] for the first failing lease, or a lease named twice.
    pub fn commit_many<T: AsRef<[Token]>>(
        &mut self,
        batch: &[(LeaseId, T)],
        now: Nanos,
    ) -> Result<Vec<Committed>> {
        let mut seen = FxHashSet::default();
        for (id, tokens) in batch {
            self.check_commit(*id, tokens.as_ref())?;
            if !seen.insert(*id) {
                return Err(Error::config(format!("lease {id} is named twice in one batch")));
            }
        }
        batch.iter().map(|(id, tokens)| self.commit_checked(*id, tokens.as_ref(), now)).collect()
    }

    /// The tokens with the scope's digests replaced, each with a reference. `None` for a scope
    /// without digests.
    fn with_digests(&mut self, id: LeaseId, tokens: &[Token]) -> Result<Option<Vec<Token>>> {
        let lease = &self.leases[&id];
        if lease.scope.extra.is_empty() {
            return Ok(None);
        }
        let from = (lease.path.len() * self.block_tokens() + lease.tail.len()) as u64;
        let scope = lease.scope.clone();
        self.intern(&scope, from, tokens).map(Some)
    }

    /// Fails if a commit cannot proceed.
    fn check_commit(&self, id: LeaseId, tokens: &[Token]) -> Result<()> {
        let lease = self.active(id)?;
        // A move in flight may still write or read the slots of these tokens.
        if let Some(first) = self.first_wait(lease, tokens.len()) {
            return Err(Error::config(format!(
                "lease {id} awaits {} moves, the first is {first}; commit when they have ended",
                self.awaits(id)?.len()
            )));
        }
        // An empty commit only confirms.
        if tokens.is_empty() {
            return Ok(());
        }
        self.scopes.digests.check(&lease.scope, tokens)?;
        let room = self.room_of(lease);
        if tokens.len() > room {
            return Err(Error::config(format!(
                "commit of {} tokens to lease {id}, which has room for {room}; call reserve first",
                tokens.len()
            )));
        }
        self.check_memory((lease.tail.len() + tokens.len()) / self.block_tokens())
    }

    /// A move to finish before `tokens` more tokens can be written.
    fn first_wait(&self, lease: &Lease, tokens: usize) -> Option<MoveId> {
        if let Some(&first) = self.awaits.of(lease.id).first() {
            return Some(first);
        }
        // Without draining slots no store delays a write.
        if self.blocks.none_draining(0) {
            return None;
        }
        self.first_reader(lease, (lease.tail.len() + tokens).div_ceil(self.block_tokens()))
    }

    #[cold]
    fn first_reader(&self, lease: &Lease, blocks: usize) -> Option<MoveId> {
        self.readers(lease, blocks).next()
    }

    /// Number of tokens a lease can still write, or `usize::MAX` if the engine owns the slots.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn room_left(&self, id: LeaseId) -> Result<usize> {
        Ok(self.room_of(self.active(id)?))
    }

    /// Number of tokens a lease can still write.
    fn room_of(&self, lease: &Lease) -> usize {
        let private_tail = match lease.tail_from {
            TailFrom::OpenSlot => true,
            TailFrom::Shared(private) => {
                self.private_slots[private].refs == 1 && self.private_slots[private].busy == 0
            }
            TailFrom::Block(_) => false,
        };
        // A shared tail must be copied by `reserve` first.
        if !private_tail {
            return 0;
        }
        if self.tiers.engine_owned() {
            return usize::MAX;
        }
        let shared = usize::from(!matches!(lease.tail_from, TailFrom::OpenSlot));
        (lease.groups[0].written.len() + shared) * self.block_tokens() - lease.tail.len()
    }

    /// Makes a formerly shared tail the lease's first open slot.
    pub(crate) fn adopt_tail(&mut self, id: LeaseId) {
        let lease = self.lease_mut(id);
        if let TailFrom::Shared(private) = lease.tail_from {
            let first = path_border(lease.path.blocks());
            lease.groups[0].written.renumber(first, vec![OpenSlot::Private(private)]);
            lease.tail_from = TailFrom::OpenSlot;
        }
    }

    /// Offers the holes computed by the engine to the trie.
    fn confirm(&mut self, id: LeaseId, now: Nanos, out: &mut Committed) {
        let lease = self.lease_mut(id);
        lease.unconfirmed = false;
        let exceptions: Vec<(usize, PathBlock)> = lease.path.exceptions().collect();
        let mut computed = Vec::new();
        for (at, PathBlock { block, private, fresh, .. }) in exceptions {
            let (Some(private), true) = (private, fresh) else { continue };
            computed.push(block);
            self.lease_mut(id).path.change(at, |step| {
                (step.compute, step.deferred, step.fresh) = (Layers::NONE, false, false);
            });
            let left = self.offer_private(block, private, now, out);
            self.lease_mut(id).path.change(at, |step| step.private = left);
        }
        self.computed(id, &computed, now);
        self.place_computed(id);
    }

    /// Makes a scope's tenant a producer of its computed blocks. Blocks that become shared by this
    /// may be written to a shared store.
    pub(in crate::manager::request) fn produce(
        &mut self,
        scope: &Scope,
        blocks: &[BlockId],
        now: Nanos,
    ) {
        let me = self.producers.producer(&scope.tenant);
        for &block in blocks {
            if self.producers.add(block, me) && self.tiers.has_shared() {
                let above = (0..self.tiers.len()).filter(|&tier| self.tiers.above_shared(tier));
                for tier in above.collect::<Vec<_>>() {
                    self.write_through(tier, block, None, now);
                }
            }
        }
    }

    /// Makes a lease's tenant a producer of blocks.
    #[inline]
    fn computed(&mut self, id: LeaseId, blocks: &[BlockId], now: Nanos) {
        if !self.producers.unused() && self.leases[&id].scope.shares() {
            let scope = self.leases[&id].scope.clone();
            self.produce(&scope, blocks, now);
        }
    }

    /// Adds full blocks after a lease's path to the trie, each with the lease's next open slot.
    fn seal(&mut self, id: LeaseId, tokens: &[Token], now: Nanos, out: &mut Committed) {
        if tokens.is_empty() {
            return;
        }
        let size = self.block_tokens();
        let lease = self.leases.get_mut(&id).expect("checked");
        let (scope, since, end) = (lease.scope_id, lease.acquired, lease.path.len());
        let parent = lease.path.blocks().last().copied();
        let open = lease.groups[0].written.take_first(tokens.len() / size);
        let root = self.scopes.get(scope).root;
        let mut path = Vec::with_capacity(tokens.len() / size);
        // Leading blocks may be known from an earlier request.
        for tokens in tokens.chunks_exact(size) {
            let Some(block) = self.trie().child(root, path.last().copied().or(parent), tokens)
            else {
                break;
            };
            path.push(block);
        }
        let known = path.len();
        self.pin(&path);
        self.touch(&path, now);
        // Until the lease ends, its blocks count as used at its start.
        let node = Node { scope, refs: 1, uses: 1, access: stamp(since), session_blocks: 0 };
        let above = path.last().copied().or(parent);
        self.new_nodes(node, above, &tokens[known * size..], &mut path);
        let new = self.trie().handles(&path[known..]);
        // Mostly a single block per commit: the vector is moved, not copied.
        if out.new.is_empty() {
            out.new = new;
        } else {
            out.new.extend(new);
        }
        self.meter.requested.inserted += (path.len() - known) as u64;
        self.lease_mut(id).path.extend(&path);
        let settled = self.place_open(&path[known..], open.get(known..).unwrap_or_default(), now);
        // Known blocks, and slots that did not become a residency at once.
        for at in (0..known).chain(known + settled..path.len()) {
            // An engine may commit more tokens than it has named slots for.
            let Some(&open) = open.get(at) else { break };
            let private = self.as_private(open);
            let before = out.ahead;
            let left = self.offer_private(path[at], private, now, out);
            if at < known {
                out.ahead = before;
            }
            self.lease_mut(id).path.change(end + at, |step| step.private = left);
        }
        self.computed(id, &path, now);
        self.use_path(id, end, since);
        self.place_committed(id);
        self.grant(id, end, now);
    }
}
