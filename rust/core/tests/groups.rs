//! Models of several groups: what a request finds, what stays resumable, and room in one budget.
//!
//! Every call is followed by an audit, which counts slots, pages, holds and links again from the
//! resume points and the leases. Cost: seconds.
//! One file beyond 600 lines: one story per way in which a point moves.

mod bytes;
mod group_story;
mod rig;

use group_story::{FULL, Step, Story, branch, on};
use kvtrie_core::block::{LeaseId, NO_SLOT, Structure, Token};
use kvtrie_core::cost::Objective;
use kvtrie_core::error::Error;
use kvtrie_core::group::{Group, GroupKind};
use kvtrie_core::hint::{Answer, Hint, Target};
use kvtrie_core::manager::{Acquire, LoadMode, Manager, Mark, MoveKind, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec, Write};
use proptest::prelude::*;
use rig::{DISK, GPU, HOST, Rig, SIZE, all_of, retain, tokens};

/// Two blocks of four tokens.
const WINDOW: Group =
    Group { kind: GroupKind::Sliding { window: 9, sinks: 0 }, slot_bytes: 500, layers: 3 };
const STATE: Group = Group { kind: GroupKind::State, slot_bytes: 700, layers: 2 };

fn of(groups: &[Group], bytes: u64) -> Settings {
    on(groups, &[bytes])
}

fn held(rig: &Rig) -> Vec<(u64, u64)> {
    held_on(rig, GPU)
}

fn held_on(rig: &Rig, tier: usize) -> Vec<(u64, u64)> {
    rig.manager.group_slots(tier).iter().map(|slots| (slots.held, slots.released)).collect()
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
fn a_pass_over_several_blocks_writes_a_state_only_where_it_has_to_end() {
    let owner = Owner::Kvtrie;
    let settings = of(&[FULL, STATE], 100_000);
    let tiers = settings.tiers.iter().map(|tier| TierSpec { owner, ..tier.clone() }).collect();
    let mut rig = Rig::new(Settings { tiers, ..settings });
    let prompt = tokens(1, 6);
    let ask = Acquire { tokens: &prompt, reserve: SIZE, ..Acquire::default() };
    let id = rig.ask(&ask).unwrap();
    let written = |rig: &mut Rig| {
        let table = rig.manager.group_table(id, GPU, 1).unwrap().1;
        let places = table.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT);
        places.map(|(place, _)| place).collect::<Vec<_>>()
    };
    // The end of the prompt, and the block after it.
    rig.call(|m, now| m.reserve(id, 6 * SIZE, now)).unwrap();
    assert_eq!(written(&mut rig), [5, 6]);
    rig.commit(id, &prompt[..2 * SIZE]);
    assert_eq!(written(&mut rig), [5, 6]);
    rig.commit(id, &prompt[2 * SIZE..]);
    assert_eq!(written(&mut rig), [5, 6]);
    // Room for four blocks and a part: the slot is for the last one that becomes full.
    rig.call(|m, now| m.reserve(id, 4 * SIZE + 1, now)).unwrap();
    assert_eq!(written(&mut rig), [5, 9]);
    // A pass that ends earlier does so at the next block.
    rig.commit(id, &tokens(2, 1));
    assert_eq!(written(&mut rig), [7]);
    rig.call(|m, now| m.reserve(id, 3 * SIZE + 1, now)).unwrap();
    rig.commit(id, &tokens(3, 3));
    assert_eq!(written(&mut rig), [9, 10]);
    rig.release(id);
    let path = [prompt, tokens(2, 1), tokens(3, 3)].concat();
    assert_eq!(rig.matched(&[path, tokens(4, 1)].concat()), 10 * SIZE);
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
    // Five pages for 25 blocks of the first group, and two for the window of their end.
    assert_eq!(wanted, 7);
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
fn a_point_goes_down_to_the_disk_and_is_loaded_from_there() {
    for group in [WINDOW, STATE] {
        // Room for one session on the first two tiers each.
        let mut rig = Rig::new(on(&[FULL, group], &[6 * 700, 6 * 700, 100 * 700]));
        for stem in 1..=4 {
            rig.serve(&tokens(stem, 20));
        }
        let needed = if group == WINDOW { 2 } else { 1 };
        assert_eq!(held_on(&rig, GPU)[1].0, needed);
        assert!(held_on(&rig, DISK)[1].0 >= needed, "{:?}", held_on(&rig, DISK));
        for stem in 1..=4 {
            assert_eq!(rig.matched(&tokens(stem, 20)), 20 * SIZE, "session {stem}, {group:?}");
        }
        let next = branch(&tokens(1, 20), 20, 9, 1);
        let id = rig.acquire(&next);
        assert_eq!(rig.manager.lease(id).unwrap().matched(), 20 * SIZE);
        let moves = rig.run();
        let loads = moves.iter().filter(|known| known.kind == MoveKind::Load);
        let loads: Vec<_> = loads.filter(|known| known.group == 1).collect();
        assert_eq!(loads.len() as u64, needed, "{group:?}");
        assert!(loads.iter().all(|known| (known.src, known.dst) == (DISK, GPU)));
        rig.commit(id, &next[20 * SIZE..]);
        rig.release(id);
        assert_eq!(rig.matched(&branch(&next, 21, 4, 1)), 21 * SIZE);
    }
}

#[test]
fn tiers_that_write_through_have_a_point_down_to_the_disk() {
    for group in [WINDOW, STATE] {
        let mut settings = on(&[FULL, group], &[40 * 700, 40 * 700, 40 * 700]);
        (settings.tiers[0].write, settings.tiers[1].write) = (Write::Through, Write::Through);
        let mut rig = Rig::new(settings.clone());
        rig.serve(&tokens(1, 6));
        let needed = if group == WINDOW { 2 } else { 1 };
        for tier in [HOST, DISK] {
            let held: Vec<u64> = held_on(&rig, tier).into_iter().map(|slots| slots.0).collect();
            assert_eq!(held, [6, needed], "tier {tier}");
        }
        // The disk alone is enough to go on after a restart.
        let rows = rig.call(|m, now| m.index(DISK, now)).unwrap();
        let mut again = Rig::new(settings);
        assert_eq!(again.call(|m, now| m.load_index(DISK, &rows, now)).unwrap(), 6);
        assert_eq!(again.matched(&tokens(1, 6)), 6 * SIZE);
        again.serve(&branch(&tokens(1, 6), 6, 2, 1));
    }
}

#[test]
fn a_flush_takes_a_point_one_tier_down_each_time() {
    let mut rig = Rig::new(on(&[FULL, STATE], &[40 * 700, 40 * 700, 40 * 700]));
    rig.serve(&tokens(1, 6));
    for (host, disk) in [(6, 0), (6, 6)] {
        assert_eq!(rig.call(Manager::flush).unwrap(), 7);
        rig.run();
        assert_eq!((held_on(&rig, HOST)[0].0, held_on(&rig, DISK)[0].0), (host, disk));
    }
    assert_eq!(rig.call(Manager::flush).unwrap(), 0);
}

#[test]
fn the_end_of_a_marked_sequence_is_a_resume_point_until_it_is_cleared() {
    for group in [WINDOW, STATE] {
        for tier in [GPU, HOST, DISK] {
            let mut rig = Rig::new(on(&[FULL, group], &[40 * 700; 3]));
            let prompt = tokens(1, 8);
            rig.mark(&prompt, tier);
            let needed = if group == WINDOW { 2 } else { 1 };
            assert_eq!(held_on(&rig, tier), [(8, 0), (needed, 0)]);
            assert_eq!(rig.matched(&branch(&prompt, 8, 2, 1)), 8 * SIZE);
            rig.serve(&branch(&prompt, 8, 2, 1));
            rig.unmark(&branch(&prompt, 8, 2, 1), tier);
            assert_eq!(held_on(&rig, tier), [(0, 0), (0, 0)]);
        }
    }
}

#[test]
fn a_mark_makes_room_or_changes_nothing() {
    for tier in [GPU, HOST] {
        // Ten pages: a state each for two sessions, and five slots of the first group in others.
        let mut rig = Rig::new(on(&[FULL, STATE], &[6 * 700, 6 * 700]));
        for stem in 1..4 {
            rig.mark(&tokens(stem, 20), tier);
            assert_eq!(rig.matched(&tokens(stem, 20)), 20 * SIZE);
            rig.run();
        }
        let (tokens, scope) = (tokens(9, 50), Scope::default());
        let mark = Mark { tokens: &tokens, scope, tier, present: true, ready: None, first: None };
        assert!(rig.call(|m, now| m.mark(&mark, now)).is_err());
    }
}

#[test]
fn a_growth_reserve_is_for_leases_that_run() {
    // Pages of 700 bytes: three for twenty blocks, one for a state, and one in six is kept.
    let mut settings = of(&[FULL, STATE], 6 * 700);
    settings.tiers[0].growth_reserve = 0.2;
    let mut rig = Rig::new(settings);
    let id = rig.acquire(&tokens(1, 20));
    rig.commit(id, &tokens(1, 20));
    assert!(rig.ask(&all_of(&tokens(2, 7))).is_err());
    rig.call(|m, now| m.reserve(id, 7 * SIZE, now)).unwrap();
    rig.release(id);
    rig.serve(&tokens(2, 20));
}

fn hinted(rig: &mut Rig, hint: Hint) -> Answer {
    rig.call(|m, now| m.hint(&[hint], now)).unwrap()[0].answer
}

fn target(tokens: &[Token]) -> Target {
    Target::Tokens { tokens: tokens.to_vec(), scope: Scope::default() }
}

#[test]
fn hints_move_a_point_with_its_blocks() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(on(&[FULL, group], &[40 * 700; 3]));
        let prompt = tokens(1, 6);
        let needed = if group == WINDOW { 2 } else { 1 };
        rig.serve(&prompt);
        let demote = Hint::Demote { target: target(&prompt), tier: DISK };
        assert_eq!(hinted(&mut rig, demote), Answer::Accepted);
        rig.run();
        assert_eq!(held_on(&rig, DISK), [(6, 0), (needed, 0)]);
        assert_eq!((held_on(&rig, GPU)[0].0, held_on(&rig, HOST)[0].0), (0, 0));
        for tier in [HOST, GPU] {
            let fetch = Hint::Prefetch { target: target(&prompt), tier, deadline: None };
            assert_eq!(hinted(&mut rig, fetch), Answer::Accepted);
            rig.run();
            let held: Vec<u64> = held_on(&rig, tier).into_iter().map(|slots| slots.0).collect();
            assert_eq!(held, [6, needed], "tier {tier}");
        }
        let id = rig.acquire(&branch(&prompt, 6, 2, 1));
        assert_eq!(rig.run().len(), 0, "all is there");
        rig.release(id);
    }
}

#[test]
fn the_point_of_the_least_worth_per_byte_leaves_first() {
    // Pages for three of seven blocks and a state, and for one and a state.
    let mut settings = of(&[FULL, STATE], 6 * 700);
    settings.policy = "learned".to_owned();
    settings.cost = settings.cost.with_objective(Objective::Hits);
    let mut rig = Rig::new(settings);
    for (stem, blocks) in [(1, 20), (2, 6), (3, 6)] {
        rig.serve(&tokens(stem, blocks));
    }
    let found = [1, 2].map(|stem| rig.matched(&tokens(stem, 20)));
    assert_eq!(found, [20 * SIZE, 0]);
}

#[test]
fn a_retained_point_stays_while_others_leave() {
    let mut rig = Rig::new(of(&[FULL, STATE], 10 * 700));
    rig.serve(&tokens(1, 14));
    assert_eq!(
        hinted(&mut rig, Hint::Retain(retain(target(&tokens(1, 14)), 90))),
        Answer::Accepted
    );
    for stem in 2..6 {
        rig.serve(&tokens(stem, 14));
    }
    assert_eq!((rig.matched(&tokens(1, 14)), rig.matched(&tokens(3, 14))), (14 * SIZE, 0));
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
    let several = |change: fn(&mut Settings)| {
        let mut several = on(&[FULL, STATE], &[9000, 9000]);
        change(&mut several);
        Manager::new(several).expect_err("refused").to_string()
    };
    let text = several(|settings| settings.tiers[1].layer_slots = true);
    assert!(text.contains("layer_slots"), "{text}");
    let text = several(|settings| settings.tiers[1].kind = Kind::Remote);
    assert!(text.contains("remote"), "{text}");
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
fn a_flush_brings_a_point_below_the_blocks_that_stayed_above() {
    // Room above for the blocks of both prompts, and for one state and a half.
    let mut rig = Rig::new(on(&[FULL, STATE], &[3 * 700, 100 * 700]));
    rig.serve(&tokens(1, 6));
    rig.serve(&tokens(2, 6));
    rig.run();
    let rows = |rig: &mut Rig| rig.call(|m, now| m.index(HOST, now)).unwrap();
    assert!(rows(&mut rig).iter().any(|row| row.group == 1));
    rig.call(Manager::flush).unwrap();
    rig.run();
    let settings = on(&[FULL, STATE], &[100 * 700, 100 * 700]);
    let rows = rows(&mut rig);
    let mut again = Rig::new(settings);
    again.call(|m, now| m.load_index(HOST, &rows, now)).unwrap();
    for stem in [1, 2] {
        assert_eq!(again.matched(&[tokens(stem, 6), vec![99]].concat()), 6 * SIZE);
    }
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

/// Pages of each tier, resume points of a path that stay, and blocks between regular ones.
type Sizes = (u64, Vec<u64>, u32, u32);

/// Sizes of one to three tiers.
fn sizes() -> impl Strategy<Value = Sizes> {
    let every = prop_oneof![4 => Just(0), 1 => 1_u32..4];
    (6_u64..60, prop::collection::vec(4_u64..40, 0..3), 1_u32..4, every)
}

/// Policy, owner of the first tier, its growth reserve, and how each tier writes.
type Ways = (&'static str, Owner, f64, [Write; 3]);

fn ways() -> impl Strategy<Value = Ways> {
    (
        prop::sample::select(kvtrie_core::policy::NAMES),
        prop::sample::select(vec![Owner::Kvtrie, Owner::Nobody, Owner::Engine]),
        prop_oneof![3 => Just(0.0), 1 => Just(0.3)],
        prop::array::uniform3(prop::sample::select(vec![
            Write::Back,
            Write::Through,
            Write::Never,
        ])),
    )
}

fn steps(kinds: u8) -> impl Strategy<Value = Vec<Step>> {
    let step = (0..kinds, 0_u32..4, 0_usize..7, 1_usize..9, 0_usize..9);
    prop::collection::vec(step, 1..60)
}

/// Settings of a story.
fn told(groups: &[Group], (pages, below, newest, every): Sizes, ways: Ways) -> Settings {
    let (policy, owner, growth, writes) = ways;
    let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
    let bytes: Vec<u64> = std::iter::once(pages).chain(below).map(|n| n * largest).collect();
    let mut settings = on(groups, &bytes);
    policy.clone_into(&mut settings.policy);
    settings.block_events = 100_000;
    settings.tiers[0].growth_reserve = growth;
    // Of the number of pages, so that the seeds of earlier failures play what failed.
    settings.tiers[0].free_low = if pages % 3 == 0 { 0.6 } else { 0.0 };
    settings.tiers[0].owner = owner;
    for (tier, write) in settings.tiers.iter_mut().zip(writes) {
        tier.write = write;
    }
    if let Some(groups) = &mut settings.groups {
        (groups.newest, groups.every) = (newest, every);
    }
    settings
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_match_is_what_attention_can_use(
        groups in groups(),
        sizes in sizes(),
        ways in ways(),
        steps in steps(18),
    ) {
        if let Some(mut story) = Story::new(told(&groups, sizes, ways)) {
            story.play(&steps);
        }
    }

    #[test]
    fn a_match_over_holes_is_what_attention_can_use(
        groups in groups(),
        sizes in sizes(),
        ways in ways(),
        steps in steps(22),
    ) {
        let mut settings = told(&groups, sizes, ways);
        settings.structure = Structure::Holes;
        if let Some(mut story) = Story::new(settings) {
            story.play(&steps);
        }
    }
}
