//! Models of several groups: what a request finds, what stays resumable, and room in one budget.
//!
//! Every call is followed by an audit, which counts slots, pages, holds and links again from the
//! resume points and the leases. Cost: seconds.
//! One file beyond 600 lines: all cases share the twin that recomputes a match from attention.

mod bytes;
mod rig;

use bytes::Bytes;
use kvtrie_core::block::{LeaseId, NO_SLOT, Token};
use kvtrie_core::error::Error;
use kvtrie_core::group::{Group, GroupKind};
use kvtrie_core::manager::{Acquire, Groups, LoadMode, Manager, MoveKind, Outcome, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec, Write};
use proptest::prelude::*;
use rig::{GPU, HOST, Rig, SIZE, all_of, settings, tier, tokens};

const FULL: Group = Group { kind: GroupKind::Full, slot_bytes: 100, layers: 4 };
/// Two blocks of four tokens.
const WINDOW: Group =
    Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500, layers: 3 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700, layers: 2 };

fn of(groups: &[Group], bytes: u64) -> Settings {
    on(groups, &[bytes])
}

/// The same on one tier or two.
fn on(groups: &[Group], bytes: &[u64]) -> Settings {
    let spec = |kind| TierSpec { owner: Owner::Nobody, ..tier(kind, 1000) };
    let slots = vec![groups.iter().map(|group| group.slot_bytes).collect(); bytes.len()];
    let tiers = [Kind::Gpu, Kind::Host].into_iter().take(bytes.len()).map(spec).collect();
    let (groups, bytes) = (groups.to_vec(), bytes.to_vec());
    let groups = Groups { groups, bytes, slots, newest: 1, every: 0 };
    Settings { groups: Some(groups), ..settings(tiers) }
}

fn held(rig: &Rig) -> Vec<(u64, u64)> {
    held_on(rig, GPU)
}

fn held_on(rig: &Rig, tier: usize) -> Vec<(u64, u64)> {
    rig.manager.group_slots(tier).iter().map(|slots| (slots.held, slots.released)).collect()
}

/// A prompt whose tokens equal those of another up to `shared` blocks.
fn branch(of: &[Token], shared: usize, stem: u32, blocks: usize) -> Vec<Token> {
    [&of[..shared * SIZE], &tokens(stem, blocks)].concat()
}

#[test]
fn the_next_turn_resumes_at_the_end_of_the_prompt() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(of(&[FULL, group], 100_000));
        let prompt = tokens(1, 6);
        rig.serve(&prompt);
        let next = branch(&prompt, 6, 2, 3);
        assert_eq!(rig.matched(&next), 6 * SIZE);
        rig.serve(&next);
        // The newer point of the path replaces the older one.
        let needed = if group == WINDOW { 2 } else { 1 };
        assert_eq!(held(&rig)[1].0, needed);
        assert_eq!(rig.matched(&branch(&next, 9, 3, 1)), 9 * SIZE);
    }
}

#[test]
fn a_prompt_that_diverges_finds_its_windows_while_room_is_free() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    assert_eq!(held(&rig), [(6, 0), (2, 4)]);
    assert_eq!(rig.matched(&branch(&prompt, 3, 2, 3)), 3 * SIZE);
    // States are there only where a pass ended.
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    rig.serve(&prompt);
    assert_eq!(rig.matched(&branch(&prompt, 3, 2, 3)), 0);
}

#[test]
fn a_branch_is_resumable_from_its_second_occurrence_on() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    let prompt = tokens(1, 6);
    rig.serve(&prompt);
    let second = branch(&prompt, 3, 2, 3);
    let id = rig.acquire(&second);
    let borders: Vec<u32> = rig.manager.resume_borders(id).unwrap();
    assert_eq!((rig.manager.lease(id).unwrap().matched(), borders), (0, vec![3, 6]));
    rig.commit(id, &second);
    rig.release(id);
    assert_eq!(rig.matched(&branch(&prompt, 3, 3, 3)), 3 * SIZE);
    // The branch stays while its paths go on, and so do both ends.
    assert_eq!(held(&rig)[1], (3, 0));
    rig.serve(&branch(&second, 6, 4, 2));
    assert_eq!(held(&rig)[1], (3, 1));
}

#[test]
fn an_answer_ends_in_a_resume_point() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(of(&[FULL, group], 100_000));
        let prompt = tokens(1, 5);
        let ask = Acquire { tokens: &prompt, reserve: 5 * SIZE + 2, ..Acquire::default() };
        let id = rig.ask(&ask).unwrap();
        rig.commit(id, &prompt);
        let answer = tokens(2, 6);
        for token in &answer[..=5 * SIZE] {
            rig.commit(id, std::slice::from_ref(token));
        }
        rig.release(id);
        let path = [&prompt[..], &answer].concat();
        assert_eq!(rig.matched(&path), 10 * SIZE, "{group:?}");
        assert_eq!(held(&rig)[1].0, if group == WINDOW { 2 } else { 1 });
    }
}

#[test]
fn a_long_pass_needs_a_window_and_its_points_alone() {
    // Pages of 500 bytes: 40 for 200 blocks of the first group, and 4.
    let mut rig = Rig::new(of(&[FULL, WINDOW], 44 * 500));
    rig.serve(&tokens(1, 200));
    assert_eq!(held(&rig)[1], (2, 2));
    assert_eq!(rig.matched(&tokens(1, 201)), 200 * SIZE);
    // A second one takes their room.
    rig.serve(&tokens(2, 200));
    assert_eq!(rig.matched(&tokens(2, 201)), 200 * SIZE);
}

#[test]
fn a_request_without_room_is_refused_and_changes_nothing() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 10 * 500));
    let id = rig.acquire(&tokens(1, 20));
    rig.commit(id, &tokens(1, 20));
    let other = tokens(2, 25);
    let Err(Error::NoSpace { wanted, .. }) = rig.ask(&all_of(&other)) else {
        panic!("there is no room");
    };
    assert_eq!(wanted, 25);
    assert_eq!(rig.matched(&tokens(1, 20)), 20 * SIZE);
    rig.release(id);
    rig.serve(&other);
}

#[test]
fn a_point_that_leaves_the_first_tier_is_loaded_for_its_next_turn() {
    for group in [WINDOW, STATE] {
        // Room for one session of twenty blocks and its point, and a large tier below.
        let mut rig = Rig::new(on(&[FULL, group], &[6 * 700, 100 * 700]));
        let first = tokens(1, 20);
        rig.serve(&first);
        rig.serve(&tokens(2, 20));
        let needed = if group == WINDOW { 2 } else { 1 };
        assert_eq!(held_on(&rig, HOST)[1], (needed, 0));
        assert_eq!(rig.matched(&first), 20 * SIZE);
        let next = branch(&first, 20, 3, 1);
        let id = rig.acquire(&next);
        let lease = rig.manager.lease(id).unwrap();
        assert_eq!(lease.matched(), 20 * SIZE);
        let moves = rig.run();
        let loads = moves.iter().filter(|known| known.kind == MoveKind::Load && known.group == 1);
        assert_eq!(loads.count() as u64, needed, "{group:?}");
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        let there = table[..20].iter().filter(|&&slot| slot != NO_SLOT).count();
        // The prompt's last block is still to be written.
        assert_eq!((there as u64, table[20] != NO_SLOT), (needed, true));
        rig.commit(id, &next[20 * SIZE..]);
        rig.release(id);
        assert_eq!(rig.matched(&branch(&next, 21, 4, 1)), 21 * SIZE);
    }
}

#[test]
fn without_room_below_a_point_is_dropped() {
    let mut settings = on(&[FULL, STATE], &[6 * 700, 2 * 700]);
    settings.tiers[0].write = Write::Never;
    let mut rig = Rig::new(settings);
    rig.serve(&tokens(1, 20));
    rig.serve(&tokens(2, 20));
    assert_eq!((rig.matched(&tokens(1, 20)), held_on(&rig, HOST)[1]), (0, (0, 0)));
    // One page for the state, and one for seven of twenty blocks: the others leave.
    let mut rig = Rig::new(on(&[FULL, STATE], &[6 * 700, 2 * 700]));
    rig.serve(&tokens(1, 20));
    rig.serve(&tokens(2, 20));
    assert_eq!(rig.matched(&tokens(2, 20)), 20 * SIZE);
}

#[test]
fn a_window_that_cannot_be_loaded_ends_the_match_at_the_point_before() {
    let mut rig = Rig::new(on(&[FULL, STATE], &[6 * 700, 100 * 700]));
    let first = tokens(1, 10);
    let id = rig.acquire(&first[..4 * SIZE]);
    rig.commit(id, &first[..4 * SIZE]);
    rig.release(id);
    rig.serve(&branch(&first, 4, 9, 1));
    rig.serve(&first);
    rig.serve(&tokens(2, 35));
    assert_eq!(rig.matched(&first), 10 * SIZE);
    let id = rig.acquire(&branch(&first, 10, 3, 1));
    for known in rig.hand_out() {
        match (known.kind, known.group) {
            (MoveKind::Load, 1) => rig.fail(known.id),
            _ => rig.done(known.id),
        }
    }
    let failed = rig.call(|m, _| m.failed()).unwrap();
    let matched = rig.manager.lease(id).unwrap().matched();
    assert!(matched < 10 * SIZE, "{matched}");
    assert_eq!((failed[0].lease, failed[0].start), (id, matched as u64));
    // Its bytes cannot be read: it is no point any more.
    assert!(rig.matched(&first) < 10 * SIZE);
    let next = branch(&first, 10, 3, 1);
    rig.run();
    rig.commit(id, &next[matched..]);
    rig.release(id);
    assert_eq!(rig.matched(&branch(&next, 11, 4, 1)), 11 * SIZE);
}

#[test]
fn a_plan_computes_from_a_near_border_where_loads_take_longer() {
    let mut settings = on(&[FULL, STATE], &[6 * 700, 100 * 700]);
    settings.tiers[1].read.latency_ns = 1_000_000_000;
    let mut rig = Rig::new(settings);
    let first = tokens(1, 20);
    rig.serve(&first);
    rig.serve(&tokens(2, 20));
    let ask = |load| Acquire { tokens: &first, load, ..Acquire::default() };
    for (load, matched) in [(LoadMode::Plan, 0), (LoadMode::None, 0), (LoadMode::All, 20)] {
        let id = rig.ask(&ask(load)).unwrap();
        assert_eq!(rig.manager.lease(id).unwrap().matched(), matched * SIZE);
        rig.release(id);
    }
}

#[test]
fn bad_groups_are_config_errors() {
    let no =
        |groups: &[Group], bytes| Manager::new(of(groups, bytes)).expect_err("refused").to_string();
    assert!(no(&[FULL], 9000).contains("1 groups, the first of kind Some(Full): 2 to 64 wanted"));
    assert!(no(&[STATE, FULL], 9000).contains("the first of kind Some(State)"));
    assert!(no(&[FULL, STATE], 1399).contains("1399 bytes are 1 pages of 700: 2 are wanted"));
    let empty = Group { kind: GroupKind::Sliding { window: 0, sinks: 0 }, ..WINDOW };
    assert!(no(&[FULL, empty], 9000).contains("window above 0"));
    let mut several = of(&[FULL, STATE], 9000);
    several.tiers[0].free_low = 0.5;
    assert!(Manager::new(several).unwrap_err().to_string().contains("several groups on 1 tiers"));
}

/// Two tiers, the first of an engine that numbers its slots.
fn engine(group: Group) -> Rig {
    let mut settings = on(&[FULL, group], &[100 * 700, 100 * 700]);
    settings.tiers[0].owner = Owner::Engine;
    Rig::new(settings)
}

/// Binds slots from `slot` on to the blocks of a lease from `first` to before `end`, in both groups.
fn bind(rig: &mut Rig, id: LeaseId, (first, end): (usize, usize), slot: u32) {
    let count = u32::try_from(end - first).unwrap();
    let slots: Vec<u32> = (slot..slot + count).collect();
    rig.call(|m, _| m.bind_group(id, first, &slots, 0)).unwrap();
    let slots: Vec<u32> = (slot + count..slot + 2 * count).collect();
    rig.call(|m, _| m.bind_group(id, first, &slots, 1)).unwrap();
}

#[test]
fn windows_in_an_engines_slots_are_stored_at_their_border_and_loaded_for_the_next_turn() {
    for (group, needed) in [(WINDOW, 2_u32), (STATE, 1)] {
        let mut rig = engine(group);
        let prompt = tokens(1, 6);
        let id = rig.acquire(&prompt);
        bind(&mut rig, id, (0, 6), 10);
        rig.commit(id, &prompt);
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        // What no token attends to any more is the engine's again.
        assert_eq!(table.iter().filter(|&&slot| slot != NO_SLOT).count(), needed as usize);
        rig.release(id);
        let stores = rig.run();
        assert_eq!(stores.iter().filter(|known| known.group == 1).count(), needed as usize);
        assert!(stores.iter().all(|known| known.group == 0 || known.src_slot >= 16));
        assert_eq!(rig.matched(&prompt), 6 * SIZE);
        let next = branch(&prompt, 6, 2, 1);
        let id = rig.acquire(&next);
        assert_eq!(rig.manager.lease(id).unwrap().matched(), 6 * SIZE);
        assert_eq!(rig.hand_out().len(), 0, "the engine has named no slot");
        bind(&mut rig, id, (0, 7), 40);
        let loads = rig.run();
        let slots = loads.iter().filter(|known| known.group == 1).map(|known| known.dst_slot);
        assert_eq!(slots.collect::<Vec<_>>(), (53 - needed..53).collect::<Vec<_>>());
        rig.commit(id, &next[6 * SIZE..]);
        rig.release(id);
    }
}

#[test]
fn a_slot_of_an_engine_is_of_one_group_at_a_time() {
    let mut rig = engine(WINDOW);
    let id = rig.acquire(&tokens(1, 3));
    rig.call(|m, _| m.bind(id, 0, &[1, 2, 3])).unwrap();
    rig.refused("slot 2 is bound in group 0, not 1", |m, _| m.bind_group(id, 0, &[9, 2], 1));
    rig.call(|m, _| m.bind_group(id, 0, &[9], 1)).unwrap();
    rig.refused("slot 9 is bound in group 1, not 0", |m, _| m.bind(id, 3, &[9]));
    rig.refused("bound to slot 9 in group 1, not 8", |m, _| m.bind_group(id, 0, &[8], 1));
    rig.refused("there is no group 2, the manager keeps 2 apart", |m, _| {
        m.bind_group(id, 0, &[8], 2)
    });
    rig.refused("truncate of lease", |m, now| m.truncate(id, 0, now));
    rig.release(id);
    let id = rig.acquire(&tokens(2, 1));
    rig.call(|m, _| m.bind(id, 0, &[9])).unwrap();
    rig.release(id);
}

#[test]
fn a_tier_that_writes_through_has_a_point_below_as_soon_as_it_is_made() {
    for group in [WINDOW, STATE] {
        let mut settings = on(&[FULL, group], &[100 * 700, 100 * 700]);
        settings.tiers[0].write = Write::Through;
        let mut rig = Rig::new(settings);
        let prompt = tokens(1, 6);
        rig.serve(&prompt);
        let needed = if group == WINDOW { 2 } else { 1 };
        assert_eq!(held_on(&rig, HOST), [(6, 0), (needed, 0)]);
        assert_eq!(held_on(&rig, GPU)[1].0, needed);
    }
}

#[test]
fn an_index_brings_points_back_whole() {
    for group in [WINDOW, STATE] {
        let settings = || on(&[FULL, group], &[100 * 700, 100 * 700]);
        let mut rig = Rig::new(settings());
        let prompt = tokens(1, 6);
        rig.serve(&prompt);
        rig.serve(&branch(&prompt, 6, 2, 2));
        rig.call(Manager::flush).unwrap();
        rig.run();
        let rows = rig.call(|m, now| m.index(HOST, now)).unwrap();
        let end = branch(&prompt, 6, 2, 2);
        let mut again = Rig::new(settings());
        assert_eq!(again.call(|m, now| m.load_index(HOST, &rows, now)).unwrap(), 8);
        assert_eq!((again.matched(&end), held_on(&again, HOST)), (8 * SIZE, held_on(&rig, HOST)));
        assert_eq!(again.call(|m, now| m.load_index(HOST, &rows, now)).unwrap(), 0);
        again.serve(&end);
        // Without one of its rows a point is not there.
        let lost = rows.iter().rposition(|row| row.group == 1).unwrap();
        let mut rows = rows.clone();
        rows.remove(lost);
        let mut again = Rig::new(settings());
        again.call(|m, now| m.load_index(HOST, &rows, now)).unwrap();
        assert!(again.matched(&end) < 8 * SIZE);
    }
}

#[test]
fn a_flush_copies_points_with_their_blocks() {
    let mut rig = Rig::new(on(&[FULL, STATE], &[100 * 700, 100 * 700]));
    rig.serve(&tokens(1, 6));
    assert_eq!(rig.call(Manager::flush).unwrap(), 7);
    rig.run();
    assert_eq!(held_on(&rig, HOST), [(6, 0), (1, 0)]);
    assert_eq!(rig.call(Manager::flush).unwrap(), 0);
}

#[test]
fn a_truncated_lease_goes_back_to_a_border_at_which_all_groups_resume() {
    for (groups, kept) in [(&[FULL, WINDOW][..], 6 * SIZE), (&[FULL, STATE], 4 * SIZE)] {
        let mut rig = Rig::new(of(groups, 100_000));
        let prompt = tokens(1, 8);
        rig.serve(&prompt[..4 * SIZE]);
        let id = rig.acquire(&prompt);
        rig.commit(id, &prompt[4 * SIZE..]);
        rig.call(|m, now| m.truncate(id, 6 * SIZE + 3, now)).unwrap();
        assert_eq!(rig.manager.lease_tokens(id).unwrap(), kept);
        rig.call(|m, now| m.reserve(id, SIZE, now)).unwrap();
        rig.commit(id, &tokens(2, 1));
        rig.release(id);
        let other = [&prompt[..kept], &tokens(2, 1)].concat();
        assert_eq!(rig.matched(&other), other.len());
    }
}

#[test]
fn a_suspended_lease_leaves_its_point_on_the_tier_below() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(on(&[FULL, group], &[10 * 700, 10 * 700]));
        let prompt = tokens(1, 10);
        let id = rig.acquire(&prompt);
        rig.commit(id, &prompt);
        rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap();
        rig.run();
        assert_eq!(held_on(&rig, GPU)[0].0, 0);
        rig.call(|m, now| m.resume(id, 0, LoadMode::All, now)).unwrap();
        assert_eq!(rig.manager.lease(id).unwrap().matched(), 10 * SIZE);
        rig.run();
        rig.release(id);
    }
}

#[test]
fn victims_on_request_leave_with_their_points() {
    let mut rig = Rig::new(of(&[FULL, STATE], 100_000));
    rig.serve(&tokens(1, 4));
    rig.serve(&tokens(2, 4));
    let stay = rig.blocks(&tokens(2, 4));
    let evict = |count| {
        let stay = stay.clone();
        move |m: &mut Manager, now| m.evict_blocks(GPU, count, &stay[3..], now)
    };
    assert!(rig.call(evict(5)).is_err());
    assert_eq!(rig.call(evict(4)).unwrap().len(), 4);
    assert_eq!((rig.matched(&tokens(1, 4)), rig.matched(&tokens(2, 4))), (0, 4 * SIZE));
}

/// One to three groups after the first.
fn groups() -> impl Strategy<Value = Vec<Group>> {
    let sliding =
        (1_u64..30, 0_u64..6).prop_map(|(window, sinks)| GroupKind::Sliding { window, sinks });
    let chunked = (1_u64..30).prop_map(|chunk| GroupKind::Chunked { chunk });
    let kind = prop_oneof![3 => sliding, 2 => chunked, 2 => Just(GroupKind::State)];
    let group =
        (kind, 20_u64..900).prop_map(|(kind, slot_bytes)| Group { kind, slot_bytes, layers: 2 });
    prop::collection::vec(group, 1..4).prop_map(|rest| [vec![FULL], rest].concat())
}

/// Whether a query after `border` blocks can be computed, by what it attends to.
fn resumes(groups: &[Group], border: u32, has: impl Fn(usize, u32) -> bool) -> bool {
    let size = SIZE as u64;
    let query = u64::from(border) * size;
    groups.iter().enumerate().all(|(at, group)| {
        let mut past = 0..query;
        past.all(|past| {
            let attends = match group.kind {
                GroupKind::Full => true,
                GroupKind::Sliding { window, sinks } => query - past < window || past < sinks,
                GroupKind::Chunked { chunk } => query / chunk == past / chunk,
                GroupKind::State => past + 1 == query,
            };
            !attends || has(at, u32::try_from(past / size).unwrap())
        })
    })
}

/// A step of a random story: what, and four numbers.
type Step = (u8, u32, usize, usize, usize);

/// A manager with requests that are held.
struct Story {
    rig: Rig,
    groups: Vec<Group>,
    held: Vec<(LeaseId, Vec<Token>)>,
    last: Vec<Token>,
    /// The bytes, if there are any.
    bytes: Option<Bytes>,
    /// The next slot of an engine, if one owns the first tier.
    engine: Option<u32>,
}

impl Story {
    /// A request, whose match is compared with attention's.
    fn ask(&mut self, (_, stem, shared, more, extra): Step, load: LoadMode) {
        let Self { rig, groups, last, .. } = self;
        let shared = shared.min(last.len() / SIZE);
        let mut prompt = branch(last, shared, stem + 10, more);
        prompt.extend(&tokens(77, 1)[..extra % SIZE]);
        let ask = Acquire { tokens: &prompt, reserve: extra, load, ..Acquire::default() };
        let border = rig.matched(&prompt) / SIZE;
        // From first principles: the longest border that every group can resume at.
        let map = rig.manager.group_map(&prompt, &Scope::default()).unwrap();
        let most = map.first().map_or(0, |blocks| u32::try_from(blocks.len()).unwrap());
        let has = |at: usize, place: u32| map[at][place as usize];
        let naive = (0..=most).rev().find(|&m| resumes(groups, m, has)).unwrap();
        assert_eq!(border, naive as usize);
        let Ok(id) = rig.ask(&ask) else { return };
        let matched = rig.manager.lease(id).unwrap().matched() / SIZE;
        assert!(resumes(groups, u32::try_from(matched).unwrap(), has));
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
        self.compare(id, &path);
        let rest = &prompt[path.len()..];
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

    /// Blocks leave the first tier on request, all of them or none.
    fn evict(&mut self, count: u64) {
        if let Ok(left) = self.rig.call(|m, now| m.evict_blocks(GPU, count, &[], now)) {
            assert_eq!(left.len() as u64, count);
        }
    }

    /// Moves end well until there are none.
    fn end_all_moves(&mut self) {
        while self.rig.manager.pending().1 > 0 {
            self.end_moves(0);
        }
    }

    /// Moves end, every `each`th of them badly.
    fn end_moves(&mut self, each: usize) {
        for (at, known) in self.rig.hand_out().into_iter().enumerate() {
            // One that failed before it may have ended it.
            let ok = each == 0 || at % each > 0;
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

    fn play(&mut self, steps: Vec<Step>) {
        for step in steps {
            self.rig.now += 500;
            match step.0 {
                0..5 => self.ask(step, LoadMode::All),
                5 => self.ask(step, [LoadMode::Plan, LoadMode::None][step.1 as usize % 2]),
                6..9 | 11..14 if !self.held.is_empty() => self.go_on(step),
                14 => self.evict(step.3 as u64 - 1),
                9 => self.end_moves(step.3 % 4),
                _ if !self.held.is_empty() => {
                    let (id, _) = self.held.remove(0);
                    self.rig.release(id);
                }
                _ => {}
            }
        }
        for (id, _) in std::mem::take(&mut self.held) {
            self.rig.release(id);
        }
        self.end_all_moves();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_match_is_what_attention_can_use(
        groups in groups(),
        (pages, below, newest, every) in
            (6_u64..60, prop::option::of(4_u64..40), 1_u32..4, prop_oneof![4 => Just(0), 1 => 1_u32..4]),
        (policy, owner, write) in (
            prop::sample::select(kvtrie_core::policy::NAMES),
            prop::sample::select(vec![Owner::Kvtrie, Owner::Nobody, Owner::Engine]),
            prop::sample::select(vec![Write::Back, Write::Through, Write::Never]),
        ),
        steps in prop::collection::vec((0_u8..15, 0_u32..4, 0_usize..7, 1_usize..9, 0_usize..9), 1..60),
    ) {
        let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
        let bytes: Vec<u64> = std::iter::once(pages).chain(below).map(|n| n * largest).collect();
        let mut settings = on(&groups, &bytes);
        settings.policy = policy.to_owned();
        (settings.tiers[0].owner, settings.tiers[0].write) = (owner, write);
        if let Some(groups) = &mut settings.groups {
            (groups.newest, groups.every) = (newest, every);
        }
        let Ok(manager) = Manager::new(settings) else { return Ok(()) };
        let rig = Rig { manager, now: 1000 };
        let engine = (owner == Owner::Engine).then_some(0);
        let bytes = (owner != Owner::Nobody).then(|| Bytes::new(&groups, engine.is_some()));
        let (held, last) = (Vec::new(), tokens(0, 2));
        Story { rig, groups, held, last, bytes, engine }.play(steps);
    }
}
