//! Models of several groups: what a request finds, what stays resumable, and room in one budget.
//!
//! Every call is followed by an audit, which counts slots, pages, holds and links again from the
//! resume points and the leases. Cost: seconds.

mod rig;

use kvtrie_core::block::{LeaseId, Token};
use kvtrie_core::error::Error;
use kvtrie_core::group::{Group, GroupKind};
use kvtrie_core::manager::{Acquire, Groups, Manager, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec};
use proptest::prelude::*;
use rig::{Rig, SIZE, settings, tier, tokens};

const FULL: Group = Group { kind: GroupKind::Full, slot_bytes: 100 };
/// Two blocks of four tokens.
const WINDOW: Group = Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700 };

fn of(groups: &[Group], bytes: u64) -> Settings {
    let first = TierSpec { owner: Owner::Nobody, ..tier(Kind::Gpu, 1000) };
    let groups = Groups { groups: groups.to_vec(), bytes, newest: 1, every: 0 };
    Settings { groups: Some(groups), ..settings(vec![first]) }
}

fn held(rig: &Rig) -> Vec<(u64, u64)> {
    rig.manager.group_slots().iter().map(|slots| (slots.held, slots.released)).collect()
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
    let Err(Error::NoSpace { wanted, .. }) = rig.ask(&rig::all_of(&other)) else {
        panic!("there is no room");
    };
    assert_eq!(wanted, 25);
    assert_eq!(rig.matched(&tokens(1, 20)), 20 * SIZE);
    rig.release(id);
    rig.serve(&other);
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
    several.tiers.push(tier(Kind::Host, 9));
    assert!(Manager::new(several).unwrap_err().to_string().contains("several groups on 2 tiers"));
    let mut rig = Rig::new(of(&[FULL, STATE], 9000));
    let id = rig.acquire(&tokens(1, 1));
    rig.refused("fork is not supported for a model with 2 groups", |m, now| m.fork(id, 1, now));
    rig.refused("truncate", |m, now| m.truncate(id, 0, now));
}

/// One to three groups after the first.
fn groups() -> impl Strategy<Value = Vec<Group>> {
    let sliding =
        (1_u64..30, 0_u64..6).prop_map(|(window, sinks)| GroupKind::Sliding { window, sinks });
    let chunked = (1_u64..30).prop_map(|chunk| GroupKind::Chunked { chunk });
    let kind = prop_oneof![3 => sliding, 2 => chunked, 2 => Just(GroupKind::State)];
    let group = (kind, 20_u64..900).prop_map(|(kind, slot_bytes)| Group { kind, slot_bytes });
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_match_is_what_attention_can_use(
        groups in groups(),
        (pages, newest, every) in (6_u64..60, 1_u32..4, prop_oneof![4 => Just(0), 1 => 1_u32..4]),
        policy in prop::sample::select(kvtrie_core::policy::NAMES),
        steps in prop::collection::vec((0_u8..10, 0_u32..4, 0_usize..7, 1_usize..9, 0_usize..9), 1..60),
    ) {
        let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
        let mut settings = of(&groups, pages * largest);
        settings.policy = policy.to_owned();
        if let Some(groups) = &mut settings.groups {
            (groups.newest, groups.every) = (newest, every);
        }
        let Ok(manager) = Manager::new(settings) else { return Ok(()) };
        let mut rig = Rig { manager, now: 1000 };
        let mut held: Vec<(LeaseId, Vec<Token>)> = Vec::new();
        let mut last = tokens(0, 2);
        for (what, stem, shared, more, extra) in steps {
            rig.now += 500;
            match what {
                0..6 => {
                    let shared = shared.min(last.len() / SIZE);
                    let mut prompt = branch(&last, shared, stem + 10, more);
                    prompt.extend(&tokens(77, 1)[..extra % SIZE]);
                    let ask = Acquire { tokens: &prompt, reserve: extra, ..Acquire::default() };
                    let border = rig.matched(&prompt) / SIZE;
                    // From first principles: the longest border that every group can resume at.
                    let map = rig.manager.group_map(&prompt, &Scope::default()).unwrap();
                    let most = map.first().map_or(0, |blocks| u32::try_from(blocks.len()).unwrap());
                    let has = |at: usize, place: u32| map[at][place as usize];
                    let naive = (0..=most).rev().find(|&m| resumes(&groups, m, has)).unwrap();
                    prop_assert_eq!(border, naive as usize);
                    if let Ok(id) = rig.ask(&ask) {
                        prop_assert_eq!(rig.manager.lease(id).unwrap().matched(), border * SIZE);
                        held.push((id, prompt[border * SIZE..].to_vec()));
                        last = prompt;
                    }
                }
                6..9 if !held.is_empty() => {
                    let (id, rest) = held.remove(shared % held.len());
                    let middle = rest.len().min(extra * 2);
                    rig.commit(id, &rest[..middle]);
                    rig.commit(id, &rest[middle..]);
                    let room = rig.manager.room_left(id).unwrap();
                    if what == 7 {
                        rig.commit(id, &tokens(stem + 50, 3)[..room.min(3 * SIZE)]);
                        last.extend(&tokens(stem + 50, 3)[..room.min(3 * SIZE)]);
                    }
                    if what == 8 && rig.call(|m, now| m.reserve(id, extra, now)).is_ok() {
                        let room = rig.manager.room_left(id).unwrap();
                        rig.commit(id, &tokens(stem + 60, 3)[..room.min(extra)]);
                    }
                    rig.release(id);
                }
                _ if !held.is_empty() => {
                    let (id, _) = held.remove(0);
                    rig.release(id);
                }
                _ => {}
            }
        }
        for (id, _) in held {
            rig.release(id);
        }
    }
}
