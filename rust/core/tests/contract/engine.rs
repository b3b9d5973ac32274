//! Point 1, an engine's slots: after a failed move and after a release.

use kvtrie_core::{
    Acquire, Action, Kind, LoadMode, Move, MoveId, MoveKind, Outcome, Owner, Settings, Slot,
    TierSpec, Write,
};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

const TABLE: [Slot; 4] = [70, 71, 72, 73];

const EIO: Outcome<'static> =
    Outcome { ok: false, layers_done: None, rank: 0, hung: false, cancelled: false, error: None };

fn tiers(write: Write) -> Vec<TierSpec> {
    let gpu = TierSpec { owner: Owner::Engine, write, ..tier(Kind::Gpu, 8) };
    vec![gpu, tier(Kind::Host, 8)]
}

fn bind(rig: &mut Rig, id: u64, slots: &[Slot]) {
    rig.call(|manager, _| manager.bind(id, 0, slots)).unwrap();
}

/// A lease on four blocks that all come from the host into the engine's table.
fn loading(settings: Settings) -> (Rig, u64, Vec<u32>, Vec<Move>) {
    let mut rig = Rig::new(settings);
    let prompt = tokens(1, TABLE.len());
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    bind(&mut rig, id, &TABLE);
    let moves = rig.hand_out();
    (rig, id, prompt, moves)
}

/// Computes the rest of the prompt, releases, and returns the slots that stores read.
fn finish(rig: &mut Rig, id: u64, prompt: &[u32]) -> Vec<Slot> {
    let held = rig.manager.lease_tokens(id).unwrap();
    rig.commit(id, &prompt[held..]);
    rig.release(id);
    let stores = rig.run();
    assert!(stores.iter().all(|m| (m.kind, m.src, m.dst) == (MoveKind::Store, GPU, HOST)));
    stores.iter().map(|m| m.src_slot).collect()
}

#[test]
fn a_lost_block_of_a_leaf_only_lease_is_computed_in_its_bound_slot() {
    for lost in 0..TABLE.len() {
        let (mut rig, id, prompt, moves) = loading(settings(tiers(Write::Back)));
        let table = [70, 71, 72, 73, 74];
        bind(&mut rig, id, &table);
        for (at, known) in moves.iter().enumerate() {
            if at == lost { rig.fail(known.id) } else { rig.done(known.id) }
        }
        assert_eq!(rig.manager.lease_tokens(id).unwrap(), lost * SIZE);
        assert_eq!(rig.slots(id), table);
        bind(&mut rig, id, &table);
        rig.refused("bound to slot 73, not 9", |m, _| m.bind(id, 3, &[9]));
        rig.commit(id, &prompt[lost * SIZE..]);
        assert_eq!(rig.slots(id), table);
        let stored = finish(&mut rig, id, &prompt);
        assert!(stored.contains(&TABLE[lost]));
        assert_eq!(rig.on(&prompt, HOST), [ALL; 4]);
    }
}

#[test]
fn a_lease_waits_for_loads_that_still_write_the_slots_of_lost_blocks() {
    let (mut rig, id, prompt, moves) = loading(settings(tiers(Write::Back)));
    rig.fail(moves[0].id);
    assert_eq!(rig.awaits(id), [moves[1].id, moves[2].id, moves[3].id]);
    rig.refused("awaits 3 moves", |manager, now| manager.commit(id, &prompt, now));
    rig.fail(moves[2].id);
    rig.done(moves[1].id);
    rig.done(moves[3].id);
    assert_eq!(rig.slots(id), TABLE);
    assert_eq!(finish(&mut rig, id, &prompt)[0], 70);
}

#[test]
fn a_hung_load_and_one_that_failed_on_another_rank_still_write_their_slot() {
    let hung = Outcome { hung: true, ..EIO };
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        let (mut rig, id, prompt, moves) = loading(base(tiers(Write::Back)));
        let ids: Vec<MoveId> = moves.iter().map(|known| known.id).collect();
        rig.report(&ids[..3], &Outcome::default()).unwrap();
        rig.report(&ids[3..], &hung).unwrap();
        assert_eq!(rig.call(|manager, _| manager.failed()).unwrap().len(), 1);
        assert_eq!(rig.awaits(id), ids[3..], "it may write slot 73 at any time");
        rig.refused("awaits 1 moves", |manager, now| manager.commit(id, &[], now));
        rig.fail(ids[3]);
        assert!(rig.awaits(id).is_empty());
        assert_eq!(finish(&mut rig, id, &prompt), [73]);

        let (mut rig, id, _, moves) = loading(Settings { ranks: 2, ..base(tiers(Write::Back)) });
        rig.report(&[moves[0].id], &EIO).unwrap();
        assert_eq!(rig.awaits(id).len(), 4, "rank 1 may still copy");
        rig.report(&[moves[0].id], &Outcome { rank: 1, ..Outcome::default() }).unwrap();
        assert_eq!(rig.awaits(id).len(), 3);
    }
}

#[test]
fn a_bad_copy_is_replaced_by_the_computed_block() {
    for write in [Write::Back, Write::Through, Write::Never] {
        for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
            let (mut rig, id, prompt, moves) = loading(base(tiers(write)));
            for (at, known) in moves.iter().enumerate() {
                if at == 3 { rig.fail(known.id) } else { rig.done(known.id) }
            }
            let stored = finish(&mut rig, id, &prompt);
            let good = if write == Write::Never { 3 } else { 4 };
            assert_eq!(stored, TABLE[3..good]);
            assert_eq!(rig.matched(&prompt), good * SIZE);
            assert_eq!(rig.manager.occupancy(HOST).free, 8 - good as u64);
        }
    }
}

#[test]
fn a_bad_copy_that_is_still_read_is_replaced_when_the_read_ends() {
    let (mut rig, id, prompt, moves) = loading(holes(tiers(Write::Back)));
    let other = rig.acquire(&prompt);
    bind(&mut rig, other, &[80, 81, 82, 83]);
    let reading = rig.hand_out();
    rig.fail(moves[0].id);
    for known in &moves[1..] {
        rig.done(known.id);
    }
    rig.commit(id, &[]);
    for known in &reading {
        rig.done(known.id);
    }
    rig.release(other);
    assert_eq!(finish(&mut rig, id, &prompt), [70]);
    assert_eq!(rig.on(&prompt, HOST), [ALL; 4]);
}

#[test]
fn loads_into_unbound_slots_end_with_their_lease() {
    for suspend in [false, true] {
        let mut rig = Rig::new(settings(tiers(Write::Back)));
        let prompt = tokens(1, 3);
        rig.mark(&prompt, HOST);
        let id = rig.acquire(&prompt);
        bind(&mut rig, id, &[70]);
        if suspend {
            rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
        } else {
            let touching = rig.release(id);
            assert_eq!(rig.hand_out().iter().map(|m| m.id).collect::<Vec<_>>(), touching);
            rig.done(touching[0]);
        }
        rig.run();
        assert_eq!(rig.manager.pending(), (0, 0));
        assert_eq!(rig.on(&prompt, HOST), [ALL; 3], "and their sources are as good as before");
    }
}

#[test]
fn blocks_that_the_engine_holds_already_are_not_loaded() {
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        let mut rig = Rig::new(base(tiers(Write::Back)));
        let prompt = tokens(1, TABLE.len());
        rig.mark(&prompt, HOST);
        let ask = Acquire { load: LoadMode::None, ..all_of(&prompt) };
        let id = rig.ask(&ask).unwrap();
        bind(&mut rig, id, &TABLE);
        rig.refused("blocks 1 to before 5", |m, now| m.load(id, None, Some(1..5), now));
        let backwards = std::ops::Range { start: 3, end: 2 };
        rig.refused("3 to before 2", |m, now| m.load(id, None, Some(backwards), now));
        rig.refused("has matched 4", |m, now| m.load(id, None, Some(5..5), now));
        let load = |rig: &mut Rig, blocks| {
            rig.call(|manager, now| manager.load(id, None, Some(blocks), now)).unwrap()
        };
        assert_eq!(load(&mut rig, 4..4), [0; 0]);
        let ids = load(&mut rig, 2..4);
        let moves = rig.run();
        assert_eq!(moves.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
        assert_eq!(moves.iter().map(|m| m.dst_slot).collect::<Vec<_>>(), TABLE[2..]);
        let lease = rig.manager.lease(id).unwrap();
        assert_eq!(lease.recompute().collect::<Vec<_>>(), [(0, ALL), (1, ALL)]);
        let plan = lease.plan().spans.iter().map(|span| (span.start, span.stop, span.action));
        let wanted = [(0, 2, Action::Recompute), (2, 3, Action::Load), (3, 4, Action::Load)];
        assert_eq!(plan.collect::<Vec<_>>(), wanted);
        assert_eq!(load(&mut rig, 2..4), [0; 0], "they are there");
        assert_eq!(finish(&mut rig, id, &prompt), [0; 0], "nothing is new to the host");
    }
}

#[test]
fn a_move_ends_after_the_one_it_waits_for_has_ended_on_every_rank() {
    let mut rig = Rig::new(Settings { ranks: 2, ..settings(tiers(Write::Back)) });
    let prompt = tokens(1, 1);
    let id = rig.acquire(&prompt);
    bind(&mut rig, id, &[70]);
    rig.commit(id, &prompt);
    rig.release(id);
    let id = rig.acquire(&prompt);
    bind(&mut rig, id, &[71]);
    let moves = rig.hand_out();
    let (store, load) = (moves[0].id, moves[1].id);
    assert_eq!(moves[1].after, store);
    let on = |rank| Outcome { rank, ..Outcome::default() };
    let early = "before move 1, which it waits for, had ended on all 2 ranks";
    rig.refused(early, |m, now| m.complete(&[load], &on(0), now));
    rig.refused(early, |m, now| m.complete(&[store, load], &on(0), now));
    rig.report(&[store], &on(0)).unwrap();
    rig.refused(early, |m, now| m.complete(&[load], &on(0), now));
    let part = Outcome { layers_done: Some(1), ..on(1) };
    rig.refused(early, |m, now| m.complete(&[store, load], &part, now));
    assert_eq!(rig.report(&[store, load], &on(1)).unwrap(), 1, "it ends by this very report");
    assert_eq!(rig.report(&[load], &on(0)).unwrap(), 1);
}

/// Blocks of a new prompt in slots of the engine, committed and released, and their stores.
fn stored(rig: &mut Rig, stem: u32, slots: &[Slot]) -> Vec<Move> {
    let prompt = tokens(stem, slots.len());
    let id = rig.acquire(&prompt);
    bind(rig, id, slots);
    rig.commit(id, &prompt);
    rig.release(id);
    rig.now += 1000;
    rig.hand_out()
}

/// The second of three blocks is lost while the third is in flight: the first may be evicted from
/// the host, but stays known as long as it has descendants.
#[test]
fn a_block_is_evicted_before_its_lost_child_is_removed() {
    let gpu = TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 3)]));
    let first = stored(&mut rig, 1, &[0, 1, 2]);
    rig.done(first[0].id);
    rig.fail(first[1].id);
    let second = stored(&mut rig, 2, &[3, 4]);
    assert_eq!(second.len(), 2, "the first block has made room");
    for known in first[2..].iter().chain(&second) {
        rig.done(known.id);
    }
    assert_eq!((rig.matched(&tokens(1, 3)), rig.matched(&tokens(2, 2))), (0, 8));
}
