//! Resume points on several tiers: stored, loaded, flushed, marked and brought back by an index.

use kvtrie_core::{
    Acquire, Answer, Group, Hint, Kind, LoadMode, Manager, MoveKind, NO_SLOT, Owner, Write,
};
use proptest::prelude::*;

use super::stories::{groups, ways};
use super::{STATE, WINDOW, held_on, hinted, target};
use crate::group_story::{FULL, branch, on};
use crate::rig::{DISK, GPU, HOST, Rig, SIZE, share, tokens};

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
        let resident = table[..20].iter().filter(|&&slot| slot != NO_SLOT).count();
        // The prompt's last block is still to be written.
        assert_eq!((resident as u64, table[20] != NO_SLOT), (needed, true));
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
    // A load waits for the stores that still read its page.
    while let moves = rig.hand_out()
        && !moves.is_empty()
    {
        for known in moves {
            match (known.kind, known.group) {
                (MoveKind::Load, 1) => rig.fail(known.id),
                _ => rig.done(known.id),
            }
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
fn a_block_linked_again_by_its_child_below_leaves_the_trie() {
    let pages = |number: u64| number * FULL.slot_bytes;
    let window = Group { slot_bytes: FULL.slot_bytes, ..WINDOW };
    for (gpu, host) in (4..14).flat_map(|gpu| (3..9).map(move |host| (gpu, host))) {
        let mut settings = on(&[FULL, window], &[pages(gpu), pages(host)]);
        "lru".clone_into(&mut settings.policy);
        settings.tiers[0].owner = Owner::Kvtrie;
        let mut rig = Rig::new(settings);
        for stem in 1..8 {
            rig.serve(&tokens(stem, 2));
            assert_eq!(rig.matched(&branch(&tokens(stem, 2), 2, 9, 1)), 2 * SIZE);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(share(4000)))]

    #[test]
    fn requests_that_fill_small_tiers_end_in_resume_points(
        groups in groups(),
        pages in prop::collection::vec(3_u64..14, 2..4),
        (policy, owner, growth, writes) in ways(),
        prompts in prop::collection::vec((0_u32..3, 0_usize..5, 1_usize..5), 2..16),
    ) {
        let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
        let bytes: Vec<u64> = pages.iter().map(|pages| pages * largest).collect();
        let mut settings = on(&groups, &bytes);
        policy.clone_into(&mut settings.policy);
        settings.tiers[0].growth_reserve = growth;
        // An engine binds slots of its own.
        if owner != Owner::Engine {
            settings.tiers[0].owner = owner;
        }
        for (tier, write) in settings.tiers.iter_mut().zip(writes) {
            tier.write = write;
        }
        let Ok(manager) = Manager::new(settings) else { return Ok(()) };
        let mut rig = Rig { manager, now: 1000 };
        for (stem, shared, more) in prompts {
            let prompt = branch(&tokens(stem, shared), shared, stem + 10, more);
            if rig.try_serve(&prompt) {
                prop_assert_eq!(rig.matched(&branch(&prompt, shared + more, 9, 1)), prompt.len());
            }
        }
    }
}
