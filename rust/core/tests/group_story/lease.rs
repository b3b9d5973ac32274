//! Leases of a story: they compute holes and the rest of a prompt, go back, fork, leave and end.

use std::collections::BTreeSet;

use kvtrie_core::{Action, GroupKind, Kind, LeaseId, LoadMode, NO_SLOT, Slot, Token};

use crate::group_story::{Step, Story, attends, resumes};
use crate::rig::{GPU, SIZE, tokens};

impl Story {
    /// Places on the path of a lease that the plan has it compute.
    fn holes(&self, id: LeaseId) -> BTreeSet<u32> {
        let spans = self.rig.manager.lease(id).unwrap().plan().spans.iter();
        let holes = spans.filter(|span| span.action == Action::Recompute);
        holes.flat_map(|span| span.start..span.stop).collect()
    }

    /// A lease has what the first token of each hole attends to, and slots of its own in holes.
    pub(super) fn check_holes(&mut self, id: LeaseId) {
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
    pub(super) fn fill_holes(&mut self, id: LeaseId, path: &[Token]) {
        let holes = self.holes(id);
        let Some(bytes) = self.bytes.as_mut().filter(|_| self.engine.is_none()) else { return };
        let tables = bytes.tables(&mut self.rig.manager, id);
        for place in holes.into_iter().map(|place| place as usize) {
            for (group, table) in tables.iter().enumerate().filter(|(_, t)| t[place] != NO_SLOT) {
                bytes.fill((GPU, group, table[place]), path, place);
            }
        }
    }

    /// An engine names slots of all groups: for what the match needs, and for blocks from `first` to
    /// before `end`.
    pub(super) fn bind(&mut self, id: LeaseId, first: usize, matched: usize, end: usize) {
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
    pub(super) fn go_on(&mut self, (what, stem, shared, _, extra): Step) {
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
        if path.len() == prompt.len()
            && middle == 0
            && self.bytes.is_some()
            && self.engine.is_none()
        {
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
        let below = self.rig.manager.settings().tiers.get(1).map_or(Kind::Host, |tier| tier.kind);
        self.rig.call(|m, now| m.suspend(id, below, now)).unwrap();
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
            // Only what is filled now is written before its moves are carried out. Refused where the match
            // ends before the blocks that are bound.
            let filled = known / SIZE..(known + more.len()) / SIZE;
            self.rig.call(|m, now| m.store_ahead(id, Some(filled), now)).ok();
        }
        path.extend(more);
        self.learn(path);
        let Some(bytes) = &mut self.bytes else {
            self.rig.commit(id, more);
            return;
        };
        let before = bytes.tables(&mut self.rig.manager, id);
        bytes.write(&before, path, known);
        self.rig.commit(id, more);
        let tables = bytes.tables(&mut self.rig.manager, id);
        bytes.write_rest((&before, &tables), path);
        self.take_back(&before, path.len());
        self.compare(id, path);
    }

    /// An engine gives the slots that no token after `known` tokens attends to away, once the stores that
    /// read them have ended.
    fn take_back(&mut self, tables: &[Vec<Slot>], known: usize) {
        if self.engine.is_none() {
            return;
        }
        self.end_all_moves();
        let passed: Vec<_> = self.passed(known).collect();
        let bytes = self.bytes.as_mut().expect("an engine has bytes");
        for (group, at) in passed {
            if tables[group][at] != NO_SLOT {
                bytes.lose(GPU, group, tables[group][at]);
            }
        }
    }

    /// Groups and places of the full blocks to which no token after `known` tokens attends.
    fn passed(&self, known: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let blocks = move |number| (0..known / SIZE).map(move |at| (number, at));
        let all = (1..self.groups.len()).flat_map(blocks);
        all.filter(move |&(number, at)| {
            let mut tokens = (at * SIZE) as u64..((at + 1) * SIZE) as u64;
            !tokens.any(|past| attends(&self.groups[number], known as u64, past))
        })
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
    pub(super) fn compare(&mut self, id: LeaseId, path: &[Token]) {
        let Some(bytes) = &self.bytes else { return };
        if self.rig.manager.awaits(id).unwrap().is_empty() {
            let mut tables = bytes.tables(&mut self.rig.manager, id);
            // An engine has given these slots away.
            let passed: Vec<_> = self.passed(path.len()).collect();
            for (group, at) in passed.into_iter().filter(|_| self.engine.is_some()) {
                tables[group][at] = NO_SLOT;
            }
            bytes.compare(&tables, path);
        }
    }

    /// The block tables of the leases that are held.
    pub(super) fn tables(&mut self) -> Vec<(LeaseId, Vec<Vec<Slot>>)> {
        let Self { held, rig, groups, .. } = self;
        let mut table = |id, group| rig.manager.group_table(id, GPU, group).unwrap().1;
        let mut tables = |id| (0..groups.len()).map(|group| table(id, group)).collect();
        held.iter().map(|&(id, _)| (id, tables(id))).collect()
    }

    /// The end of a move changes no lease's slots but those of blocks whose loads have failed. A lease
    /// that goes on at an earlier border has slots for what that needs, where it had none.
    pub(super) fn check_slots(&mut self, before: &[(LeaseId, Vec<Vec<Slot>>)]) {
        let lost = self.rig.call(|m, _| m.failed()).unwrap();
        for ((id, before), (_, now)) in before.iter().zip(&self.tables()) {
            let starts = lost.iter().filter(|row| row.lease == *id).map(|row| row.start);
            let end =
                starts.min().map_or(usize::MAX, |start| usize::try_from(start).unwrap() / SIZE);
            for (before, now) in before.iter().zip(now) {
                let same = before
                    .iter()
                    .zip(now)
                    .take(end)
                    .all(|(before, now)| [now, &NO_SLOT].contains(&before));
                assert!(same && now.len() >= before.len().min(end), "{before:?} {now:?} {lost:?}");
            }
        }
    }
}
