//! Making room, decided before anything changes.
//!
//! A draft chooses victims in exact order of value, tier by tier down the cascade, on a view of
//! the residencies as they would be. Only entries of the retention structure are unlinked on the
//! way; `abandon` links them again, so that a draft without enough room leaves no trace.
//! Invariant: `spare` counts the slots that applying the draft leaves free or coming.
//! Cost: O(log n) per victim, plus the scan over class heads.

mod tail;
mod transit;

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::block::{BlockId, Layers, Structure, TierId};
use crate::error::Result;
use crate::policy::Entry;
use crate::tier::{State, Write};
use crate::time::{Nanos, stamp};
use crate::trie::RunId;

use crate::manager::Manager;
use crate::manager::kinds::Cause;
use crate::manager::settings::DropOrder;

/// A draft that decided on more has its memory given back.
const MANY: usize = 64;

/// What becomes of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::manager) enum Fate {
    /// It stands elsewhere too, or is of no use: its slots are free at once.
    Clean,
    /// This range must be written one tier down first.
    Demote(Layers),
    /// The last copy goes.
    Drop,
}

/// One range of layers of one block that leaves one tier, or all layers of consecutive blocks.
#[derive(Clone, Copy, Debug)]
pub(in crate::manager) struct Victim {
    pub(in crate::manager) tier: TierId,
    /// The block, the last one if there are several.
    pub(in crate::manager) block: BlockId,
    pub(in crate::manager) blocks: u32,
    pub(in crate::manager) layers: Layers,
    pub(in crate::manager) fate: Fate,
    /// They are the end of a leaf-only run that stands whole and quiet: nothing but their slots and
    /// their place in the trie is concerned.
    pub(in crate::manager) quiet: bool,
}

impl Victim {
    fn one(tier: TierId, block: BlockId, layers: Layers, fate: Fate) -> Self {
        Self { tier, block, blocks: 1, layers, fate, quiet: false }
    }

    /// Its blocks.
    pub(in crate::manager) fn run(&self) -> Range<BlockId> {
        self.block + 1 - self.blocks..self.block + 1
    }
}

/// Decisions that have not been carried out.
#[derive(Debug, Default)]
pub(in crate::manager) struct EvictionSet {
    pub(in crate::manager) victims: Vec<Victim>,
    /// What remains of residencies that lose layers.
    taken: FxHashMap<(TierId, BlockId), Layers>,
    /// Blocks that leave a tier together, with all layers, but for the latest: by tier and first
    /// block, the block behind the last one.
    tails: BTreeMap<(TierId, BlockId), BlockId>,
    /// The latest of them, empty if there is none: what is exposed next stands before it.
    latest_tail: (TierId, Range<BlockId>),
    /// What will have arrived one tier down.
    added: FxHashMap<(TierId, BlockId), Layers>,
    spare: Vec<u64>,
    /// On this tier victims are only looked at; so many of its slots are spare in fact.
    looked_at: Option<(TierId, u64)>,
    /// Victims are dropped if they can be, not written.
    dropping: bool,
    touched: Vec<(TierId, BlockId)>,
    /// What was taken out or put in for cuts: right as it is, should nothing but cuts be carried out.
    sure: Vec<(TierId, BlockId)>,
    /// Copies that stay: by tier and first block, the block behind the last one.
    guarded: BTreeMap<(TierId, BlockId), BlockId>,
    /// Blocks for whose copies room is being made below: they must not go meanwhile.
    moving: Vec<BlockId>,
    /// What its victims leave for.
    pub(in crate::manager) cause: Cause,
}

impl EvictionSet {
    /// Nothing is decided.
    fn clear(&mut self) {
        let Self {
            victims,
            taken,
            tails,
            latest_tail,
            added,
            spare,
            looked_at,
            dropping,
            touched,
            sure,
            guarded,
            moving,
            cause,
        } = self;
        victims.clear();
        taken.clear();
        tails.clear();
        added.clear();
        spare.clear();
        touched.clear();
        sure.clear();
        guarded.clear();
        moving.clear();
        (*latest_tail, *looked_at, *dropping, *cause) = Default::default();
    }

    /// Whether one of these copies stays.
    fn guards(&self, tier: TierId, blocks: Range<BlockId>) -> bool {
        let before = self.guarded.range((tier, 0)..(tier, blocks.end)).next_back();
        before.is_some_and(|(_, &end)| blocks.start < end)
    }

    /// Whether a block leaves with others.
    fn in_tail(&self, tier: TierId, block: BlockId) -> bool {
        if self.latest_tail.0 == tier && self.latest_tail.1.contains(&block) {
            return true;
        }
        let before = self.tails.range((tier, 0)..=(tier, block)).next_back();
        before.is_some_and(|(_, &end)| block < end)
    }

    /// Blocks leave together.
    fn add_tail(&mut self, tier: TierId, blocks: Range<BlockId>) {
        let (at, known) = std::mem::replace(&mut self.latest_tail, (tier, blocks));
        if !known.is_empty() {
            self.tails.insert((at, known.start), known.end);
        }
    }

    /// What remains of a residency that loses layers.
    fn rest(&self, tier: TierId, block: BlockId) -> Option<Layers> {
        let taken = self.taken.get(&(tier, block)).copied();
        taken.or_else(|| self.in_tail(tier, block).then_some(Layers::NONE))
    }
}

impl Manager {
    pub(in crate::manager) fn eviction_set(&self) -> EvictionSet {
        let spare = self.takeable().collect();
        EvictionSet { spare, ..EvictionSet::default() }
    }

    /// The slots that can be taken on each tier.
    fn takeable(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.tiers.len()).map(|tier| self.blocks.space(tier).takeable())
    }

    /// A draft in the memory of one that is done.
    fn reuse_set(&mut self, dropping: bool) -> Box<EvictionSet> {
        let mut set = self.done.take().unwrap_or_default();
        set.spare.extend(self.takeable());
        set.dropping = dropping;
        set
    }

    /// Keeps the memory of a draft for the next one, unless that is much.
    fn keep(&mut self, mut set: Box<EvictionSet>) {
        if set.victims.len() > MANY || set.taken.len() > MANY {
            return;
        }
        set.clear();
        self.done = Some(set);
    }

    /// A draft whose victims leave for a certain cause.
    pub(in crate::manager) fn eviction_set_for(&self, cause: Cause) -> EvictionSet {
        EvictionSet { cause, ..self.eviction_set() }
    }

    /// Makes room for so many slots of each tier while some copies stay, or changes nothing.
    /// Where writing victims down does not leave enough, those that can be are dropped: retention is
    /// soft.
    ///
    /// # Errors
    /// [`Error::NoSpace`] for the first tier that cannot do it.
    pub(in crate::manager) fn make_room(
        &mut self,
        wanted: &[(TierId, u64)],
        stay: &[(TierId, Range<BlockId>)],
        now: Nanos,
    ) -> Result<()> {
        // Each tier is named once.
        let there = |&(tier, units): &(TierId, u64)| {
            units == 0 || units + self.transit_reserve(tier) <= self.blocks.space(tier).takeable()
        };
        if wanted.iter().all(there) {
            return Ok(());
        }
        let mut refused = None;
        for dropping in [false, true] {
            let mut set = self.reuse_set(dropping);
            for (tier, blocks) in stay {
                self.guard(&mut set, *tier, blocks.clone());
            }
            refused = None;
            for &(tier, units) in wanted {
                if units > 0 && !self.room(&mut set, tier, units, now) {
                    refused = Some(self.no_space(tier, units, &set));
                    break;
                }
            }
            if refused.is_none() {
                self.apply(&set, now);
                self.keep(set);
                return Ok(());
            }
            self.abandon(&set);
            self.keep(set);
        }
        refused.map_or(Ok(()), Err)
    }

    /// A draft whose victims on `tier` stay: it finds out what to write ahead of need.
    pub(in crate::manager) fn look(&self, tier: TierId) -> EvictionSet {
        let set = self.eviction_set_for(Cause::Ahead);
        let spare = set.spare[tier];
        EvictionSet { looked_at: Some((tier, spare)), ..set }
    }

    /// Decides on victims until `units` slots of a tier can be taken, and takes them. What was
    /// decided before a failure stays in the draft.
    pub(in crate::manager) fn room(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        units: u64,
        now: Nanos,
    ) -> bool {
        // Where nothing is written down, nothing passes through on its way there.
        let kept = if set.dropping { 0 } else { self.transit_reserve(tier) };
        let wanted = units + kept;
        let mut next = None;
        while set.spare[tier] < wanted {
            let (entry, linked) = match next.take() {
                Some(entry) => (entry, false),
                None => match self.tiers[tier].eviction.victim(stamp(now)) {
                    Some(entry) => (entry, true),
                    None => return false,
                },
            };
            let run = self.prefetch_victim(entry.id);
            if linked {
                self.tiers[tier].eviction.unlink(entry.id);
            }
            self.prefetch_parent(tier, run);
            if self.evict_tail(set, tier, entry, wanted, now) {
                set.sure.push((tier, entry.id));
                next = self.expose(set, tier, wanted, now);
            } else {
                set.touched.push((tier, entry.id));
                self.decide(set, tier, entry, now);
            }
        }
        set.spare[tier] -= units;
        true
    }

    /// Prefetches the CPU cache lines that deciding on a victim reads, which then takes one wait for
    /// memory instead of many; returns the victim's run.
    fn prefetch_victim(&self, block: BlockId) -> RunId {
        self.prefetch_residencies(block);
        let (run, first) = self.blocks.trie().prefetch_lines(block);
        self.prefetch_residencies(first);
        run
    }

    /// Prefetches the lines of the block before a run, which may be linked when the run leaves.
    fn prefetch_parent(&self, tier: TierId, run: RunId) {
        if let Some(parent) = self.blocks.trie().prefetch_parent(run) {
            self.prefetch_residencies(parent);
            self.tiers[tier].eviction.prefetch_line(parent);
        }
    }

    /// Decides on one block, whatever its value.
    pub(in crate::manager) fn choose(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        now: Nanos,
    ) {
        let entry = self.entry(tier, block, self.residency(tier, block).have);
        self.take_out(set, tier, block);
        self.decide(set, tier, entry, now);
    }

    /// How many slots a draft could still take on a tier.
    pub(in crate::manager) fn spare(set: &EvictionSet, tier: TierId) -> u64 {
        set.spare[tier]
    }

    /// Links every entry again that a draft took out.
    pub(in crate::manager) fn abandon(&mut self, set: &EvictionSet) {
        self.refresh_touched(set);
        for &(tier, block) in &set.sure {
            self.refresh_on(tier, block);
        }
    }

    /// Brings the entries in line around what a draft decided one by one.
    pub(in crate::manager) fn refresh_touched(&mut self, set: &EvictionSet) {
        for tier in &mut self.tiers {
            tier.eviction.settle();
        }
        for &(tier, block) in &set.touched {
            self.refresh_on(tier, block);
        }
    }

    /// The slots that `layers` of a block would take on a tier.
    pub(in crate::manager) fn units(&self, tier: TierId, layers: Layers) -> u64 {
        if self.tiers[tier].spec.layer_slots { u64::from(layers.len()) } else { 1 }
    }

    /// Keeps blocks of a run that are on a tier out of the draft's reach. What is kept is told in
    /// ranges that do not overlap, but for their ends.
    pub(in crate::manager) fn guard(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        blocks: Range<BlockId>,
    ) {
        let end = set.guarded.entry((tier, blocks.start)).or_default();
        *end = blocks.end.max(*end);
        for block in self.edge(tier, blocks.clone(), self.structure(blocks.start)) {
            self.take_out(set, tier, block);
        }
    }

    fn take_out(&mut self, set: &mut EvictionSet, tier: TierId, block: BlockId) {
        if self.tiers[tier].eviction.unlink(block).is_some() {
            set.touched.push((tier, block));
        }
    }

    fn put_in(&mut self, set: &mut EvictionSet, tier: TierId, entry: Entry) {
        self.link(tier, entry);
        set.touched.push((tier, entry.id));
    }

    fn link(&mut self, tier: TierId, entry: Entry) {
        let band = self.band(tier, entry.id);
        self.tiers[tier].eviction.link(entry, band);
    }

    /// The layers that stand on a tier in the draft's view, whether usable or not.
    fn view(&self, set: &EvictionSet, tier: TierId, block: BlockId) -> Layers {
        if let Some(rest) = set.rest(tier, block) {
            return rest;
        }
        if let Some(&more) = set.added.get(&(tier, block)) {
            return more;
        }
        match self.residency(tier, block).state {
            State::Bad => self.residency(tier, block).have,
            _ => self.expected(tier, block),
        }
    }

    fn usable_view(&self, set: &EvictionSet, tier: TierId, block: BlockId) -> Layers {
        if self.residency(tier, block).state == State::Bad {
            Layers::NONE
        } else {
            self.view(set, tier, block)
        }
    }

    fn decide(&mut self, set: &mut EvictionSet, tier: TierId, entry: Entry, now: Nanos) {
        let block = entry.id;
        // What is written ahead must not push out what was: the two would change places for ever.
        let ahead =
            set.looked_at.is_some_and(|(at, _)| at < tier && !self.expected(at, block).is_empty());
        if ahead {
            return;
        }
        let have = self.view(set, tier, block);
        if self.residency(tier, block).state == State::Bad {
            self.leave(set, Victim::one(tier, block, have, Fate::Clean));
            return;
        }
        let out = self.next_out(tier, block, have);
        let Some(dirty) = self.dirty(set, tier, block, out) else {
            self.drop_whole(set, tier, block, have);
            return;
        };
        if dirty.is_empty() {
            self.leave(set, Victim::one(tier, block, out, Fate::Clean));
            return;
        }
        // What cannot be dropped, for something behind it is on its way, is still written.
        if set.dropping && self.drop_whole(set, tier, block, have) {
            return;
        }
        set.moving.push(block);
        let written = self.can_write(set, tier, block, dirty, now);
        set.moving.pop();
        if written {
            self.leave(set, Victim::one(tier, block, out, Fate::Demote(dirty)));
        } else {
            // Without a copy below the order of dropping holds, not that of demoting.
            let single = tier == self.last();
            self.drop_whole(set, tier, block, if single { out } else { have });
        }
    }

    /// The part of `out` that stands nowhere else; `None` if it is not one range.
    fn dirty(
        &self,
        set: &EvictionSet,
        tier: TierId,
        block: BlockId,
        out: Layers,
    ) -> Option<Layers> {
        // On the lowest tier a copy above counts too: dropping this one loses nothing.
        let others = if tier == self.last() { 0..tier } else { tier + 1..self.tiers.len() };
        others
            .into_iter()
            .try_fold(out, |left, other| left.without(self.usable_view(set, other, block)))
    }

    /// Whether layers spare anybody work. What is missing above them is computed through them all,
    /// so they do only if every layer above stands somewhere.
    pub(in crate::manager) fn spares(
        &self,
        layers: Layers,
        stands: impl Fn(TierId) -> Layers,
    ) -> bool {
        let above = Layers::new(layers.hi, self.settings.layers);
        let left = (0..self.tiers.len()).try_fold(above, |left, tier| left.without(stands(tier)));
        self.settings.drop_order == DropOrder::Seed || left.is_some_and(Layers::is_empty)
    }

    fn can_write(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        dirty: Layers,
        now: Nanos,
    ) -> bool {
        let node = *self.node(block);
        let spec = &self.tiers[tier].spec;
        let worth = node.uses >= spec.admit_after && self.refused.may_write(block, tier + 1);
        if tier == self.last() || spec.write == Write::Never || !worth {
            return false;
        }
        let below = tier + 1;
        let there = self.view(set, below, block);
        if self.residency(below, block).state == State::Bad || self.stuck(below, block) {
            return false;
        }
        let Some(joined) = there.join(dirty) else { return false };
        if !self.spares(joined, |other| self.usable_view(set, other, block)) {
            return false;
        }
        self.take_out(set, below, block);
        if let Some(host) = self.transit(tier, below) {
            // Only out of what is reserved: making room here could go round in circles.
            if !self.pass(set, host) {
                return false;
            }
        }
        let whole = !self.tiers[below].spec.layer_slots;
        let units = if whole && !there.is_empty() { 0 } else { self.units(below, dirty) };
        if !self.room(set, below, units, now) {
            return false;
        }
        set.added.insert((below, block), joined);
        set.taken.remove(&(below, block));
        true
    }

    /// Drops `out` of a last copy. A leaf-only block goes from all tiers at once, since what is
    /// left of it would serve nobody. Whether it goes.
    fn drop_whole(
        &mut self,
        set: &mut EvictionSet,
        tier: TierId,
        block: BlockId,
        out: Layers,
    ) -> bool {
        let looked_at = set.looked_at.is_some_and(|(at, _)| at == tier);
        if looked_at || self.structure(block) == Structure::Holes {
            self.leave(set, Victim::one(tier, block, out, Fate::Drop));
            return true;
        }
        let gone = if set.dropping { self.subtree(block) } else { vec![block] };
        if !gone.iter().all(|&block| self.droppable(set, block, &gone)) {
            return false;
        }
        for &block in gone.iter().rev() {
            for tier in 0..self.tiers.len() {
                let layers = self.view(set, tier, block);
                if !layers.is_empty() {
                    self.take_out(set, tier, block);
                    self.leave(set, Victim::one(tier, block, layers, Fate::Drop));
                }
            }
        }
        true
    }

    /// Whether a leaf-only block may vanish: nobody uses it and nothing stays behind it.
    fn droppable(&self, set: &EvictionSet, block: BlockId, gone: &[BlockId]) -> bool {
        let tiers = 0..self.tiers.len();
        let quiet = tiers.clone().all(|tier| {
            let here = self.residency(tier, block);
            here.busy == 0
                && here.state != State::Arriving
                && !set.added.contains_key(&(tier, block))
                && !set.guards(tier, block..block + 1)
        }) && !set.moving.contains(&block);
        // What is written ahead takes nothing from the tiers that it comes from or passed.
        let ahead = set.looked_at.is_none_or(|(at, _)| {
            (0..=at).all(|tier| self.residency(tier, block).state == State::Absent)
        });
        quiet
            && ahead
            && self.node(block).refs == 0
            && self.blocks.trie().children(block).all(|child| {
                gone.contains(&child) || (self.node(child).refs == 0 && self.gone(set, child))
            })
    }

    fn gone(&self, set: &EvictionSet, block: BlockId) -> bool {
        // What is only looked at stays where it is.
        let stays =
            set.looked_at.is_some_and(|(at, _)| self.residency(at, block).state != State::Absent);
        if stays {
            return false;
        }
        (0..self.tiers.len()).all(|tier| {
            self.view(set, tier, block).is_empty()
                && (self.residency(tier, block).state != State::Arriving
                    || set.rest(tier, block).is_some())
        })
    }

    /// Records a victim and brings the entries around it in line with the view.
    fn leave(&mut self, set: &mut EvictionSet, victim: Victim) {
        let Victim { tier, block, layers, .. } = victim;
        let have = self.view(set, tier, block);
        let rest = have.without(layers).expect("what leaves is at an end of the range");
        set.victims.push(victim);
        set.taken.insert((tier, block), rest);
        let freed = if self.tiers[tier].spec.layer_slots {
            u64::from(layers.len())
        } else {
            u64::from(rest.is_empty())
        };
        set.spare[tier] += freed;
        if !rest.is_empty() {
            let entry = self.entry(tier, block, rest);
            self.put_in(set, tier, entry);
            return;
        }
        let band = self.band(tier, block);
        self.tiers[tier].eviction.choose(block, band);
        if self.structure(block) == Structure::LeafOnly
            && let Some(parent) = self.blocks.trie().parent(block)
            && let Some(entry) = self.exposed(set, tier, parent, false)
        {
            self.put_in(set, tier, entry);
        }
    }

    /// The entry that a leaf-only block gets if what stood behind it leaves; `bare` if all of that is
    /// known to.
    fn exposed(
        &self,
        set: &EvictionSet,
        tier: TierId,
        parent: BlockId,
        bare: bool,
    ) -> Option<Entry> {
        let here = self.residency(tier, parent);
        let free = matches!(here.state, State::Resident | State::Bad)
            && here.busy == 0
            && (tier > 0 || self.node(parent).refs == 0)
            && !set.guards(tier, parent..parent + 1)
            && !set.moving.contains(&parent)
            // What stood behind it kept it from leaving with others.
            && !set.taken.contains_key(&(tier, parent))
            && !set.added.contains_key(&(tier, parent));
        let alone = |child| {
            self.residency(tier, child).state == State::Absent
                && !set.added.contains_key(&(tier, child))
                || set.rest(tier, child).is_some_and(Layers::is_empty)
        };
        // The children come last: there may be many.
        let exposed = free
            && self.tiers[tier].eviction.get(parent).is_none()
            && (bare || self.blocks.trie().children(parent).all(alone));
        exposed.then(|| self.entry(tier, parent, here.have))
    }
}
