//! Point 7: completion is the only point at which a copy counts.

use kvtrie_core::block::{Layers, MoveId};
use kvtrie_core::error::Error;
use kvtrie_core::manager::{Action, Failed, MoveKind, Outcome, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, TierSpec, Write};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

fn two(gpu: u32, host: u32) -> Settings {
    settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host)])
}

fn bad() -> Outcome<'static> {
    Outcome { ok: false, error: Some("EIO"), ..Outcome::default() }
}

fn failed(rig: &mut Rig) -> Vec<Failed> {
    rig.call(|manager, _| manager.failed()).unwrap()
}

/// A lease on blocks that all come from the host, and the loads.
fn loading(settings: Settings, prompt: &[u32]) -> (Rig, u64, Vec<MoveId>) {
    let mut rig = Rig::new(settings);
    rig.mark(prompt, HOST);
    let id = rig.acquire(prompt);
    let moves = rig.hand_out().iter().map(|known| known.id).collect();
    (rig, id, moves)
}

#[test]
fn a_copy_counts_when_it_is_reported_and_not_before() {
    let prompt = tokens(1, 1);
    let (mut rig, id, moves) = loading(two(4, 4), &prompt);
    assert_eq!((rig.on(&prompt, GPU), rig.awaits(id)), (vec![Layers::NONE], moves.clone()));
    rig.refused("awaits 1 moves", |manager, now| manager.commit(id, &[], now));
    rig.done(moves[0]);
    assert_eq!((rig.on(&prompt, GPU), rig.awaits(id).len()), (vec![ALL], 0));
    rig.commit(id, &[]);
}

#[test]
fn reporting_twice_changes_nothing() {
    let (mut rig, _, moves) = loading(two(4, 4), &tokens(1, 1));
    assert_eq!(rig.report(&moves, &Outcome::default()).unwrap(), 1);
    let before = rig.manager.snapshot();
    assert_eq!(rig.report(&moves, &Outcome::default()).unwrap(), 0);
    assert_eq!(before, rig.manager.snapshot());
    let (mut rig, _, moves) = loading(two(4, 4), &tokens(1, 1));
    rig.report(&moves, &bad()).unwrap();
    let before = rig.manager.snapshot();
    rig.report(&moves, &bad()).unwrap();
    assert_eq!(before, rig.manager.snapshot());
}

#[test]
fn a_report_that_contradicts_an_earlier_one_is_refused() {
    let (mut rig, _, moves) = loading(two(4, 4), &tokens(1, 2));
    rig.done(moves[0]);
    rig.refused("was reported done before", |m, now| m.complete(&moves[..1], &bad(), now));
    rig.fail(moves[1]);
    rig.refused("was reported failed before", |m, now| {
        m.complete(&moves[1..], &Outcome::default(), now)
    });
}

#[test]
fn reports_about_what_does_not_exist_are_refused_and_none_of_the_batch_counts() {
    let mut rig = Rig::new(two(4, 4));
    rig.mark(&tokens(1, 1), HOST);
    let id = rig.acquire(&tokens(1, 1));
    let known = rig.awaits(id)[0];
    let ok = Outcome::default();
    rig.refused("not handed out yet", |m, now| m.complete(&[known], &ok, now));
    rig.hand_out();
    rig.refused("there is no move 99", |m, now| m.complete(&[known, 99], &ok, now));
    rig.refused("there is no move 0", |m, now| m.complete(&[0], &ok, now));
    let rank = Outcome { rank: 1, ..ok };
    rig.refused("there are 1 ranks", |m, now| m.complete(&[known], &rank, now));
    let layers = Outcome { layers_done: Some(5), ..ok };
    rig.refused("it has 4", |m, now| m.complete(&[known], &layers, now));
    assert_eq!(rig.awaits(id), [known]);
}

#[test]
fn layers_count_one_by_one_so_that_layer_0_is_usable_early() {
    let prompt = tokens(1, 1);
    let (mut rig, id, moves) = loading(two(4, 4), &prompt);
    for (done, ended) in [(1, 0), (3, 0), (2, 0), (4, 1)] {
        let outcome = Outcome { layers_done: Some(done), ..Outcome::default() };
        assert_eq!(rig.report(&moves, &outcome).unwrap(), ended);
        let most = if done == 2 { 3 } else { done };
        assert_eq!(rig.on(&prompt, GPU), [Layers::new(0, most)], "progress never goes back");
        assert_eq!(rig.awaits(id).is_empty(), done == 4);
    }
}

#[test]
fn a_layer_counts_when_it_is_there_on_every_rank() {
    let prompt = tokens(1, 1);
    let (mut rig, _, moves) = loading(Settings { ranks: 2, ..two(4, 4) }, &prompt);
    let part = |rank, done| Outcome { rank, layers_done: Some(done), ..Outcome::default() };
    rig.report(&moves, &part(0, 3)).unwrap();
    assert_eq!(rig.on(&prompt, GPU), [Layers::NONE]);
    rig.report(&moves, &part(1, 2)).unwrap();
    assert_eq!(rig.on(&prompt, GPU), [Layers::new(0, 2)]);
}

#[test]
fn an_arriving_block_is_found_with_its_ready_time_and_is_no_victim() {
    let prompt = tokens(1, 2);
    let (mut rig, id, _) = loading(two(2, 4), &prompt);
    rig.release(id);
    let found = rig.manager.lookup(&prompt, rig.now, &Scope::default(), 0).unwrap();
    let copy = found.blocks[0].copies[0];
    assert_eq!((copy.tier, copy.layers, copy.coming), (GPU, Layers::NONE, ALL));
    assert!(copy.first < copy.ready && copy.ready > rig.now);
    let error = rig.ask(&all_of(&tokens(2, 1))).unwrap_err();
    assert!(matches!(error, Error::NoSpace { free: 0, coming: 2, leased: 0, .. }), "{error}");
}

#[test]
fn after_a_failed_load_a_leaf_only_lease_ends_before_the_block() {
    let prompt = tokens(1, 4);
    let (mut rig, id, moves) = loading(two(8, 8), &prompt);
    let handle = rig.blocks(&prompt)[1];
    rig.done(moves[0]);
    rig.fail(moves[1]);
    let wanted =
        Failed { lease: id, block: Some(handle), start: 4, stop: 16, reason: "EIO".into() };
    assert_eq!(failed(&mut rig), [wanted]);
    assert_eq!(failed(&mut rig), [], "each failure is told once");
    // Room for what is to be computed now is there, and the rest still arrives for others.
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), SIZE);
    assert_eq!(rig.manager.room_left(id).unwrap(), 3 * SIZE);
    rig.done(moves[2]);
    rig.done(moves[3]);
    assert!(rig.awaits(id).is_empty());
    rig.commit(id, &prompt[SIZE..]);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 4]);
    rig.release(id);
}

#[test]
fn after_a_failed_load_a_hole_tolerant_lease_computes_the_block_in_its_place() {
    let prompt = tokens(1, 3);
    let tiers = vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)];
    let (mut rig, id, moves) = loading(holes(tiers), &prompt);
    rig.fail(moves[1]);
    let told: Vec<_> = failed(&mut rig).iter().map(|f| (f.lease, f.start, f.stop)).collect();
    assert_eq!(told, [(id, 4, 8)]);
    let lease = rig.manager.lease(id).unwrap();
    assert_eq!(lease.recompute().collect::<Vec<_>>(), [(1, ALL)]);
    let plan = lease.plan().spans.iter().map(|s| (s.start, s.stop, s.action));
    let wanted = [(0, 1, Action::Load), (1, 2, Action::Recompute), (2, 3, Action::Load)];
    assert_eq!(plan.collect::<Vec<_>>(), wanted);
    rig.done(moves[0]);
    rig.done(moves[2]);
    rig.commit(id, &[]);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
}

#[test]
fn a_source_that_could_not_be_read_is_not_found_again() {
    let prompt = tokens(1, 2);
    let (mut rig, id, moves) = loading(two(8, 8), &prompt);
    rig.done(moves[0]);
    rig.fail(moves[1]);
    assert_eq!(rig.matched(&prompt), SIZE);
    rig.release(id);
    assert_eq!(rig.matched(&prompt), SIZE);
    assert_eq!(rig.manager.stats(GPU).failed, 1);
}

#[test]
fn a_failed_load_gives_its_slot_back() {
    let prompt = tokens(1, 2);
    let (mut rig, id, moves) = loading(two(2, 8), &prompt);
    rig.release(id);
    rig.fail(moves[0]);
    rig.fail(moves[1]);
    assert_eq!(rig.manager.occupancy(GPU).free, 2);
}

#[test]
fn a_failed_store_leaves_the_victim_where_it_was_and_the_lease_gets_other_room() {
    let mut rig = Rig::new(two(3, 4));
    let (first, second, new) = (tokens(1, 1), tokens(2, 2), tokens(3, 1));
    rig.serve(&first);
    rig.serve(&second);
    let id = rig.acquire(&new);
    let store = rig.hand_out();
    assert_eq!((store.len(), rig.on(&first, GPU)), (1, vec![Layers::NONE]));
    rig.fail(store[0].id);
    assert_eq!((rig.on(&first, GPU), rig.on(&first, HOST)), (vec![ALL], vec![Layers::NONE]));
    // The tail of the second prompt leaves instead, and the lease waits for that store.
    let instead = rig.hand_out();
    assert_eq!(
        instead.iter().map(|m| (m.kind, m.src)).collect::<Vec<_>>(),
        [(MoveKind::Store, GPU)]
    );
    assert_eq!(rig.slots(id), [instead[0].src_slot]);
    assert_ne!(instead[0].src_slot, store[0].src_slot);
    rig.done(instead[0].id);
    rig.commit(id, &new);
    assert_eq!((rig.matched(&first), rig.matched(&second)), (SIZE, 2 * SIZE));
}

#[test]
fn a_block_that_could_not_be_written_is_dropped_the_next_time() {
    let mut rig = Rig::new(two(2, 4));
    let old = tokens(1, 1);
    rig.serve(&old);
    rig.serve(&tokens(2, 1));
    let id = rig.acquire(&tokens(3, 1));
    let store = rig.hand_out()[0].id;
    rig.fail(store);
    rig.run();
    rig.release(id);
    for stem in 4..6 {
        rig.serve(&tokens(stem, 1));
    }
    assert_eq!((rig.matched(&old), rig.manager.stats(GPU).dropped), (0, 1));
}

#[test]
fn without_other_room_the_holder_keeps_the_slot_and_the_victim_is_lost() {
    let mut rig = Rig::new(two(1, 4));
    let (old, new) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&old);
    let id = rig.acquire(&new);
    let store = rig.hand_out()[0].clone();
    rig.fail(store.id);
    assert_eq!((rig.matched(&old), rig.slots(id)), (0, vec![store.src_slot]));
    assert!(rig.awaits(id).is_empty());
    rig.commit(id, &new);
}

#[test]
fn a_failed_copy_ahead_of_need_leaves_the_block_resident() {
    let gpu = TierSpec { write: Write::Through, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
    let prompt = tokens(1, 1);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    rig.release(id);
    let store = rig.hand_out()[0].id;
    rig.fail(store);
    assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST)), (vec![ALL], vec![Layers::NONE]));
    assert_eq!(rig.manager.occupancy(HOST).free, 4);
    assert_eq!(failed(&mut rig).len(), 1);
}

#[test]
fn the_slots_of_a_hung_move_stay_out_of_use_until_it_ends() {
    let prompt = tokens(1, 1);
    let (mut rig, id, moves) = loading(two(2, 4), &prompt);
    let hung = Outcome { hung: true, ..bad() };
    rig.report(&moves, &hung).unwrap();
    assert_eq!(failed(&mut rig).len(), 1, "the lease is replanned at once");
    rig.release(id);
    assert_eq!(rig.manager.occupancy(GPU).free, 1);
    let error = rig.ask(&all_of(&tokens(2, 2))).unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    rig.report(&moves, &hung).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 1, "it still runs");
    // Even if it went well after all: nobody waits for it any more.
    rig.report(&moves, &Outcome::default()).unwrap();
    assert_eq!((rig.manager.occupancy(GPU).free, rig.on(&prompt, GPU).len()), (2, 0));
    rig.acquire(&tokens(2, 2));
}

#[test]
fn a_hung_store_keeps_the_slot_that_it_reads() {
    let mut rig = Rig::new(two(2, 4));
    let (old, other) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&old);
    rig.serve(&other);
    let id = rig.acquire(&tokens(3, 1));
    let store = rig.hand_out()[0].clone();
    let hung = Outcome { hung: true, ..bad() };
    rig.report(&[store.id], &hung).unwrap();
    // The block is back, but busy: the other one has to make room.
    assert_eq!(rig.on(&old, GPU), [ALL]);
    let instead = rig.hand_out();
    assert_ne!(instead[0].src_slot, store.src_slot);
    rig.done(instead[0].id);
    rig.release(id);
    assert_eq!(rig.manager.occupancy(HOST).free, 2, "the hung store's slot is not given out");
    rig.report(&[store.id], &bad()).unwrap();
    assert_eq!(rig.manager.occupancy(HOST).free, 3);
}

#[test]
fn what_waits_for_a_failed_move_fails_with_it() {
    let tiers = vec![tier(Kind::Gpu, 1), tier(Kind::Host, 1), tier(Kind::Disk, 4)];
    let mut rig = Rig::new(settings(tiers));
    let prompts = [1, 2, 3].map(|stem| tokens(stem, 1));
    rig.serve(&prompts[0]);
    rig.serve(&prompts[1]);
    let id = rig.acquire(&prompts[2]);
    let moves = rig.hand_out();
    assert_eq!(moves[1].after, moves[0].id);
    rig.fail(moves[0].id);
    assert!(rig.awaits(id).is_empty(), "nothing is left to wait for");
    assert_eq!(rig.on(&prompts[0], HOST), [ALL], "the host's victim stays");
    assert_eq!(rig.on(&prompts[0], DISK), [Layers::NONE]);
    let told = failed(&mut rig);
    assert!(
        told.iter().any(|row| row.reason.contains(&format!("move {}", moves[0].id))),
        "{told:?}"
    );
    rig.commit(id, &prompts[2]);
    rig.release(id);
}
