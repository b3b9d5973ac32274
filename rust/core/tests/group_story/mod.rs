//! A story: random requests, marks and hints to a manager of a model with several groups.
//!
//! Every match is compared with attention's own answer, every byte that a lease can read with what was
//! computed for its path, and the copies with those that the block events report. Invariant: the model
//! knows nothing of windows beyond attention. Cost: O(everything) per step.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod drawn;

use std::collections::BTreeSet;

use kvtrie_core::block::{Handle, LeaseId, NO_SLOT, Slot, TierId, Token};
use kvtrie_core::group::{Group, GroupKind};
use kvtrie_core::hint::{Answer, Hint, Release, Target};
use kvtrie_core::manager::{
    Acquire, Action, Asked, BlockEventKind, Copy, Groups, LoadMode, Manager, Mark, MissCause, Move,
    Outcome, Settings,
};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec};

use crate::bytes::Bytes;
use crate::rig::{GPU, Rig, SIZE, retain, settings, tier, tokens};

/// Group of a story that keeps all tokens.
pub(crate) const FULL: Group = Group { kind: GroupKind::Full, slot_bytes: 100, layers: 4 };
/// Settings for these groups on one to three tiers of this number of bytes.
pub(crate) fn on(groups: &[Group], bytes: &[u64]) -> Settings {
    let spec = |kind| TierSpec { owner: Owner::Nobody, ..tier(kind, 1000) };
    let slots = vec![groups.iter().map(|group| group.slot_bytes).collect(); bytes.len()];
    let tiers =
        [Kind::Gpu, Kind::Host, Kind::Disk].into_iter().take(bytes.len()).map(spec).collect();
    let (groups, bytes) = (groups.to_vec(), bytes.to_vec());
    let groups = Groups { groups, bytes, slots, newest: 1, every: 0 };
    Settings { groups: Some(groups), ..settings(tiers) }
}

/// A prompt whose tokens equal those of another up to `shared` blocks.
pub(crate) fn branch(of: &[Token], shared: usize, stem: u32, blocks: usize) -> Vec<Token> {
    [&of[..shared * SIZE], &tokens(stem, blocks)].concat()
}

/// Whether a query after `border` blocks can be computed, by what it attends to.
pub(crate) fn resumes(groups: &[Group], border: u32, has: impl Fn(usize, u32) -> bool) -> bool {
    sees(groups, u64::from(border) * SIZE as u64, has)
}

/// Whether all that a token attends to is there.
fn sees(groups: &[Group], query: u64, has: impl Fn(usize, u32) -> bool) -> bool {
    groups.iter().enumerate().all(|(at, group)| {
        let mut past = 0..query;
        past.all(|past| {
            let attends = match group.kind {
                GroupKind::Full => true,
                GroupKind::Sliding { window, sinks } => query - past < window || past < sinks,
                GroupKind::Chunked { chunk } => query / chunk == past / chunk,
                GroupKind::State => past + 1 == query,
            };
            !attends || has(at, u32::try_from(past / SIZE as u64).unwrap())
        })
    })
}

/// Whether a request can go on after `border` blocks: it computes those that the first group lacks,
/// token by token, and then its own first token. A state is never rolled back.
fn reaches(groups: &[Group], border: u32, has: impl Fn(usize, u32) -> bool) -> bool {
    let holes: BTreeSet<u32> = (0..border).filter(|&place| !has(0, place)).collect();
    let there = |at: usize, place: u32| holes.contains(&place) || has(at, place);
    let states = groups.iter().any(|group| group.kind == GroupKind::State);
    let end = u64::from(border) * SIZE as u64;
    let computed =
        (0..end).filter(|token| holes.contains(&u32::try_from(token / SIZE as u64).unwrap()));
    let last = border.checked_sub(1).is_none_or(|last| !holes.contains(&last));
    last && (holes.is_empty() || !states)
        && computed.chain([end]).all(|query| sees(groups, query, there))
}

/// A step of a random story: what, and four numbers.
pub(crate) type Step = (u8, u32, usize, usize, usize);

/// A marked block, its tier, group and slot, and the path up to it.
type Unwritten = (Handle, (TierId, usize, Slot), Vec<Token>);

/// A manager with requests that are held.
pub(crate) struct Story {
    rig: Rig,
    groups: Vec<Group>,
    held: Vec<(LeaseId, Vec<Token>)>,
    last: Vec<Token>,
    /// The bytes, if there are any.
    bytes: Option<Bytes>,
    /// Marked blocks whose bytes are still to be written.
    unwritten: Vec<Unwritten>,
    /// The next slot of an engine, if one owns the first tier.
    engine: Option<u32>,
    /// Block, tier and group of each copy, by the block events.
    reported: BTreeSet<(Handle, TierId, u8)>,
    /// Blocks that requests had to compute in holes.
    pub(crate) computed: usize,
}

impl Story {
    /// A story of a fresh manager, without bytes if none owns the first tier; `None` if the settings
    /// are refused.
    pub(crate) fn new(settings: Settings) -> Option<Self> {
        let owner = settings.tiers[0].owner;
        let groups = settings.groups.as_ref()?.groups.clone();
        let rig = Rig { manager: Manager::new(settings).ok()?, now: 1000 };
        let engine = (owner == Owner::Engine).then_some(0);
        let bytes = (owner != Owner::Nobody).then(|| Bytes::new(&groups, engine.is_some()));
        let (held, last, reported) = (Vec::new(), tokens(0, 2), BTreeSet::new());
        let (unwritten, computed) = (Vec::new(), 0);
        Some(Self { rig, groups, held, last, bytes, unwritten, engine, reported, computed })
    }

    /// A request, whose match is compared with attention's.
    fn ask(&mut self, (_, stem, shared, more, extra): Step, load: LoadMode) {
        let shared = shared.min(self.last.len() / SIZE);
        let mut prompt = branch(&self.last, shared, stem + 10, more);
        prompt.extend(&tokens(77, 1)[..extra % SIZE]);
        self.explain(&prompt);
        let named = self.name_border(&prompt, shared + extra);
        let Self { rig, groups, .. } = self;
        let ask = Acquire { tokens: &prompt, reserve: extra, load, ..Acquire::default() };
        let border = rig.matched(&prompt) / SIZE;
        // From first principles: the longest border that every group can resume at.
        let map = rig.manager.group_map(&prompt, &Scope::default()).unwrap();
        let most = map.first().map_or(0, |blocks| u32::try_from(blocks.len()).unwrap());
        let has = |at: usize, place: u32| map[at][place as usize];
        // An engine names the slots of a path front to back, without holes.
        let hole = (0..most).find(|&place| !has(0, place)).filter(|_| self.engine.is_some());
        let most = hole.unwrap_or(most);
        let naive = (0..=most).rev().find(|&m| reaches(groups, m, has)).unwrap();
        assert_eq!(border, naive as usize);
        let Ok(id) = rig.ask(&ask) else { return };
        let matched = rig.manager.lease(id).unwrap().matched() / SIZE;
        assert!(reaches(groups, u32::try_from(matched).unwrap(), has));
        let borders = rig.manager.resume_borders(id).unwrap();
        assert!(named.is_none_or(|border| border as usize <= matched || borders.contains(&border)));
        self.bind(id, 0, matched, prompt.len().div_ceil(SIZE));
        let Self { rig, groups, held, last, .. } = self;
        assert!(matched == border || (load != LoadMode::All && matched < border));
        // Each group has a slot on the first tier for all that the first token attends to.
        let mut table = |group| rig.manager.group_table(id, GPU, group).unwrap().1;
        let tables: Vec<_> = (0..groups.len()).map(&mut table).collect();
        let has = |at: usize, place: u32| tables[at][place as usize] != NO_SLOT;
        assert!(resumes(groups, u32::try_from(matched).unwrap(), has));
        held.push((id, prompt.clone()));
        *last = prompt;
        self.check_holes(id);
    }

    /// Places on the path of a lease that the plan has it compute.
    fn holes(&self, id: LeaseId) -> BTreeSet<u32> {
        let spans = self.rig.manager.lease(id).unwrap().plan().spans.iter();
        let holes = spans.filter(|span| span.action == Action::Recompute);
        holes.flat_map(|span| span.start..span.stop).collect()
    }

    /// A lease has what the first token of each hole attends to, and slots of its own in holes.
    fn check_holes(&mut self, id: LeaseId) {
        let holes = self.holes(id);
        if holes.is_empty() || self.engine.is_some() {
            return;
        }
        self.computed += holes.len();
        let mut table = |group| self.rig.manager.group_table(id, GPU, group).unwrap().1;
        let tables: Vec<_> = (0..self.groups.len()).map(&mut table).collect();
        let has = |at: usize, place: u32| tables[at][place as usize] != NO_SLOT;
        let begins = |start: &&u32| start.checked_sub(1).is_none_or(|at| !holes.contains(&at));
        for &start in holes.iter().filter(begins) {
            assert!(resumes(&self.groups, start, has), "{holes:?} {tables:?}");
        }
        let copies = self.copies(&self.last);
        for &hole in &holes {
            for copy in copies[hole as usize].iter().filter(|copy| copy.tier == GPU) {
                let own = tables[usize::from(copy.group)][hole as usize];
                assert!(own == NO_SLOT || own != copy.slot, "{copy:?}");
            }
        }
    }

    /// The holes of a lease are computed.
    fn fill_holes(&mut self, id: LeaseId, path: &[Token]) {
        let holes = self.holes(id);
        let Some(bytes) = self.bytes.as_mut().filter(|_| self.engine.is_none()) else { return };
        let tables = bytes.tables(&mut self.rig.manager, id);
        for place in holes.into_iter().map(|place| place as usize) {
            for (group, table) in tables.iter().enumerate().filter(|(_, t)| t[place] != NO_SLOT) {
                bytes.fill((GPU, group, table[place]), path, place);
            }
        }
    }

    /// Each token of a prompt is found, in flight, or computed for one cause; what is cached after the
    /// longest border at which all groups resume has no resume point.
    fn explain(&mut self, prompt: &[Token]) {
        let scope = Scope::default();
        let asked = Asked { tokens: prompt, scope: &scope, session: None, limit: 2 };
        let miss = self.rig.manager.miss(&asked, self.rig.now).unwrap().close();
        let (found, spans) = (miss.found.iter().sum::<usize>(), miss.causes.iter());
        let computed: usize = spans.map(|&(from, to, _)| to - from).sum();
        let arriving = prompt.len() - found - computed;
        assert!(arriving <= miss.in_flight, "{miss:?}");
        let border = self.rig.matched(prompt);
        let map = self.rig.manager.group_map(prompt, &scope).unwrap();
        let known = map.first().map_or(0, |blocks| blocks.len() * SIZE);
        let lacking = miss.causes.iter().filter(|span| span.2 == MissCause::NoResumePoint);
        let lacking: Vec<_> = lacking.map(|&(from, to, _)| (from, to)).collect();
        let naive = if border < known { vec![(border, known)] } else { vec![] };
        assert_eq!(lacking, naive, "{miss:?}");
    }

    /// A hint names a border of a prompt. Returns the border if it waits for a pass that ends there.
    fn name_border(&mut self, prompt: &[Token], drawn: usize) -> Option<u32> {
        let blocks = prompt.len() / SIZE;
        if blocks == 0 || !drawn.is_multiple_of(3) {
            return None;
        }
        let border = 1 + drawn % blocks;
        let target = Target::Tokens { tokens: prompt.to_vec(), scope: Scope::default() };
        let hint = Hint::ResumeAt { target, borders: vec![(border * SIZE) as u64] };
        let reply = self.rig.call(|m, now| m.hint(&[hint], now)).unwrap().remove(0);
        let border = u32::try_from(border).unwrap();
        if reply.answer == Answer::Deferred {
            return Some(border);
        }
        // A point has all that a query there attends to.
        assert_eq!((reply.answer, reply.blocks), (Answer::Accepted, 1));
        let map = self.rig.manager.group_map(prompt, &Scope::default()).unwrap();
        assert!(reaches(&self.groups, border, |at: usize, place: u32| map[at][place as usize]));
        None
    }

    /// An engine names slots of all groups: for what the match needs, and for blocks from `first` to
    /// before `end`.
    fn bind(&mut self, id: LeaseId, first: usize, matched: usize, end: usize) {
        let Some(next) = &mut self.engine else { return };
        let border = u32::try_from(matched).unwrap();
        for place in first..end {
            for (at, group) in self.groups.iter().enumerate() {
                let needed = group.needed(border, SIZE as u64);
                if place < matched && !needed.contains(u32::try_from(place).unwrap()) {
                    continue;
                }
                *next += 1;
                let slot = *next;
                self.rig.call(|m, _| m.bind_group(id, place, &[slot], at)).unwrap();
            }
        }
    }

    /// The rest of a request is computed; more or fewer of its moves have failed.
    fn go_on(&mut self, (what, stem, shared, _, extra): Step) {
        let (id, prompt) = self.held.remove(shared % self.held.len());
        self.end_all_moves();
        let mut path = prompt[..self.rig.manager.lease_tokens(id).unwrap()].to_vec();
        self.fill_holes(id, &path);
        self.compare(id, &path);
        let rest = &prompt[path.len()..];
        // Without room in all groups after a failed load, a lease has none.
        if self.rig.manager.room_left(id).unwrap() < rest.len()
            && self.rig.call(|m, now| m.reserve(id, rest.len(), now)).is_ok()
        {
            self.end_all_moves();
        }
        let rest = &rest[..rest.len().min(self.rig.manager.room_left(id).unwrap())];
        let middle = rest.len().min(extra * 2);
        self.write(id, &mut path, &rest[..middle]);
        self.write(id, &mut path, &rest[middle..]);
        if path.len() == prompt.len() && middle == 0 && self.bytes.is_some() {
            self.can_go_on(id, path.len() / SIZE);
        }
        if what == 7 {
            let room = self.rig.manager.room_left(id).unwrap();
            let answer = &tokens(stem + 50, 3)[..room.min(3 * SIZE)];
            self.write(id, &mut path, answer);
            self.last.extend(answer);
        }
        match what {
            11 | 12 if self.engine.is_some() => {}
            11 => self.truncate(id, &mut path, (stem, shared, extra)),
            12 => self.fork(id, &path, (stem, extra)),
            13 => self.suspend(id, &mut path, extra),
            _ => {}
        }
        if what == 8 && self.rig.call(|m, now| m.reserve(id, extra, now)).is_ok() {
            self.end_all_moves();
            let room = self.rig.manager.room_left(id).unwrap();
            self.write(id, &mut path, &tokens(stem + 60, 3)[..room.min(extra)]);
        }
        self.rig.release(id);
    }

    /// A lease goes back to a border at or before `to` tokens at which it can go on, and goes on.
    fn truncate(
        &mut self,
        id: LeaseId,
        path: &mut Vec<Token>,
        (stem, shared, extra): (u32, usize, usize),
    ) {
        let to = path.len().saturating_sub(shared * 3 + extra % 2);
        let known = path.clone();
        self.rig.call(|m, now| m.truncate(id, to, now)).unwrap();
        self.end_all_moves();
        let kept = self.rig.manager.lease_tokens(id).unwrap();
        assert!(kept <= to, "{kept} tokens are kept, {to} wanted");
        path.truncate(kept);
        if let Some(bytes) = &mut self.bytes {
            let tables = bytes.tables(&mut self.rig.manager, id);
            bytes.cut(&tables, path, &known);
        }
        let whole = kept.is_multiple_of(SIZE) && kept < known.len();
        if whole {
            let mut table = |group| self.rig.manager.group_table(id, GPU, group).unwrap().1;
            let tables: Vec<_> = (0..self.groups.len()).map(&mut table).collect();
            let has = |at: usize, place: u32| tables[at][place as usize] != NO_SLOT;
            assert!(resumes(&self.groups, u32::try_from(kept / SIZE).unwrap(), has), "{tables:?}");
        }
        self.compare(id, path);
        if self.rig.call(|m, now| m.reserve(id, extra + 1, now)).is_ok() {
            self.end_all_moves();
            self.write(id, path, &tokens(stem + 70, 3)[..=extra]);
        }
    }

    /// Two more leases go on from the same tokens with others.
    fn fork(&mut self, id: LeaseId, path: &[Token], (stem, extra): (u32, usize)) {
        let Ok(forks) = self.rig.call(|m, now| m.fork(id, 2, now)) else { return };
        self.end_all_moves();
        for (at, id) in (0..).zip(forks.iter().copied().chain([id])) {
            let mut path = path.to_vec();
            self.compare(id, &path);
            if self.rig.call(|m, now| m.reserve(id, extra + 1, now)).is_ok() {
                self.end_all_moves();
                self.write(id, &mut path, &tokens(stem + 80 + at, 3)[..=extra]);
            }
        }
        for id in forks {
            self.rig.release(id);
        }
    }

    /// A lease leaves the first tier, and comes back.
    fn suspend(&mut self, id: LeaseId, path: &mut Vec<Token>, extra: usize) {
        self.rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap();
        if extra.is_multiple_of(2) {
            self.end_all_moves();
        }
        if self.rig.call(|m, now| m.resume(id, extra, LoadMode::All, now)).is_err() {
            return;
        }
        let matched = self.rig.manager.lease(id).unwrap().matched() / SIZE;
        self.bind(id, 0, matched, path.len().div_ceil(SIZE));
        self.end_all_moves();
        let full = path.clone();
        path.truncate(self.rig.manager.lease_tokens(id).unwrap());
        self.fill_holes(id, path);
        self.compare(id, path);
        let done = path.len();
        self.write(id, path, &full[done..]);
    }

    /// Writes the KV of more tokens, in every slot that the tables name, and commits them.
    fn write(&mut self, id: LeaseId, path: &mut Vec<Token>, more: &[Token]) {
        let known = path.len();
        if self.engine.is_some() {
            let bound = self.rig.manager.slots(id, GPU).unwrap().1.len();
            self.bind(id, bound, 0, (known + more.len()).div_ceil(SIZE));
            // Refused where the match ends before the blocks that are bound.
            self.rig.call(|m, now| m.store_ahead(id, None, now)).ok();
        }
        path.extend(more);
        let Some(bytes) = &mut self.bytes else {
            self.rig.commit(id, more);
            return;
        };
        let before = bytes.tables(&mut self.rig.manager, id);
        bytes.write(&before, path, known);
        self.rig.commit(id, more);
        let tables = bytes.tables(&mut self.rig.manager, id);
        bytes.write_rest((&before, &tables), path);
        self.compare(id, path);
    }

    /// A lease has what the token after its prompt attends to; its state may have left its block.
    fn can_go_on(&mut self, id: LeaseId, end: usize) {
        let mut table = |group| self.rig.manager.group_table(id, GPU, group).unwrap().1;
        let tables: Vec<_> = (0..self.groups.len()).map(&mut table).collect();
        let state = |at: usize| self.groups[at].kind == GroupKind::State;
        let has = |at: usize, place: u32| state(at) || tables[at][place as usize] != NO_SLOT;
        assert!(resumes(&self.groups, u32::try_from(end).unwrap(), has), "{tables:?}");
    }

    /// What a lease can read is what was computed for its path.
    fn compare(&mut self, id: LeaseId, path: &[Token]) {
        let Some(bytes) = &self.bytes else { return };
        if self.rig.manager.awaits(id).unwrap().is_empty() {
            let tables = bytes.tables(&mut self.rig.manager, id);
            bytes.compare(&tables, path);
        }
    }

    /// The copies of each block of the longest usable prefix.
    fn copies(&self, tokens: &[Token]) -> Vec<Vec<Copy>> {
        let found = self.rig.manager.lookup(tokens, self.rig.now, &Scope::default(), 0).unwrap();
        found.blocks.into_iter().map(|block| block.copies).collect()
    }

    /// A sequence is marked on a tier, or cleared there.
    fn mark(&mut self, (what, stem, shared, more, extra): Step) {
        let tier = stem as usize % self.rig.manager.settings().tiers.len();
        if self.engine.is_some() && tier == GPU {
            return;
        }
        let shared = shared.min(self.last.len() / SIZE);
        let tokens = branch(&self.last, shared, stem + 90, more % 4);
        let present = what == 15;
        let ready = (extra % 3 == 0).then_some(self.rig.now + 700);
        let before = self.copies(&tokens);
        let scope = Scope::default();
        let mark = Mark { tokens: &tokens, scope, tier, present, ready, first: None };
        if self.rig.call(|m, now| m.mark(&mark, now)).is_err() {
            return;
        }
        let found = self.rig.manager.lookup(&tokens, self.rig.now, &Scope::default(), 0).unwrap();
        let found = found.blocks;
        let after: Vec<Vec<Copy>> = found.iter().map(|block| block.copies.clone()).collect();
        for (at, copies) in after.iter().enumerate() {
            let known = before.get(at).map_or(&[][..], |known| known);
            let new = copies.iter().filter(|copy| copy.tier == tier && !known.contains(copy));
            for copy in new.filter(|_| present) {
                let place = (tier, usize::from(copy.group), copy.slot);
                let path = tokens[..(at + 1) * SIZE].to_vec();
                if self.bytes.is_some() {
                    self.unwritten.push((found[at].block, place, path));
                }
            }
            assert!(present || copies.iter().all(|copy| copy.tier != tier), "{copies:?}");
        }
        if present {
            // The end resumes with what this tier alone has.
            let border = u32::try_from(after.len()).unwrap();
            assert_eq!(after.len() * SIZE, tokens.len());
            let has = |at: usize, place: u32| {
                let here = |copy: &Copy| (copy.tier, usize::from(copy.group)) == (tier, at);
                after[place as usize].iter().any(here)
            };
            assert!(resumes(&self.groups, border, has), "{after:?}");
        }
        if self.bytes.is_some() {
            // Moves that began earlier may still read the slots that a mark has taken.
            self.end_all_moves();
            self.write_marked(None);
        }
    }

    /// Writes the bytes of marked blocks, or those that a move reads. Moves that began earlier may
    /// still read such a slot, with the bytes of another block.
    fn write_marked(&mut self, before: Option<&Move>) {
        let Some(bytes) = &mut self.bytes else { return };
        self.unwritten.retain(|&(marked, place, ref path)| {
            let now = before.is_none_or(|known| {
                let from = (known.src, usize::from(known.group), known.src_slot);
                (known.block, from) == (Some(marked), place)
            });
            if now {
                bytes.fill(place, path, path.len() / SIZE - 1);
            }
            !now
        });
    }

    /// A block amid a path is lost on every tier, if nothing uses it.
    fn lose(&mut self, (_, _, shared, more, _): Step) {
        let place = (shared + more) % (self.last.len() / SIZE).max(1);
        let tokens = self.last[..((place + 1) * SIZE).min(self.last.len())].to_vec();
        for tier in 0..self.rig.manager.settings().tiers.len() {
            let (tokens, scope) = (&tokens, Scope::default());
            let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
            self.rig.call(|m, now| m.mark_behind(&mark, place, now)).ok();
        }
    }

    /// A hint about the front of a sequence.
    fn hint(&mut self, (_, stem, shared, more, extra): Step) {
        let tokens = self.last[..shared.min(self.last.len() / SIZE) * SIZE].to_vec();
        let scope = Scope::default();
        let target = Target::Tokens { tokens: tokens.clone(), scope: scope.clone() };
        let tier = stem as usize % self.rig.manager.settings().tiers.len();
        let hint = match more % 5 {
            0 => Hint::Prefetch { target, tier, deadline: None },
            1 => Hint::Demote { target, tier },
            2 => Hint::Release(Release::Tokens { tokens, scope, owner: None }),
            3 => {
                let blocks = Some(extra as u64);
                Hint::Quota { tenant: Vec::new(), tier, blocks, share: None }
            }
            _ => Hint::Retain(retain(target, [0, 50, 100][extra % 3])),
        };
        self.rig.call(|m, now| m.hint(&[hint], now)).ok();
    }

    /// The block events give the copies of each group.
    fn check_events(&mut self) {
        let events = self.rig.call(|m, _| m.take_block_events()).unwrap();
        for event in events {
            let name = (event.block, event.tier, event.group);
            let news = match event.kind {
                BlockEventKind::Stored => self.reported.insert(name),
                BlockEventKind::Removed => self.reported.remove(&name),
            };
            assert!(news, "{event:?}");
        }
        let found = self.rig.manager.lookup(&self.last, self.rig.now, &Scope::default(), 0);
        for block in found.unwrap().blocks {
            let valid = |copy: &&Copy| !copy.leaving && !copy.layers.is_empty();
            let valid = block.copies.iter().filter(valid);
            let valid = valid.map(|copy| (block.block, copy.tier, copy.group));
            let this = (block.block, 0, 0)..(Handle(block.block.0 + 1), 0, 0);
            let known: Vec<_> = self.reported.range(this).copied().collect();
            assert_eq!(valid.collect::<Vec<_>>(), known);
        }
    }

    /// Blocks leave a tier on request, all of them or none. Without a victim that has its last copy
    /// there, blocks after it leave all tiers, this one too.
    fn evict(&mut self, tier: TierId, count: u64) {
        let tier = tier % self.rig.manager.settings().tiers.len();
        if let Ok(left) = self.rig.call(|m, now| m.evict_blocks(tier, count, &[], now)) {
            let gone: BTreeSet<Handle> = left.iter().copied().collect();
            assert!(gone.len() == left.len() && left.len() as u64 >= count);
            let here = self.rig.manager.lookup(&self.last, self.rig.now, &Scope::default(), 0);
            for block in here.unwrap().blocks.iter().filter(|block| gone.contains(&block.block)) {
                let copy = block.copies.iter().find(|copy| (copy.tier, copy.group) == (tier, 0));
                assert!(copy.is_none_or(|copy| copy.leaving), "{copy:?}");
            }
        }
    }

    /// Moves end well until there are none.
    fn end_all_moves(&mut self) {
        for round in 0.. {
            if self.rig.manager.pending().1 == 0 {
                break;
            }
            assert!(round < 1000, "moves never end: {:?}", self.rig.manager.pending());
            // Some wait for copies that are marked for later.
            self.rig.now += 100;
            self.end_moves(0);
        }
    }

    /// The block tables of the leases that are held.
    fn tables(&mut self) -> Vec<(LeaseId, Vec<Vec<Slot>>)> {
        let Self { held, rig, groups, .. } = self;
        let mut table = |id, group| rig.manager.group_table(id, GPU, group).unwrap().1;
        let mut tables = |id| (0..groups.len()).map(|group| table(id, group)).collect();
        held.iter().map(|&(id, _)| (id, tables(id))).collect()
    }

    /// The end of a move changes no lease's slots but those of blocks whose loads have failed.
    fn check_slots(&mut self, before: &[(LeaseId, Vec<Vec<Slot>>)]) {
        let lost = self.rig.call(|m, _| m.failed()).unwrap();
        for ((id, before), (_, now)) in before.iter().zip(&self.tables()) {
            let starts = lost.iter().filter(|row| row.lease == *id).map(|row| row.start);
            let end =
                starts.min().map_or(usize::MAX, |start| usize::try_from(start).unwrap() / SIZE);
            for (before, now) in before.iter().zip(now) {
                let same = before.iter().zip(now).take(end).all(|(before, now)| before == now);
                assert!(same && now.len() >= before.len().min(end), "{before:?} {now:?} {lost:?}");
            }
        }
    }

    /// Moves end, every `each`th of them badly.
    fn end_moves(&mut self, each: usize) {
        let tables = self.tables();
        self.end_moves_handed_out(each);
        self.check_slots(&tables);
    }

    fn end_moves_handed_out(&mut self, each: usize) {
        for (at, known) in self.rig.hand_out().into_iter().enumerate() {
            // One that failed before it may have ended it.
            let ok = each == 0 || at % each > 0;
            self.write_marked(Some(&known));
            if let Some(bytes) = &mut self.bytes {
                bytes.copy(&known, ok);
            }
            if ok {
                let outcome = Outcome::default();
                self.rig.report(&[known.id], &outcome).ok();
            } else {
                self.rig.fail(known.id);
            }
        }
    }

    /// Plays steps, and ends what they have begun.
    pub(crate) fn play(&mut self, steps: &[Step]) {
        for &step in steps {
            self.rig.now += 500;
            match step.0 {
                0..5 => self.ask(step, LoadMode::All),
                5 => self.ask(step, [LoadMode::Plan, LoadMode::None][step.1 as usize % 2]),
                6..9 | 11..14 if !self.held.is_empty() => self.go_on(step),
                14 => self.evict(step.1 as usize, step.3 as u64 - 1),
                15 | 16 => self.mark(step),
                17 => self.hint(step),
                18.. => self.lose(step),
                9 => self.end_moves(step.3 % 4),
                _ if !self.held.is_empty() => {
                    let (id, _) = self.held.remove(0);
                    self.rig.release(id);
                }
                _ => {}
            }
            self.check_events();
        }
        for (id, _) in std::mem::take(&mut self.held) {
            self.rig.release(id);
        }
        self.end_all_moves();
    }
}
