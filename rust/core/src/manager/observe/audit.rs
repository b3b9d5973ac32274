//! Audit: checks every invariant from scratch.
//!
//! A broken invariant poisons the manager instead of panicking: every later call fails with
//! [`Error::Invariant`]. Cost: O(everything), so only tests call it after each operation.

use std::collections::BTreeMap;

use crate::block::{BlockId, MoveId, NO_SLOT, Slot, TierId};
use crate::error::{Error, Result};
use crate::policy::Needs;
use crate::scope::ScopeId;
use crate::tier::{Owner, ResidencyState};

use crate::manager::Manager;
use crate::manager::kinds::Ahead;
use crate::manager::request::life::lease::TailFrom;
use crate::manager::request::slots::lease_slots::OpenSlot;
use crate::transfer::{End, MoveKind};

impl Manager {
    /// Checks every invariant.
    ///
    /// # Errors
    /// [`Error::Invariant`] naming the broken invariant. The manager is poisoned from then on.
    pub fn audit(&mut self) -> Result<()> {
        if let Some(reason) = &self.poison {
            return Err(Error::invariant(format!("the manager is poisoned: {reason}")));
        }
        let mut broken = self.trie().audit();
        self.audit_scopes(&mut broken);
        self.audit_digests(&mut broken);
        self.audit_blocks(&mut broken);
        self.audit_references(&mut broken);
        self.audit_moves(&mut broken);
        self.audit_ahead(&mut broken);
        self.audit_consequences(&mut broken);
        self.audit_hints(&mut broken);
        self.audit_sessions(&mut broken);
        self.audit_prices(&mut broken);
        self.audit_points(&mut broken);
        self.audit_shared_stores(&mut broken);
        self.audit_producers(&mut broken);
        for tier in 0..self.tiers.len() {
            self.audit_slots(tier, &mut broken);
            self.audit_retention(tier, &mut broken);
            self.compare_victims(tier, &mut broken);
        }
        self.audit_meter(&mut broken);
        self.audit_undecided(&mut broken);
        if broken.is_empty() {
            return Ok(());
        }
        let reason = broken.join("; ");
        self.poison = Some(reason.clone());
        Err(Error::invariant(reason))
    }

    /// Poisons the manager, for callers that detected a broken invariant.
    pub fn poison(&mut self, reason: &str) {
        self.poison = Some(reason.to_owned());
    }

    /// Checks that scopes are held exactly by their leases and pending hints.
    fn audit_scopes(&self, broken: &mut Vec<String>) {
        let mut held: BTreeMap<ScopeId, u32> = BTreeMap::new();
        let leased = self.leases.values().map(|lease| lease.scope_id);
        for scope in leased.chain(self.hints.awaited().map(|(scope, _)| scope)) {
            *held.entry(scope).or_default() += 1;
        }
        broken.extend(self.scopes.audit(self.trie(), held));
    }

    /// Checks that every block is resident, pinned or a parent, and that arrivals are counted.
    fn audit_blocks(&self, broken: &mut Vec<String>) {
        for block in self.living() {
            // A window or a state may still be arriving.
            let mut held = self.blocks.groups_arrive(block);
            for tier in 0..self.tiers.len() {
                let residency = self.residency(tier, block);
                held |= residency.state != ResidencyState::Absent;
                self.audit_residency(tier, block, broken);
            }
            let used = self.node(block).refs > 0 || self.trie().children(block).next().is_some();
            if !held && !used {
                broken.push(format!("block {block} is resident nowhere and not needed"));
            }
            // No request reaches the copies after a lost block of a leaf-only scope.
            let idle = |block: BlockId| {
                (0..self.tiers.len()).any(|tier| {
                    let residency = self.residency(tier, block);
                    residency.state == ResidencyState::Resident && residency.busy == 0
                })
            };
            if self.is_lost(block) && self.subtree(block)[1..].iter().any(|&after| idle(after)) {
                broken.push(format!("block {block} is a hole in a leaf-only scope"));
            }
        }
        if !self.lost.is_empty() && self.moves.is_empty() {
            broken.push(format!("{} lost blocks await moves, none is in flight", self.lost.len()));
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            let coming = self.living().filter(|&block| self.arrival(number, block).is_some());
            let (seen, kept) = (coming.count(), self.blocks.table(number).arrivals());
            if seen != kept {
                let name = tier.spec.kind.name();
                broken.push(format!("{kept} blocks are in flight to '{name}', {seen} seen"));
            }
        }
    }

    /// Checks that a residency's state agrees with its slot, layers, moves and arrival.
    fn audit_residency(&self, tier: TierId, block: BlockId, broken: &mut Vec<String>) {
        let residency = self.residency(tier, block);
        let name = self.tiers[tier].spec.kind.name();
        let arrival = self.arrival(tier, block);
        let mut say = |what: String| broken.push(format!("block {block} on '{name}' {what}"));
        match residency.state {
            ResidencyState::Absent
                if residency.slot != NO_SLOT
                    || !residency.have.is_empty()
                    || residency.busy > 0 =>
            {
                say(format!("is absent with slot {}, layers {}", residency.slot, residency.have));
            }
            ResidencyState::Resident | ResidencyState::Bad
                if residency.have.is_empty() || arrival.is_some() =>
            {
                say(format!("is settled with layers {}", residency.have));
            }
            ResidencyState::Arriving if arrival.is_none() => {
                say("arrives without a move".to_owned());
            }
            _ => {}
        }
        if residency.have.hi > self.settings.layers {
            say(format!("has layers {} of {}", residency.have, self.settings.layers));
        }
        let top = tier == 0 && self.tiers.len() > 1;
        if top && !residency.have.is_empty() && residency.have.lo != 0 {
            say(format!("is on the first tier with layers {}", residency.have));
        }
        if let Some(arrival) = arrival
            && (!arrival.target.covers(residency.have)
                || residency.state != ResidencyState::Arriving)
        {
            say(format!("expects {} and has {}", arrival.target, residency.have));
        }
        if self.tiers[tier].spec.layer_slots && residency.slot != NO_SLOT {
            let held = arrival.map_or(residency.have, |arrival| arrival.target);
            let row = self.blocks.space(tier).row(residency.slot);
            for (layer, &slot) in (0..).zip(row) {
                if (slot != NO_SLOT) != held.contains(layer) {
                    say(format!("has layers {held} and slot {slot} for layer {layer}"));
                }
            }
        }
    }

    /// Checks that refcounts of blocks and private slots agree with the leases.
    fn audit_references(&self, broken: &mut Vec<String>) {
        let removed = self.refused.blocks().filter(|&block| !self.trie().alive(block));
        broken.extend(removed.map(|block| format!("block {block} left the trie and was refused")));
        let mut refs: BTreeMap<BlockId, u32> = BTreeMap::new();
        let mut holders = BTreeMap::new();
        for lease in self.leases.values() {
            let tail = match lease.tail_from {
                TailFrom::Block(step) => Some(step),
                _ => None,
            };
            for step in lease.path.steps().chain(tail) {
                *refs.entry(step.block).or_default() += 1;
            }
            for private in lease.private_slots().chain(lease.private_tail()) {
                *holders.entry(private).or_insert(0_u32) += 1;
            }
            if lease.tail.len() >= self.block_tokens() {
                broken.push(format!("lease {} has a tail of {}", lease.id, lease.tail.len()));
            }
        }
        let brings =
            |id: MoveId| self.moves.get(id).is_some_and(|known| known.kind != MoveKind::Store);
        for (lease, moves) in self.awaits.all() {
            let held = self.leases.contains_key(&lease);
            let vain = moves.iter().filter(|&&id| !held || !brings(id));
            broken.extend(vain.map(|id| format!("lease {lease} awaits move {id} in vain")));
        }
        for block in self.living() {
            let (seen, kept) = (refs.get(&block).copied().unwrap_or(0), self.node(block).refs);
            if seen != kept {
                broken.push(format!("block {block} counts {kept} leases, {seen} hold it"));
            }
        }
        for ahead in self.ahead.values() {
            *holders.entry(ahead.copy).or_insert(0_u32) += 1;
        }
        for (id, private) in self.private_slots.iter() {
            let seen = holders.remove(&id).unwrap_or(0);
            if seen != private.refs || (private.refs == 0 && private.busy == 0) {
                broken.push(format!(
                    "private slot {id:?} counts {} holders, {seen} hold it",
                    private.refs
                ));
            }
        }
        if !holders.is_empty() {
            broken.push(format!("leases hold {} private slots that do not exist", holders.len()));
        }
    }

    /// Checks that busy counts and dependencies agree with the moves in flight.
    fn audit_moves(&self, broken: &mut Vec<String>) {
        let mut busy: BTreeMap<(TierId, BlockId), u16> = BTreeMap::new();
        let mut private_busy = BTreeMap::new();
        for copy in self.pins.copies() {
            *busy.entry(copy).or_default() += 1;
        }
        for known in self.moves.values() {
            let block = known.block.and_then(|handle| self.trie().resolve(handle));
            for at in known.ends() {
                match (at.end, block) {
                    // Moves of later groups are counted with their holds.
                    (End::Resident, Some(block)) if at.place.group == 0 => {
                        *busy.entry((at.place.tier, block)).or_default() += 1;
                    }
                    (End::PrivateSlot(private), _) => {
                        *private_busy.entry(private).or_insert(0_u32) += 1;
                    }
                    _ => {}
                }
            }
        }
        self.moves.audit(broken);
        for block in self.living() {
            for tier in 0..self.tiers.len() {
                let seen = busy.get(&(tier, block)).copied().unwrap_or(0);
                let kept = self.residency(tier, block).busy;
                if seen != kept {
                    broken.push(format!("block {block} on tier {tier}: {kept} moves, {seen} seen"));
                }
            }
        }
        for (id, private) in self.private_slots.iter() {
            if private_busy.get(&id).copied().unwrap_or(0) != private.busy {
                broken.push(format!("private slot {id:?} counts {} moves", private.busy));
            }
        }
    }

    /// Checks that every call has carried out its consequences.
    fn audit_consequences(&self, broken: &mut Vec<String>) {
        if !self.consequences.is_empty() {
            broken.push(format!("left to carry out: {:?}", self.consequences));
        }
    }

    /// Checks that a copy ahead belongs to a lease's open slot, and its move to both.
    fn audit_ahead(&self, broken: &mut Vec<String>) {
        for (&slot, &Ahead { source, copy, by }) in &self.ahead {
            let open = OpenSlot::Private(source);
            let held = self
                .leases
                .values()
                .any(|lease| lease.groups[0].written.slots().any(|held| held == open));
            let ends = (End::PrivateSlot(source), End::PrivateSlot(copy));
            let apart = self.moves.get(by).is_some_and(|m| m.failed || (m.from, m.to) != ends);
            let elsewhere =
                self.private_slots.get(source).is_none_or(|private| private.slot != slot);
            if !held || apart || elsewhere {
                broken.push(format!("move {by} made a copy ahead of slot {slot} in vain"));
            }
        }
    }

    /// Checks that every slot is in exactly one place.
    fn audit_slots(&self, tier: TierId, broken: &mut Vec<String>) {
        let (this, space) = (&self.tiers[tier], self.blocks.space(tier));
        if this.spec.owner == Owner::Engine {
            return;
        }
        let mut places: BTreeMap<Slot, u32> = BTreeMap::new();
        let mut hold = |slot: u32| {
            if slot == NO_SLOT {
                return;
            }
            if this.spec.layer_slots {
                for &one in space.row(slot).iter().filter(|&&one| one != NO_SLOT) {
                    *places.entry(one).or_default() += 1;
                }
            } else {
                *places.entry(slot).or_default() += 1;
            }
        };
        for block in self.living() {
            hold(self.residency(tier, block).slot);
        }
        for (_, private) in self.private_slots.iter().filter(|(_, private)| private.tier == tier) {
            hold(private.slot);
        }
        if tier == 0 {
            let open = self.leases.values().flat_map(|lease| lease.groups[0].written.slots());
            open.filter_map(OpenSlot::plain).for_each(&mut hold);
        }
        let ranges = space.spare();
        let arena = self.blocks.arena(tier);
        let slots = arena.map_or(u64::from(space.capacity()), |arena| arena.live(0));
        let mut counted = places.len() as u64;
        for range in &ranges {
            counted += range.len() as u64;
            places.range_mut(range.clone()).for_each(|(_, places)| *places += 1);
        }
        let twice = ranges.windows(2).find(|pair| pair[0].end > pair[1].start);
        let wrong: Vec<_> = places.iter().filter(|(_, places)| **places != 1).take(3).collect();
        if !wrong.is_empty() || twice.is_some() || counted != slots {
            broken.push(format!(
                "tier '{}' accounts for {counted} of {slots} slots, wrong: {wrong:?}, free twice: \
                 {twice:?}",
                this.spec.kind.name(),
            ));
        }
    }

    /// Checks that exactly the evictable blocks are linked, at their present price.
    fn audit_retention(&self, tier: TierId, broken: &mut Vec<String>) {
        let index = &self.tiers[tier].eviction;
        let mut linked = 0;
        for block in self.living() {
            let wanted = self
                .evictable(tier, block)
                .then(|| self.entry(tier, block, self.residency(tier, block).have));
            linked += usize::from(wanted.is_some());
            let resident = self.residency(tier, block).state != ResidencyState::Absent;
            if index.needs(Needs::ARRIVAL) && index.arrival(block).is_some() != resident {
                broken.push(format!("tier {tier} is wrong about the arrival of block {block}"));
            }
            let known = index.get(block);
            let (linked, band) = (index.band(block), self.band(tier, block));
            if known != wanted || (known.is_some() && linked != band) {
                broken.push(format!(
                    "block {block} on tier {tier} is linked as {known:?} in {linked:?}, should be \
                     {wanted:?} in {band:?}"
                ));
            }
        }
        if linked != index.len() {
            broken.push(format!("tier {tier} links {} entries of {linked}", index.len()));
        }
    }
}
