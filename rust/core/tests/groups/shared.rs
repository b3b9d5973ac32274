//! Resume points above a tier that machines share: stored a part at a time, dropped, marked and lost.

use kvtrie_core::{
    Acquire, Answer, Group, Hint, Kind, LoadMode, Manager, Move, MoveId, MoveKind, Outcome,
    Settings, TierId, Write,
};

use super::{STATE, WINDOW, held_on, hinted, target};
use crate::group_story::shared::above_shared;
use crate::group_story::{FULL, branch, on};
use crate::rig::{GPU, HOST, Rig, SIZE, tokens};

/// The tier below host memory.
const STORE: TierId = 2;

/// Settings with `pages` pages on each tier, all of which write through.
fn through(group: Group, pages: [u64; 3]) -> Settings {
    let mut settings = above_shared(on(&[FULL, group], &pages.map(|count| count * 700)));
    (settings.tiers[0].write, settings.tiers[1].write) = (Write::Through, Write::Through);
    settings
}

/// The moves that begin while workers ask for stores of this number of blocks; all others end.
fn run(rig: &mut Rig, shared: usize) -> Vec<Move> {
    let mut stores = Vec::new();
    let mut asked = shared;
    loop {
        let give = |known: &Move, lease| Move { lease, ..known.clone() };
        let moves = rig.call(|m, _| m.hand_out(usize::MAX, asked, give)).unwrap();
        asked = 0;
        if moves.is_empty() {
            return stores;
        }
        for known in moves {
            if known.kind == MoveKind::Store && known.dst == STORE {
                stores.push(known);
            } else {
                rig.done(known.id);
            }
        }
    }
}

/// The moves that begin while no worker asks for stores.
fn hand_out(rig: &mut Rig) -> Vec<Move> {
    let give = |known: &Move, lease| Move { lease, ..known.clone() };
    rig.call(|m, _| m.hand_out(usize::MAX, 0, give)).unwrap()
}

/// Computes a prompt while no worker asks for stores.
fn serve(rig: &mut Rig, prompt: &[u32]) {
    let id = rig.acquire(prompt);
    run(rig, 0);
    let held = rig.manager.lease_tokens(id).unwrap();
    rig.commit(id, &prompt[held..]);
    rig.release(id);
    assert!(run(rig, 0).is_empty(), "none was asked for");
    rig.now += 1000;
}

fn needed(group: Group) -> u64 {
    if group == WINDOW { 2 } else { 1 }
}

#[test]
fn a_point_is_on_the_shared_tier_once_all_its_parts_are_asked_for() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(through(group, [40; 3]));
        let prompt = tokens(1, 6);
        serve(&mut rig, &prompt);
        // One point, and its six blocks.
        assert_eq!(rig.manager.shared_stores(), (7, 0));
        let mut groups = Vec::new();
        for _ in 0..6 + needed(group) {
            let stores = run(&mut rig, 1);
            let [store] = &stores[..] else { panic!("one was asked for: {stores:?}") };
            groups.push(store.group);
            rig.done(store.id);
        }
        let parts = usize::try_from(needed(group)).unwrap();
        assert_eq!(groups, [vec![1; parts], vec![0; 6]].concat());
        assert_eq!(held_on(&rig, STORE), [(6, 0), (needed(group), 0)]);
        assert_eq!((rig.manager.shared_stores(), run(&mut rig, 1).len()), ((0, 0), 0));
        // It alone is enough for another machine.
        let rows = rig.call(|m, now| m.index(STORE, now)).unwrap();
        let mut other = Rig::new(through(group, [40; 3]));
        other.call(|m, now| m.load_index(STORE, &rows, now)).unwrap();
        let next = branch(&prompt, 6, 2, 1);
        assert_eq!(other.matched(&next), 6 * SIZE);
        let id = other.acquire(&next);
        let moves = other.run();
        let of = |number| moves.iter().filter(|m| (m.src, m.group) == (STORE, number)).count();
        assert_eq!((of(0), of(1)), (6, parts));
        other.commit(id, &next[6 * SIZE..]);
        other.release(id);
    }
}

#[test]
fn eviction_drops_the_store_of_a_point_that_waits() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(through(group, [12, 12, 100]));
        for stem in 1..=6 {
            serve(&mut rig, &tokens(stem, 10));
        }
        let (waiting, dropped) = rig.manager.shared_stores();
        assert!(waiting > 0 && dropped >= 10 + needed(group), "{waiting} {dropped}");
        rig.run();
        assert_eq!(rig.manager.shared_stores().0, 0);
        let held = held_on(&rig, STORE);
        assert!(held[0].0 < 60 && held[1].0 >= needed(group), "{held:?}");
    }
}

/// Whether a move writes the slot that a store reads, or waits for the store.
fn reads(known: &Move, store: &Move) -> bool {
    let same = (store.src, store.group, store.src_slot) == (known.dst, known.group, known.dst_slot);
    same || store.id == known.after
}

#[test]
fn no_slot_that_a_store_to_the_shared_tier_reads_gets_another_holder() {
    for (group, released) in [(WINDOW, false), (WINDOW, true), (STATE, false), (STATE, true)] {
        let mut rig = Rig::new(through(group, [12, 12, 100]));
        serve(&mut rig, &tokens(1, 10));
        let stores = run(&mut rig, usize::try_from(needed(group)).unwrap());
        assert!(stores.iter().all(|store| store.group == 1), "{stores:?}");
        // The point of the next turn replaces the one whose parts are read.
        let next = branch(&tokens(1, 10), 10, 20, 2);
        let prompts = (2..=8).map(|stem| tokens(stem, 10));
        for prompt in released.then_some(next).into_iter().chain(prompts) {
            let id = rig.acquire(&prompt);
            for known in hand_out(&mut rig) {
                assert!(!stores.iter().any(|store| reads(&known, store)), "{known:?}");
                rig.done(known.id);
            }
            run(&mut rig, 0);
            assert_eq!(rig.awaits(id), Vec::<MoveId>::new());
            let held = rig.manager.lease_tokens(id).unwrap();
            rig.commit(id, &prompt[held..]);
            rig.release(id);
            for known in hand_out(&mut rig) {
                assert!(!stores.iter().any(|store| reads(&known, store)), "{known:?}");
                rig.done(known.id);
            }
            run(&mut rig, 0);
            rig.now += 1000;
        }
        for store in stores {
            rig.done(store.id);
        }
        // Free to leave again.
        serve(&mut rig, &tokens(9, 10));
        assert_eq!(rig.matched(&tokens(9, 10)), 10 * SIZE);
    }
}

#[test]
fn a_part_that_cannot_be_stored_makes_no_point() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(through(group, [40; 3]));
        serve(&mut rig, &tokens(1, 6));
        let store = run(&mut rig, 1).remove(0);
        assert_eq!(store.group, 1);
        let outcome = Outcome { ok: false, error: Some("full"), ..Outcome::default() };
        rig.report(&[store.id], &outcome).unwrap();
        rig.run();
        let held = held_on(&rig, STORE)[1];
        assert_eq!(held.0, 0, "{group:?}");
    }
}

#[test]
fn points_that_the_shared_tier_has_leave_host_first() {
    // Room on host for two sessions and their states.
    let mut rig = Rig::new(through(STATE, [5, 6, 100]));
    serve(&mut rig, &tokens(1, 10));
    serve(&mut rig, &tokens(2, 10));
    rig.mark(&tokens(2, 10), STORE);
    serve(&mut rig, &tokens(3, 10));
    assert_eq!(rig.manager.shared_stores().1, 0, "nothing is lost");
    for stem in 1..=3 {
        assert_eq!(rig.matched(&tokens(stem, 10)), 10 * SIZE, "session {stem}");
    }
    let on_host = |stem| rig.on(&tokens(stem, 10), HOST).iter().filter(|l| !l.is_empty()).count();
    assert_eq!((on_host(1), on_host(3)), (10, 10));
}

#[test]
fn a_demoted_point_leaves_once_the_shared_tier_has_it() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(above_shared(on(&[FULL, group], &[40 * 700; 3])));
        let prompt = tokens(1, 6);
        rig.mark(&prompt, HOST);
        let demote = Hint::Demote { target: target(&prompt), tier: STORE };
        assert_eq!(hinted(&mut rig, demote), Answer::Accepted);
        assert_eq!(held_on(&rig, HOST), [(6, 0), (needed(group), 0)]);
        rig.run();
        assert_eq!(held_on(&rig, STORE), [(6, 0), (needed(group), 0)]);
        assert_eq!((held_on(&rig, HOST)[0].0, held_on(&rig, HOST)[1].0), (0, 0));
        let fetch = Hint::Prefetch { target: target(&prompt), tier: HOST, deadline: None };
        assert_eq!(hinted(&mut rig, fetch), Answer::Accepted);
        rig.run();
        assert_eq!(held_on(&rig, HOST), [(6, 0), (needed(group), 0)]);
    }
}

#[test]
fn a_flush_stores_points_with_their_blocks_on_the_shared_tier() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(above_shared(on(&[FULL, group], &[40 * 700; 3])));
        rig.serve(&tokens(1, 6));
        for flushes in [6 + needed(group), 7, 0] {
            assert_eq!(rig.call(Manager::flush).unwrap(), flushes, "{group:?}");
            rig.run();
        }
        assert_eq!(held_on(&rig, STORE), [(6, 0), (needed(group), 0)]);
    }
}

#[test]
fn a_border_is_found_once_each_group_is_marked() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(above_shared(on(&[FULL, group], &[40 * 700; 3])));
        let prompt = tokens(1, 8);
        let next = branch(&prompt, 8, 2, 1);
        rig.mark_group(&prompt, (STORE, 0), (true, 0));
        assert_eq!(rig.matched(&next), 0, "{group:?}");
        let skip = 8 - usize::try_from(needed(group)).unwrap();
        rig.mark_group(&prompt, (STORE, 1), (true, skip));
        assert_eq!(rig.matched(&next), 8 * SIZE);
        assert_eq!(held_on(&rig, STORE), [(8, 0), (needed(group), 0)]);
        // The store has lost one value: a miss.
        rig.mark_group(&prompt, (STORE, 1), (false, 7));
        assert!(rig.matched(&next) < 8 * SIZE);
        assert_eq!(held_on(&rig, STORE)[1].0, 0);
        rig.refused("to be cached", |m, now| {
            let (tokens, scope) = (&tokens(5, 3)[..], kvtrie_core::Scope::default());
            let (tier, present, ready, first) = (STORE, true, None, None);
            let mark = kvtrie_core::Mark { tokens, scope, tier, present, ready, first };
            m.mark_group(&mark, 1, 0, now)
        });
    }
}

#[test]
fn a_window_that_the_store_has_lost_is_computed_with_its_blocks() {
    for group in [WINDOW, STATE] {
        let mut rig = Rig::new(above_shared(on(&[FULL, group], &[40 * 700; 3])));
        let prompt = tokens(1, 8);
        rig.mark(&prompt, STORE);
        let next = branch(&prompt, 8, 2, 1);
        let ask = Acquire { tokens: &next, load: LoadMode::All, ..Acquire::default() };
        let id = rig.ask(&ask).unwrap();
        for known in rig.hand_out() {
            match (known.src, known.group) {
                (STORE, 1) => rig.fail(known.id),
                _ => rig.done(known.id),
            }
        }
        rig.run();
        let kept = rig.manager.lease_tokens(id).unwrap();
        assert!(kept < 8 * SIZE, "{group:?} {kept}");
        rig.commit(id, &next[kept..]);
        rig.release(id);
        assert_eq!(
            (rig.matched(&branch(&next, 9, 3, 1)), held_on(&rig, GPU)[1].0),
            (9 * SIZE, needed(group))
        );
    }
}

#[test]
fn a_lease_suspended_above_a_shared_tier_keeps_its_point_there() {
    let mut rig = Rig::new(above_shared(on(&[FULL, STATE], &[40 * 700; 2])));
    let prompt = tokens(1, 4);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    rig.call(|m, now| m.suspend(id, Kind::Remote, now)).unwrap();
    rig.run();
    assert_eq!(held_on(&rig, 1), [(4, 0), (1, 0)]);
    rig.call(|m, now| m.resume(id, 0, LoadMode::All, now)).unwrap();
    assert_eq!(rig.manager.lease(id).unwrap().matched(), 4 * SIZE);
    rig.run();
    rig.release(id);
}
