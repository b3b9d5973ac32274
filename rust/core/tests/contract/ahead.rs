//! Point 1, stores ahead: what a step will write is stored with the step.

use kvtrie_core::{
    Acquire, Error, Kind, LeaseId, LoadMode, Move, MoveKind, Outcome, Owner, Settings, Slot,
    Structure, TierSpec, Write,
};

use crate::rig::{ALL, DISK, GPU, HOST, LAYERS, Rig, SIZE, all_of, holes, settings, tier, tokens};

const TABLE: [Slot; 4] = [70, 71, 72, 73];

const EIO: Outcome<'static> =
    Outcome { ok: false, layers_done: None, rank: 0, hung: false, cancelled: false, error: None };

/// An engine's tier that writes through, above `host` blocks of host memory.
fn over(host: u32) -> Vec<TierSpec> {
    let gpu = TierSpec { owner: Owner::Engine, write: Write::Through, ..tier(Kind::Gpu, 8) };
    vec![gpu, tier(Kind::Host, host)]
}

fn begin(rig: &mut Rig, prompt: &[u32], slots: &[Slot]) -> LeaseId {
    let ask = Acquire { load: LoadMode::None, ..all_of(prompt) };
    let id = rig.ask(&ask).unwrap();
    rig.call(|manager, _| manager.bind(id, 0, slots)).unwrap();
    id
}

fn ahead(rig: &mut Rig, id: LeaseId) -> Vec<u64> {
    rig.call(|manager, now| manager.store_ahead(id, None, now)).unwrap()
}

fn ways(moves: &[Move]) -> Vec<(u64, Slot)> {
    assert!(moves.iter().all(|m| (m.kind, m.src, m.dst) == (MoveKind::Store, GPU, HOST)));
    assert!(moves.iter().all(|m| (m.after, m.layers) == (0, ALL)));
    moves.iter().map(|m| (m.lease, m.src_slot)).collect()
}

/// A prompt of four blocks under way, its stores handed out.
fn stored(settings: Settings) -> (Rig, LeaseId, Vec<u32>, Vec<Move>) {
    let mut rig = Rig::new(settings);
    let prompt = tokens(1, TABLE.len());
    let id = begin(&mut rig, &prompt, &TABLE);
    let ids = ahead(&mut rig, id);
    let moves = rig.hand_out();
    assert_eq!(moves.iter().map(|m| m.id).collect::<Vec<_>>(), ids);
    (rig, id, prompt, moves)
}

fn free(rig: &Rig) -> u64 {
    rig.manager.occupancy(HOST).free
}

#[test]
fn commit_takes_over_what_was_stored_ahead() {
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        let (mut rig, id, prompt, moves) = stored(base(over(8)));
        assert_eq!(ways(&moves), TABLE.map(|slot| (id, slot)));
        assert!(moves.iter().all(|m| m.block.is_none()));
        assert_eq!((free(&rig), rig.manager.pending().1), (4, 4));
        assert_eq!(rig.matched(&prompt), 0, "no lookup finds them before the commit");
        assert_eq!(ahead(&mut rig, id), [0; 0], "they are on their way");
        for known in &moves[..2] {
            rig.done(known.id);
        }
        let done = rig.commit(id, &prompt);
        assert_eq!((done.new.len(), done.ahead), (4, 4));
        assert_eq!(rig.hand_out().len(), 0, "no other store is wanted");
        assert_eq!(rig.on(&prompt, HOST)[..2], [ALL; 2]);
        assert_eq!(rig.matched(&prompt), 4 * SIZE);
        let touching = rig.release(id);
        assert_eq!(touching, [moves[2].id, moves[3].id]);
        for known in &moves[2..] {
            rig.done(known.id);
        }
        assert_eq!(rig.on(&prompt, HOST), [ALL; 4]);
        assert_eq!((free(&rig), rig.manager.stats(HOST).demoted), (4, 4));
    }
}

#[test]
fn layers_that_had_come_before_the_commit_count() {
    let (mut rig, id, prompt, moves) = stored(settings(over(8)));
    let some = Outcome { layers_done: Some(2), ..Outcome::default() };
    rig.report(&[moves[0].id], &some).unwrap();
    rig.commit(id, &prompt);
    assert_eq!(rig.on(&prompt, HOST)[0], kvtrie_core::Layers::new(0, 2));
    rig.report(&[moves[0].id], &Outcome { layers_done: Some(LAYERS), ..some }).unwrap();
    assert_eq!(rig.on(&prompt, HOST)[0], ALL);
}

#[test]
fn what_is_not_committed_is_given_back_once_nobody_writes_it() {
    for how in 0..4 {
        let (mut rig, id, prompt, moves) = stored(Settings { ranks: 2, ..settings(over(8)) });
        let (early, late) = (moves[0].id, moves[1].id);
        for rank in 0..2 {
            rig.report(&[early], &Outcome { rank, ..Outcome::default() }).unwrap();
        }
        match how {
            0 => assert_eq!(rig.release(id).len(), 3),
            1 => drop(rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap()),
            2 => rig.call(|m, now| m.drop_ahead(id, now)).unwrap(),
            _ => {
                rig.commit(id, &prompt[..2]);
                rig.call(|m, now| m.truncate(id, 1, now)).unwrap();
            }
        }
        assert_eq!(free(&rig), 5, "the first is whole on both ranks");
        rig.report(&[late], &Outcome::default()).unwrap();
        assert_eq!(free(&rig), 5, "rank 1 may still write it");
        rig.report(&[late], &Outcome { rank: 1, ..Outcome::default() }).unwrap();
        assert_eq!(free(&rig), 6);
        for known in &moves[2..] {
            for rank in 0..2 {
                rig.report(&[known.id], &Outcome { rank, ..EIO }).unwrap();
            }
        }
        assert_eq!((free(&rig), rig.manager.pending()), (8, (0, 0)));
    }
}

#[test]
fn moves_that_nobody_has_are_cancelled() {
    let mut rig = Rig::new(settings(over(8)));
    let prompt = tokens(1, 4);
    let id = begin(&mut rig, &prompt, &TABLE);
    assert_eq!(ahead(&mut rig, id).len(), 4);
    assert_eq!(rig.release(id), [0; 0], "nothing reads the engine's slots");
    assert_eq!((rig.hand_out().len(), free(&rig)), (0, 8));
    assert_eq!(rig.call(|m, _| m.failed()).unwrap(), []);
}

#[test]
fn a_failed_one_is_stored_after_the_commit() {
    for late in [false, true] {
        let (mut rig, id, prompt, moves) = stored(settings(over(8)));
        if late {
            rig.commit(id, &prompt);
        }
        for (at, known) in moves.iter().enumerate() {
            if at == 1 { rig.fail(known.id) } else { rig.done(known.id) }
        }
        if !late {
            assert_eq!(free(&rig), 5);
            rig.commit(id, &prompt);
        }
        rig.release(id);
        let again = rig.run();
        assert_eq!(ways(&again), [(0, 71)]);
        assert_eq!(rig.on(&prompt, HOST), [ALL; 4]);
        assert_eq!(free(&rig), 4);
    }
}

#[test]
fn a_hung_one_keeps_its_slot_until_it_ends() {
    let (mut rig, id, prompt, moves) = stored(settings(over(4)));
    rig.report(&[moves[0].id], &Outcome { hung: true, ..EIO }).unwrap();
    rig.commit(id, &prompt);
    assert_eq!((free(&rig), rig.hand_out().len()), (0, 0), "no room for another store");
    rig.fail(moves[0].id);
    assert_eq!(free(&rig), 1);
}

#[test]
fn of_two_requests_with_one_new_prefix_one_is_stored() {
    let (mut rig, one, prompt, first) = stored(settings(over(8)));
    let two = begin(&mut rig, &prompt, &[80, 81, 82, 83]);
    assert_eq!(ahead(&mut rig, two).len(), 4);
    let second = rig.hand_out();
    assert_eq!(free(&rig), 0);
    rig.commit(one, &prompt);
    rig.commit(two, &prompt);
    assert_eq!(rig.hand_out().len(), 0);
    for known in first.iter().chain(&second) {
        rig.done(known.id);
    }
    assert_eq!((free(&rig), rig.on(&prompt, HOST)), (4, vec![ALL; 4]));
}

#[test]
fn leases_that_share_slots_store_them_once() {
    let (mut rig, one, prompt, moves) = stored(settings(over(8)));
    let longer = [prompt.clone(), tokens(3, 1)].concat();
    let two = begin(&mut rig, &longer, &[70, 71, 72, 73, 74]);
    assert_eq!(ahead(&mut rig, two).len(), 1);
    let last = rig.hand_out();
    assert_eq!(ways(&last), [(two, 74)]);
    rig.commit(one, &prompt);
    let done = rig.commit(two, &longer);
    assert_eq!((done.new.len(), done.ahead), (1, 1));
    for known in moves.iter().chain(&last) {
        rig.done(known.id);
    }
    assert_eq!((rig.run().len(), rig.on(&longer, HOST)), (0, vec![ALL; 5]));
}

#[test]
fn no_more_is_begun_than_can_go_at_once() {
    let mut rig = Rig::new(settings(over(3)));
    let old = tokens(2, 2);
    let id = begin(&mut rig, &old, &[90, 91]);
    rig.commit(id, &old);
    rig.run();
    rig.release(id);
    let prompt = tokens(1, 4);
    let id = begin(&mut rig, &prompt, &TABLE);
    assert_eq!(ahead(&mut rig, id).len(), 3, "the blocks there have left");
    assert_eq!(rig.on(&old, HOST).len(), 0);
    rig.commit(id, &prompt);
    assert_eq!(rig.hand_out().len(), 3);

    // A victim that the disk has still to get leaves too late.
    let mut rig = Rig::new(settings([over(2), vec![tier(Kind::Disk, 8)]].concat()));
    let id = begin(&mut rig, &old, &[90, 91]);
    rig.commit(id, &old);
    rig.run();
    rig.release(id);
    let id = begin(&mut rig, &prompt, &TABLE);
    assert_eq!(ahead(&mut rig, id), [0; 0]);
    assert_eq!(rig.hand_out().len(), 0, "and is not asked to");
    rig.commit(id, &prompt);
    let moves = rig.run();
    assert_eq!(moves.iter().filter(|m| m.dst == DISK).count(), 2, "the commit asks");
}

#[test]
fn the_block_before_stays() {
    let mut rig = Rig::new(settings(over(1)));
    let prompt = tokens(1, 2);
    let id = begin(&mut rig, &prompt, &TABLE);
    assert_eq!(ahead(&mut rig, id).len(), 1);
    rig.commit(id, &prompt[..SIZE]);
    rig.run();
    assert_eq!(ahead(&mut rig, id), [0; 0], "its own parent is all that could leave");
    assert_eq!(rig.on(&prompt, HOST), [ALL]);
}

#[test]
fn nothing_is_begun_where_a_commit_stores_nothing_at_once() {
    let first = |change: fn(&mut TierSpec)| {
        let mut tiers = over(8);
        change(&mut tiers[0]);
        tiers
    };
    let disk = vec![over(8)[0].clone(), tier(Kind::Disk, 8)];
    for tiers in [
        first(|tier| tier.write = Write::Back),
        first(|tier| tier.write = Write::Never),
        first(|tier| tier.admit_after = 2),
        disk,
    ] {
        let mut rig = Rig::new(settings(tiers));
        let id = begin(&mut rig, &tokens(1, 4), &TABLE);
        assert_eq!(ahead(&mut rig, id), [0; 0]);
    }
}

#[test]
fn only_named_slots_behind_the_path_can_be_stored_ahead() {
    let mut rig = Rig::new(settings(over(8)));
    let prompt = tokens(1, 4);
    let id = begin(&mut rig, &prompt, &TABLE);
    rig.commit(id, &prompt[..SIZE]);
    let text = "to before 5, lease 1 has committed 1 and has slots up to before 4";
    rig.refused(text, |m, now| m.store_ahead(id, Some(1..5), now));
    rig.refused("blocks 0 to", |m, now| m.store_ahead(id, Some(0..2), now));
    let backwards = std::ops::Range { start: 3, end: 2 };
    rig.refused("3 to before 2", |m, now| m.store_ahead(id, Some(backwards), now));
    let some = rig.call(|m, now| m.store_ahead(id, Some(1..3), now)).unwrap();
    assert_eq!(some.len(), 2);
    let mut ours = Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let id = ours.acquire(&prompt);
    ours.refused("owner is not 'engine'", |m, now| m.store_ahead(id, None, now));
    let gone = ours.call(|m, now| m.drop_ahead(99, now));
    assert!(matches!(gone, Err(Error::Closed(_))));
}

#[test]
fn a_lease_whose_load_fails_stores_nothing_that_was_computed_behind_it() {
    for structure in [Structure::LeafOnly, Structure::Holes] {
        let mut rig = Rig::new(Settings { structure, ..settings(over(8)) });
        let prompt = tokens(1, 4);
        rig.mark(&prompt[..2 * SIZE], HOST);
        let id = begin(&mut rig, &prompt, &TABLE);
        let loads = rig.call(|m, now| m.load(id, None, None, now)).unwrap();
        assert_eq!(loads.len(), 2);
        assert_eq!(ahead(&mut rig, id).len(), 2);
        let moves = rig.hand_out();
        assert_eq!(moves.len(), 4);
        rig.fail(loads[1]);
        rig.done(loads[0]);
        for known in &moves[2..] {
            rig.done(known.id);
        }
        let lost = u64::from(structure == Structure::LeafOnly);
        assert_eq!(free(&rig), 6 + lost, "the copies are gone");
        let held = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[held..]);
        let stores = rig.run();
        assert!(stores.iter().any(|m| m.src_slot == 72) && stores.iter().any(|m| m.src_slot == 73));
        assert_eq!(rig.on(&prompt, HOST), [ALL; 4]);
    }
}

#[test]
fn what_comes_to_host_so_is_written_through_to_disk() {
    for late in [false, true] {
        let host = TierSpec { write: Write::Through, ..tier(Kind::Host, 8) };
        let tiers = vec![over(8)[0].clone(), host, tier(Kind::Disk, 8)];
        let (mut rig, id, prompt, moves) = stored(settings(tiers));
        if late {
            rig.commit(id, &prompt);
        }
        for known in &moves {
            rig.done(known.id);
        }
        if !late {
            rig.commit(id, &prompt);
        }
        assert!(rig.run().iter().all(|m| (m.src, m.dst) == (HOST, DISK)));
        assert_eq!(rig.on(&prompt, DISK), [ALL; 4]);
    }
}
