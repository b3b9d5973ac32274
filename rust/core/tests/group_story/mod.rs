//! A story: random requests, marks and hints to a manager of a model with several groups.
//!
//! Every match is compared with attention's own answer, every byte that a lease can read with what was
//! computed for its path, and the copies with those that the block events report. Invariant: the model
//! knows nothing of windows beyond attention. Cost: O(everything) per step.

#![allow(dead_code, reason = "each test binary uses a part")]

mod copies;
pub(crate) mod drawn;
mod lease;
pub(crate) mod shared;

use std::collections::BTreeSet;

use kvtrie_core::{
    Acquire, Answer, Asked, Group, GroupKind, Groups, Handle, Hint, Kind, LeaseId, LoadMode,
    Manager, MissCause, Move, NO_SLOT, Outcome, Owner, Release, Scope, Settings, Slot, Target,
    TierId, TierSpec, Token,
};

use crate::bytes::Bytes;
use crate::rig::{GPU, Rig, SIZE, retain, settings, tier, tokens};
use shared::SharedStores;

/// Group of a story that keeps all tokens.
pub(crate) const FULL: Group = Group { kind: GroupKind::Full, slot_bytes: 100, layers: 4 };
/// Settings for these groups on one to four tiers of this number of bytes.
pub(crate) fn on(groups: &[Group], bytes: &[u64]) -> Settings {
    let spec = |kind| TierSpec { owner: Owner::Nobody, ..tier(kind, 1000) };
    let slots = vec![groups.iter().map(|group| group.slot_bytes).collect(); bytes.len()];
    let tiers = [Kind::Gpu, Kind::Host, Kind::Disk, Kind::Remote]
        .into_iter()
        .take(bytes.len())
        .map(spec)
        .collect();
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
            !attends(group, query, past) || has(at, u32::try_from(past / SIZE as u64).unwrap())
        })
    })
}

/// Whether a token after `query` tokens attends to the past one with this number.
fn attends(group: &Group, query: u64, past: u64) -> bool {
    match group.kind {
        GroupKind::Full => true,
        GroupKind::Sliding { window, sinks } => query - past < window || past < sinks,
        GroupKind::Chunked { chunk } => query / chunk == past / chunk,
        GroupKind::State => past + 1 == query,
    }
}

/// Whether a request can go on after `border` blocks: it computes those that the first group lacks,
/// token by token, and then its own first token. A state is never rolled back.
fn reaches(groups: &[Group], border: u32, has: impl Fn(usize, u32) -> bool) -> bool {
    let holes: BTreeSet<u32> = (0..border).filter(|&place| !has(0, place)).collect();
    let present = |at: usize, place: u32| holes.contains(&place) || has(at, place);
    let states = groups.iter().any(|group| group.kind == GroupKind::State);
    let end = u64::from(border) * SIZE as u64;
    let computed =
        (0..end).filter(|token| holes.contains(&u32::try_from(token / SIZE as u64).unwrap()));
    let last = border.checked_sub(1).is_none_or(|last| !holes.contains(&last));
    last && (holes.is_empty() || !states)
        && computed.chain([end]).all(|query| sees(groups, query, present))
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
    /// The stores to a shared tier.
    stores: SharedStores,
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
        let stores = SharedStores::default();
        Some(Self { rig, groups, held, last, bytes, unwritten, engine, reported, computed, stores })
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
        // An engine loads after its own hit; here it has none, and two calls load all.
        for blocks in [0..matched / 2, matched / 2..matched] {
            if self.engine.is_some() && load == LoadMode::None {
                self.rig.call(|m, now| m.load(id, None, Some(blocks), now)).unwrap();
            }
        }
        let Self { rig, groups, held, last, engine, .. } = self;
        let all = load == LoadMode::All || (load == LoadMode::None && engine.is_some());
        assert!(matched == border || (!all && matched < border));
        // Each group has a slot on the first tier for all that the first token attends to.
        let mut table = |group| rig.manager.group_table(id, GPU, group).unwrap().1;
        let tables: Vec<_> = (0..groups.len()).map(&mut table).collect();
        let has = |at: usize, place: u32| tables[at][place as usize] != NO_SLOT;
        assert!(resumes(groups, u32::try_from(matched).unwrap(), has));
        held.push((id, prompt.clone()));
        *last = prompt;
        self.check_holes(id);
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
            self.end_stores(0);
        }
    }

    /// Moves end, every `each`th of them badly.
    fn end_moves(&mut self, each: usize) {
        let tables = self.tables();
        self.end_moves_handed_out(each);
        self.check_slots(&tables);
    }

    fn end_moves_handed_out(&mut self, each: usize) {
        for (at, known) in self.hand_out().into_iter().enumerate() {
            if self.waits(&known) {
                continue;
            }
            self.end_move(&known, each == 0 || at % each > 0);
        }
    }

    /// One move ends, well or not.
    fn end_move(&mut self, known: &Move, ok: bool) {
        self.write_marked(Some(known));
        self.copy(known, ok);
        if ok {
            // One that failed before it may have ended it.
            self.rig.report(&[known.id], &Outcome::default()).ok();
        } else {
            self.rig.fail(known.id);
            self.stores.failed.insert(known.id);
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
                14 if step.4 % 2 == 1 => self.evict_parts(step),
                14 => self.evict(step.1 as usize, step.3 as u64 - 1),
                15 | 16 => self.mark(step),
                17 => self.hint(step),
                18.. => self.lose(step),
                9 => {
                    self.end_moves(step.3 % 4);
                    self.end_stores(step.3 % 4);
                    self.stores.workers = step.4;
                }
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
        self.end_all_stores();
    }
}
