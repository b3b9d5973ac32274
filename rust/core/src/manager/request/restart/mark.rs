//! Marks: sets residencies without a request, for a simulator or a peer.
//!
//! The needs of a resume at the end of the sequence are marked too, and the end becomes a resume
//! point. Invariant: a marked copy is treated like any copy. Cost: O(blocks · log n).

use crate::arrival::{Arrival, MoveIds};
use crate::block::{
    BlockId, GroupId, Handle, Layers, NO_SLOT, Place, Slot, Structure, TierId, Token,
};
use crate::error::{Error, Result};
use crate::scope::{Scope, ScopeId};
use crate::tier::{Kind, Owner, ResidencyState};
use crate::time::{Nanos, stamp};
use crate::trie::Query;

use crate::manager::Manager;
use crate::manager::evict::room::Wanted;
use crate::manager::node::Node;
use crate::manager::points::Stay;
use crate::manager::request::matching::path::path_border;

/// Mark: full blocks of a sequence set as resident on a tier or not.
#[derive(Clone, Debug)]
pub struct Mark<'a> {
    /// The sequence. Only its full blocks count.
    pub tokens: &'a [Token],
    /// Scope of the blocks.
    pub scope: Scope,
    /// Tier.
    pub tier: TierId,
    /// Whether they are resident.
    pub present: bool,
    /// Time when all layers are resident. `None` means now.
    pub ready: Option<Nanos>,
    /// Time when the first layer is resident. `None` means at `ready`.
    pub first: Option<Nanos>,
}

/// Slots taken and kept by a mark on its tier.
#[derive(Debug, Default)]
struct MarkedSlots {
    /// Number of new slots, by group.
    slots: Vec<u64>,
    /// Resident needs of the sequence's end in groups after the first.
    present: Vec<(Place, BlockId)>,
    /// Missing needs of the sequence's end, by place on the path.
    lacking: Vec<(Place, u32)>,
}

impl Manager {
    /// Sets or clears the residency of the full blocks of a sequence on a tier.
    ///
    /// Setting makes room, and repairs bad copies. A copy with a future ready time is arriving
    /// until then. With several groups the end of the sequence becomes a resume point on the tier,
    /// and clearing ends the points that need a cleared part. A new slot may still be read by a
    /// move started earlier: write its memory only after this move has ended.
    ///
    /// # Errors
    /// [`Error::NoSpace`]. [`Error::Config`] if a block to clear is pinned, busy or a parent in a
    /// leaf-only scope, if a failed move still writes a block to set or only a part of it is in
    /// flight, or if the engine owns the tier. Nothing has changed then.
    pub fn mark(&mut self, mark: &Mark<'_>, now: Nanos) -> Result<Vec<Handle>> {
        self.mark_after(mark, 0, now)
    }

    /// Like [`Manager::mark`], for the blocks after the first `skip`. The first `skip` blocks are
    /// unchanged, and must be cached when presence is set.
    ///
    /// # Errors
    /// The errors of [`Manager::mark`]. [`Error::Config`] if a skipped block must be cached and is
    /// not.
    pub fn mark_after(&mut self, mark: &Mark<'_>, skip: usize, now: Nanos) -> Result<Vec<Handle>> {
        self.mark_in(mark, None, skip, now)
    }

    /// Marks blocks in all groups or in a single group.
    pub(super) fn mark_in(
        &mut self,
        mark: &Mark<'_>,
        group: Option<GroupId>,
        skip: usize,
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        self.open()?;
        self.scopes.sweep(&mut self.blocks);
        self.check_tier(mark.tier)?;
        self.scopes.digests.check(&mark.scope, mark.tokens)?;
        let known = self.scopes.find(&mark.scope)?;
        self.count_producers(&mark.scope);
        let now = self.tick(now);
        if mark.present && group.is_none_or(|group| group == 0) {
            return self.mark_present(mark, (known, group), skip, now);
        }
        let content = self.scopes.digests.content(&mark.scope, 0, mark.tokens);
        let path = self.visible_path(&mark.scope, &content);
        match group {
            Some(group) if mark.present => self.mark_part(mark, &path, (group, skip), now),
            _ => self.clear(mark.tier, group, path.get(skip..).unwrap_or_default()),
        }
    }

    /// Fails for a nonexistent tier or an engine's tier.
    pub(crate) fn check_tier(&self, tier: TierId) -> Result<()> {
        self.tiers.check(tier)?;
        if self.tiers[tier].spec.owner == Owner::Engine {
            return Err(Error::config(format!(
                "the engine owns the slots of tier '{}'",
                self.tiers[tier].spec.kind.name()
            )));
        }
        Ok(())
    }

    /// Sets the residency of full blocks, in all groups or in the first group.
    fn mark_present(
        &mut self,
        mark: &Mark<'_>,
        scope: (Option<ScopeId>, Option<GroupId>),
        skip: usize,
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        let size = self.block_tokens();
        let full = mark.tokens.len() / size * size;
        self.check_memory(full / size)?;
        let content = self.intern(&mark.scope, 0, &mark.tokens[..full])?;
        let marked = self.mark_content(mark, scope, skip, &content, now);
        self.scopes.digests.free(&content);
        if let (true, Ok(blocks)) = (mark.scope.shares(), &marked) {
            self.mark_producers(mark, &blocks[skip..], now);
        }
        marked
    }

    /// Makes a mark's tenant a producer of blocks. A shared store has only shared blocks.
    fn mark_producers(&mut self, mark: &Mark<'_>, blocks: &[Handle], now: Nanos) {
        let blocks: Vec<BlockId> =
            blocks.iter().filter_map(|&block| self.trie().resolve(block)).collect();
        if self.tiers[mark.tier].spec.kind == Kind::Remote {
            for block in blocks {
                self.restore_producers(block, None);
            }
        } else {
            self.produce(&mark.scope, &blocks, now);
        }
    }

    /// Sets the residency of full blocks, with digests replaced in the content.
    fn mark_content(
        &mut self,
        mark: &Mark<'_>,
        (scope, group): (Option<ScopeId>, Option<GroupId>),
        skip: usize,
        content: &[Token],
        now: Nanos,
    ) -> Result<Vec<Handle>> {
        let (size, full) = (self.block_tokens(), content.len());
        let mut path = Vec::with_capacity(full / size);
        if let Some(scope) = scope {
            self.trie().walk(self.scopes.get(scope).root, Query::Tokens(content), &mut path);
        }
        // A block without a copy is in the trie while a lease holds it, in a scope with holes, or
        // while a move of its subtree ends: then unpinning removes it.
        let is_held = |&&block: &&BlockId| {
            self.missing(block).is_empty()
                || self.node(block).refs > 0
                || self.departures(block) == Structure::Holes
        };
        let cached = path.iter().take(skip).take_while(is_held).count();
        if cached < skip {
            return Err(Error::config(format!("{skip} blocks are to be cached, {cached} are")));
        }
        let marked = self.marked_slots((mark.tier, group), &path, skip, full / size)?;
        // Known blocks must not be evicted for the new blocks.
        self.pin(&path);
        let held = marked.present.iter().copied();
        held.clone().for_each(|(group_place, block)| self.blocks.hold(group_place, [block]));
        let stay: Vec<_> = self.runs(&path).into_iter().map(|run| (mark.tier, run)).collect();
        let wanted = Wanted { tier: mark.tier, slots: &marked.slots };
        if let Err(error) = self.make_room(&[wanted], &stay, now) {
            held.for_each(|(group_place, block)| self.blocks.unhold(group_place, [block]));
            self.unpin(&path, None);
            return Err(error);
        }
        let scope = scope.unwrap_or_else(|| {
            self.scopes.add(&mark.scope, self.settings.structure, &mut self.blocks)
        });
        let pinned = path.len();
        let node = Node { scope, refs: 0, uses: 1, access: stamp(now), session_blocks: 0 };
        self.new_nodes(node, path.last().copied(), &content[pinned * size..], &mut path);
        let late = mark.ready.is_some_and(|ready| ready > now);
        // New blocks that are ready now are placed run by run, all remaining blocks individually.
        let plain = !late && !self.tiers[mark.tier].spec.layer_slots;
        let (known, new) = path.split_at(if plain { pinned } else { path.len() });
        for &block in &known[skip..] {
            self.complete_copy(block, mark, now);
        }
        self.place_new(mark.tier, new, known.last().copied());
        for &(group_place, place) in &marked.lacking {
            let slot = self.blocks.take_slot(group_place).slot;
            self.blocks.put(group_place, path[place as usize], slot);
        }
        self.add_point(mark.tier, &path, path_border(&path), Stay::Newest);
        held.for_each(|(group_place, block)| self.blocks.unhold(group_place, [block]));
        self.refresh_path(&path[pinned..]);
        self.unpin(&path[..pinned], Some(now));
        Ok(self.trie().handles(&path))
    }

    /// The slots taken by a mark of `blocks` blocks.
    ///
    /// `path` has the known blocks, and the first `skip` are unchanged. In groups after the first,
    /// it includes the needs of a resume at the end. With `group`, it includes only the first
    /// group.
    fn marked_slots(
        &self,
        (tier, group): (TierId, Option<GroupId>),
        path: &[BlockId],
        skip: usize,
        blocks: usize,
    ) -> Result<MarkedSlots> {
        let mut first = self.tiers.units(tier, self.all_layers()) * (blocks - path.len()) as u64;
        for &block in &path[skip..] {
            first += self.lacking(tier, block)?;
        }
        let mut marked = MarkedSlots { slots: vec![first], ..MarkedSlots::default() };
        let border = u32::try_from(blocks).expect("fewer than 2^32 blocks");
        for (number, group) in self.points.others().filter(|_| group.is_none()) {
            let (group_place, before) = (Place::new(tier, number), marked.lacking.len());
            let absent = |block| self.residency(group_place, block).state == ResidencyState::Absent;
            for place in group.needed(border, self.points.block_tokens).iter() {
                match path.get(place as usize).copied().filter(|&block| !absent(block)) {
                    None => marked.lacking.push((group_place, place)),
                    Some(block) if self.blocks.expects(group_place, block) => {
                        marked.present.push((group_place, block));
                    }
                    // A failed move may still write it, or its bytes cannot be read.
                    Some(block) => return Err(self.still_moving(group_place, block)),
                }
            }
            marked.slots.push((marked.lacking.len() - before) as u64);
        }
        Ok(marked)
    }

    /// Number of slots needed to make a block fully resident on a tier.
    fn lacking(&self, tier: TierId, block: BlockId) -> Result<u64> {
        let (residency, all) = (self.residency(tier, block), self.all_layers());
        if residency.state != ResidencyState::Arriving {
            let layers = u64::from(all.len() - residency.have.len());
            let rows = self.tiers[tier].spec.layer_slots;
            return Ok(if rows { layers } else { u64::from(residency.slot == NO_SLOT) });
        }
        // Only a part is in flight: its moves own the slots until they end.
        if self.expected(tier, block) != all {
            return Err(self.still_moving(Place::new(tier, 0), block));
        }
        Ok(0)
    }

    pub(super) fn still_moving(&self, Place { tier, group }: Place, block: BlockId) -> Error {
        let of = if group > 0 { format!(" in group {group}") } else { String::new() };
        Error::config(format!(
            "block {:#x} cannot be marked on tier '{}': moves have still to end there{of}",
            self.trie().handle(block).0,
            self.tiers[tier].spec.kind.name()
        ))
    }

    /// Adds the missing layers of a block on a tier. A bad copy becomes good.
    fn complete_copy(&mut self, block: BlockId, mark: &Mark<'_>, now: Nanos) {
        let (residency, all) = (self.residency(mark.tier, block), self.all_layers());
        // Arriving or complete: nothing is missing.
        if residency.state == ResidencyState::Arriving || residency.usable() == all {
            return;
        }
        let mut slot = residency.slot;
        for lacks in [Layers::new(0, residency.have.lo), Layers::new(residency.have.hi, all.hi)] {
            if !lacks.is_empty() {
                slot = self.blocks.take_slots(mark.tier, slot, lacks);
            }
        }
        self.place(mark.tier, block, (slot, all), mark.ready, mark.first, now);
    }

    /// Makes new blocks without copies fully resident on a tier. Their entries are made at their
    /// first touch.
    fn place_new(&mut self, tier: TierId, blocks: &[BlockId], parent: Option<BlockId>) {
        self.blocks.put_new(tier, blocks);
        self.on_resident(tier, blocks);
        if let (Some(parent), false) = (parent, blocks.is_empty()) {
            self.refresh_on(tier, parent);
        }
    }

    /// Sets the residency of a block on a tier, in given slots.
    pub(crate) fn place(
        &mut self,
        tier: TierId,
        block: BlockId,
        (slot, layers): (Slot, Layers),
        ready: Option<Nanos>,
        first: Option<Nanos>,
        now: Nanos,
    ) {
        let ready = ready.filter(|&ready| ready > now);
        self.blocks.alter(tier, block, |residency| {
            residency.slot = slot;
            if ready.is_some() {
                (residency.state, residency.have) = (ResidencyState::Arriving, residency.usable());
            } else {
                (residency.state, residency.have) = (ResidencyState::Resident, layers);
            }
        });
        if let Some(ready) = ready {
            let first = first.unwrap_or(ready).min(ready);
            let arrival = Arrival::new(layers, MoveIds::new(), first, ready);
            self.blocks.attach_arrival(tier, block, arrival);
            self.marked.insert((ready, tier, block));
        }
        self.residency_changed(tier, block);
    }

    /// Ends the arrival of a marked copy that is due.
    pub(crate) fn arrive_marked(&mut self, tier: TierId, block: BlockId) {
        // Moves may have taken the arrival over: then they end it.
        let marked = self.arrival(tier, block).is_some_and(|a| a.moves.is_empty());
        if marked {
            self.end_arrival(tier, block, self.clock.last());
        }
    }
}
