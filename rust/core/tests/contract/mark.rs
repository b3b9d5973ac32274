//! Marks: residency without a request, now or from a given time on.

use kvtrie_core::{
    Acquire, Error, Handle, Kind, Layers, LoadMode, Mark, Outcome, Owner, Result, Scope, Settings,
    TierSpec,
};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, layered, settings, tier, tokens};

fn two(gpu: u32, host: u32) -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host)]))
}

fn mark(
    rig: &mut Rig,
    tokens: &[u32],
    tier: usize,
    ready: Option<(u64, u64)>,
) -> Result<Vec<Handle>> {
    let (first, ready) = (ready.map(|times| times.0), ready.map(|times| times.1));
    let mark = Mark { tokens, scope: Scope::default(), tier, present: true, ready, first };
    rig.call(|manager, now| manager.mark(&mark, now))
}

fn clear(rig: &mut Rig, tokens: &[u32], tier: usize) -> Result<Vec<Handle>> {
    let scope = Scope::default();
    let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
    rig.call(|manager, now| manager.mark(&mark, now))
}

#[test]
fn full_blocks_are_marked_and_found_and_the_rest_is_ignored() {
    let mut rig = two(4, 4);
    let prompt: Vec<u32> = tokens(1, 2).into_iter().chain([1, 2, 3]).collect();
    let handles = mark(&mut rig, &prompt, HOST, None).unwrap();
    assert_eq!(handles, rig.blocks(&prompt));
    assert_eq!((rig.matched(&prompt), rig.on(&prompt, HOST)), (2 * SIZE, vec![ALL, ALL]));
    assert_eq!(mark(&mut rig, &prompt, HOST, None).unwrap(), handles, "again: the same blocks");
    assert_eq!(rig.manager.occupancy(HOST).free, 2);
}

#[test]
fn a_copy_that_is_ready_in_the_future_is_arriving_until_then() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 1);
    mark(&mut rig, &prompt, HOST, Some((1500, 2000))).unwrap();
    let copy = |rig: &Rig, now| {
        let found = rig.manager.lookup(&prompt, now, &Scope::default(), 0).unwrap();
        found.blocks[0].copies[0]
    };
    let early = copy(&rig, 1000);
    assert_eq!(
        (early.layers, early.coming, early.first, early.ready),
        (Layers::NONE, ALL, 1500, 2000)
    );
    assert_eq!(rig.manager.occupancy(HOST).evictable, 0, "it is no victim");
    rig.now = 1999;
    rig.serve(&tokens(2, 1));
    assert_eq!(copy(&rig, 1999).layers, Layers::NONE);
    rig.now = 2000;
    rig.serve(&tokens(2, 1));
    let late = copy(&rig, 2000);
    assert_eq!((late.layers, late.coming, late.ready), (ALL, ALL, 2000));
    assert_eq!(rig.manager.occupancy(HOST).evictable, 1);
}

#[test]
fn the_first_layer_is_never_later_than_the_last() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 1);
    mark(&mut rig, &prompt, HOST, Some((9000, 2000))).unwrap();
    let found = rig.manager.lookup(&prompt, 1000, &Scope::default(), 0).unwrap();
    assert_eq!(found.blocks[0].copies[0].first, 2000);
}

#[test]
fn a_ready_time_that_has_passed_means_now() {
    let mut rig = two(4, 4);
    mark(&mut rig, &tokens(1, 1), HOST, Some((1, 1000))).unwrap();
    assert_eq!(rig.on(&tokens(1, 1), HOST), [ALL]);
}

#[test]
fn marking_evicts_by_the_same_rules() {
    let mut rig = two(2, 1);
    let old = tokens(1, 2);
    rig.serve(&old);
    let held = rig.acquire(&old[..SIZE]);
    rig.now += 1000;
    mark(&mut rig, &tokens(2, 1), GPU, None).unwrap();
    rig.run();
    assert_eq!(
        (rig.on(&old, GPU), rig.on(&old, HOST)),
        (vec![ALL, Layers::NONE], vec![Layers::NONE, ALL])
    );
    let error = mark(&mut rig, &tokens(3, 3), GPU, None).unwrap_err();
    assert!(matches!(error, Error::NoSpace { wanted: 3, leased: 1, .. }), "{error}");
    rig.release(held);
}

#[test]
fn marking_more_of_a_path_keeps_what_was_marked_before() {
    let mut rig = two(2, 8);
    let prompt = tokens(1, 3);
    mark(&mut rig, &prompt[..2 * SIZE], GPU, None).unwrap();
    // Three blocks do not fit, and the two resident ones are no victims for the third.
    assert!(matches!(mark(&mut rig, &prompt, GPU, None), Err(Error::NoSpace { .. })));
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
}

#[test]
fn clearing_removes_the_copies_of_one_tier() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 2);
    mark(&mut rig, &prompt, GPU, None).unwrap();
    mark(&mut rig, &prompt, HOST, None).unwrap();
    let handles = rig.blocks(&prompt);
    assert_eq!(clear(&mut rig, &prompt, GPU).unwrap(), handles);
    assert_eq!(
        (rig.on(&prompt, GPU), rig.on(&prompt, HOST)),
        (vec![Layers::NONE; 2], vec![ALL; 2])
    );
    assert_eq!(rig.manager.occupancy(GPU).free, 4);
    assert_eq!(clear(&mut rig, &prompt, GPU).unwrap(), [], "nothing is left to clear");
    clear(&mut rig, &prompt, HOST).unwrap();
    assert_eq!((rig.manager.totals().0, rig.manager.occupancy(HOST).free), (0, 4));
}

#[test]
fn an_arriving_mark_can_be_cleared_and_never_becomes_ready() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 1);
    mark(&mut rig, &prompt, HOST, Some((2000, 2000))).unwrap();
    clear(&mut rig, &prompt, HOST).unwrap();
    rig.now = 3000;
    rig.serve(&tokens(2, 1));
    assert_eq!((rig.matched(&prompt), rig.manager.occupancy(HOST).free), (0, 4));
}

#[test]
fn leased_or_moving_blocks_cannot_be_cleared() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 1);
    mark(&mut rig, &prompt, HOST, None).unwrap();
    let id = rig.acquire(&prompt);
    let refused = clear(&mut rig, &prompt, HOST).unwrap_err();
    assert!(refused.to_string().contains("1 leases, 1 moves"), "{refused}");
    rig.release(id);
    let refused = clear(&mut rig, &prompt, HOST).unwrap_err();
    assert!(refused.to_string().contains("0 leases, 1 moves"), "{refused}");
    rig.run();
    clear(&mut rig, &prompt, HOST).unwrap();
}

#[test]
fn a_marked_copy_is_loaded_when_it_is_ready_and_not_earlier() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 1);
    mark(&mut rig, &prompt, GPU, Some((4000, 5000))).unwrap();
    let id = rig.acquire(&prompt);
    let span = rig.manager.lease(id).unwrap().plan().spans[0];
    assert_eq!((span.ready, rig.manager.lease(id).unwrap().plan().finish), (5000, 5000));
}

#[test]
fn slots_of_an_engine_cannot_be_marked() {
    let gpu = TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
    let refused = mark(&mut rig, &tokens(1, 1), GPU, None).unwrap_err();
    assert!(refused.to_string().contains("the engine owns"), "{refused}");
    assert!(rig.ask(&all_of(&tokens(1, 1))).is_ok());
}

/// A manager of two ranks, one block on the host, its lease, and its load, which has failed on one
/// rank and runs on the other.
fn failing(prompt: &[u32]) -> (Rig, u64, u64) {
    let tiers = vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4)];
    let mut rig = Rig::new(Settings { ranks: 2, ..settings(tiers) });
    rig.mark(prompt, HOST);
    let id = rig.acquire(prompt);
    let load = rig.hand_out()[0].id;
    rig.fail(load);
    (rig, id, load)
}

#[test]
fn a_bad_copy_is_good_again_when_it_is_marked() {
    let prompt = tokens(1, 2);
    for (ended, ready) in [(false, None), (true, None), (false, Some((1500, 2000)))] {
        let (mut rig, id, load) = failing(&prompt[..SIZE]);
        let end = Outcome { ok: false, rank: 1, ..Outcome::default() };
        if ended {
            rig.report(&[load], &end).unwrap();
        }
        assert_eq!(rig.matched(&prompt), 0);
        let handles = mark(&mut rig, &prompt, HOST, ready).unwrap();
        assert_eq!((handles.len(), rig.blocks(&prompt)), (2, handles));
        let now = if ready.is_some() { Layers::NONE } else { ALL };
        assert_eq!(rig.on(&prompt, HOST), [now; 2], "{ready:?}");
        assert_eq!(rig.manager.occupancy(HOST).free, 2, "it keeps its slot");
        if !ended {
            rig.report(&[load], &end).unwrap();
        }
        rig.release(id);
        rig.now = 2000;
        rig.serve(&tokens(2, 1));
        assert_eq!((rig.matched(&prompt), rig.on(&prompt, HOST)), (2 * SIZE, vec![ALL; 2]));
    }
}

#[test]
fn slots_that_a_failed_move_still_writes_cannot_be_marked() {
    let prompt = tokens(1, 2);
    let (mut rig, id, load) = failing(&prompt[..SIZE]);
    let refused = mark(&mut rig, &prompt, GPU, None).unwrap_err();
    assert!(refused.to_string().contains("moves have still to end"), "{refused}");
    rig.report(&[load], &Outcome { ok: false, rank: 1, ..Outcome::default() }).unwrap();
    mark(&mut rig, &prompt, GPU, None).unwrap();
    rig.release(id);
    assert_eq!(rig.on(&prompt, GPU), [ALL; 2]);
}

#[test]
fn marking_brings_the_layers_that_a_tier_lacks() {
    let prompt = tokens(1, 2);
    let some = Layers::new(0, 2);
    for (ready, now) in [(None, ALL), (Some((1500, 2000)), some)] {
        let mut rig = Rig::new(settings(vec![layered(Kind::Gpu, 2), tier(Kind::Host, 4)]));
        rig.mark(&prompt[..SIZE], HOST);
        let id = rig.acquire(&prompt[..SIZE]);
        for (at, load) in rig.hand_out().iter().enumerate() {
            let ok = at < 2;
            rig.report(&[load.id], &Outcome { ok, cancelled: !ok, ..Outcome::default() }).unwrap();
        }
        rig.release(id);
        rig.run();
        assert_eq!(rig.on(&prompt, GPU), [some]);
        mark(&mut rig, &prompt, GPU, ready).unwrap();
        let behind = if ready.is_some() { Layers::NONE } else { ALL };
        assert_eq!(rig.on(&prompt, GPU), [now, behind]);
        assert_eq!(rig.manager.occupancy(GPU).free, 0);
        rig.now = 2000;
        rig.call(|manager, now| manager.hint(&[], now)).unwrap();
        assert_eq!(rig.on(&prompt, GPU), [ALL; 2]);
    }
}

/// A copy that comes from elsewhere is read once it is there, not before.
#[test]
fn a_load_from_a_marked_copy_waits_until_it_is_there() {
    let mut rig = two(4, 4);
    let prompt = tokens(1, 2);
    mark(&mut rig, &prompt, HOST, Some((1_000_000, 1_000_000))).unwrap();
    let ask = Acquire { tokens: &prompt, load: LoadMode::All, ..Acquire::default() };
    let lease = rig.manager.acquire(&ask, 0).unwrap();
    assert_eq!(rig.manager.awaits(lease).unwrap().len(), 2);
    assert!(rig.manager.moves(9).unwrap().is_empty(), "nothing is there to be read");
    assert!(rig.manager.predict(&[1, 2], 0).unwrap().iter().all(|times| times.0 > 1_000_000));
    rig.manager.audit().unwrap();
    rig.manager.complete(&[], &Outcome::default(), 999_999).unwrap();
    assert!(rig.manager.moves(9).unwrap().is_empty());
    rig.manager.complete(&[], &Outcome::default(), 1_000_000).unwrap();
    let moves = rig.manager.moves(9).unwrap();
    assert_eq!(moves.iter().map(|m| (m.src, m.dst, m.after)).collect::<Vec<_>>(), [(1, 0, 0); 2]);
    rig.manager.audit().unwrap();
    rig.manager.complete(&[1, 2], &Outcome::default(), 1_000_100).unwrap();
    assert!(rig.manager.awaits(lease).unwrap().is_empty());
    rig.manager.release(lease, 1_000_100).unwrap();
    rig.manager.audit().unwrap();
}

/// Only what a machine lacks is brought there; what it has stays where it is.
#[test]
fn blocks_behind_known_ones_are_marked_alone() {
    let mut rig = two(8, 8);
    let prompt = tokens(1, 4);
    rig.serve(&prompt[..2 * SIZE]);
    let ready = Some(rig.now + 500);
    let of = |tokens| Mark {
        tokens,
        scope: Scope::default(),
        tier: HOST,
        present: true,
        ready,
        first: None,
    };
    rig.call(|manager, now| manager.mark_after(&of(&prompt), 2, now)).unwrap();
    assert_eq!(rig.manager.occupancy(HOST).free, 6);
    assert_eq!(rig.matched(&prompt), 4 * SIZE);
    assert_eq!(rig.on(&prompt, HOST)[..2], [Layers::NONE; 2]);
    let other = tokens(2, 4);
    let refused = rig.call(|manager, now| manager.mark_after(&of(&other), 2, now));
    assert!(refused.unwrap_err().to_string().contains("2 blocks are to be cached, 0 are"));
    let clear = Mark { present: false, ready: None, ..of(&prompt) };
    let cleared = rig.call(|manager, now| manager.mark_after(&clear, 3, now)).unwrap();
    assert_eq!((cleared.len(), rig.matched(&prompt)), (1, 3 * SIZE));
    assert!(rig.call(|manager, now| manager.mark_after(&clear, 9, now)).unwrap().is_empty());
    rig.manager.audit().unwrap();
}

/// An engine gets as many victims as it asks for or none; a block that stays keeps those before it.
#[test]
fn blocks_are_evicted_on_request() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let (old, young) = (tokens(1, 3), tokens(2, 3));
    let first = mark(&mut rig, &old, GPU, None).unwrap();
    let second = mark(&mut rig, &young, GPU, None).unwrap();
    let evict = |rig: &mut Rig, count, stay: &[_]| {
        rig.call(|manager, now| manager.evict_blocks(GPU, count, stay, now))
    };
    assert_eq!(evict(&mut rig, 0, &[]).unwrap(), []);
    let before = rig.manager.snapshot();
    assert!(matches!(evict(&mut rig, 4, &second[2..]), Err(Error::NoSpace { .. })));
    assert_eq!(rig.manager.snapshot(), before);
    assert_eq!(evict(&mut rig, 1, &[]).unwrap(), first[2..]);
    assert_eq!(evict(&mut rig, 2, &first[1..]).unwrap(), [second[2], second[1]]);
    rig.manager.audit().unwrap();
    assert_eq!(evict(&mut rig, 3, &[]).unwrap().len(), 3);
    assert!(rig.call(|manager, now| manager.evict_blocks(7, 1, &[], now)).is_err());
    rig.manager.audit().unwrap();
}

/// A copy that another machine reads stays, without a slot above, and may leave afterwards.
#[test]
fn a_pinned_copy_is_no_victim() {
    let mut rig = two(4, 2);
    let prompt = tokens(1, 2);
    let handles = mark(&mut rig, &prompt, HOST, None).unwrap();
    let pin = rig.call(|manager, now| manager.pin_copies(&handles, HOST, now)).unwrap();
    let twice = rig.call(|manager, now| manager.pin_copies(&handles[..1], HOST, now)).unwrap();
    assert_eq!((rig.manager.occupancy(HOST).evictable, rig.manager.occupancy(GPU).free), (0, 4));
    let other = tokens(2, 1);
    assert!(matches!(mark(&mut rig, &other, HOST, None), Err(Error::NoSpace { .. })));
    assert!(rig.manager.reset().unwrap_err().to_string().contains("2 pins"));
    rig.call(|manager, now| manager.unpin_copies(pin, now)).unwrap();
    rig.call(|manager, now| manager.unpin_copies(pin, now)).unwrap();
    assert_eq!(rig.on(&prompt, HOST), [ALL, ALL]);
    mark(&mut rig, &other, HOST, None).unwrap();
    assert_eq!(rig.on(&prompt, HOST)[0], ALL, "the front block is still pinned");
    rig.call(|manager, now| manager.unpin_copies(twice, now)).unwrap();
    let missing = rig.call(|manager, now| manager.pin_copies(&handles, GPU, now));
    assert!(missing.unwrap_err().to_string().contains("cannot be pinned on tier 'gpu'"));
}
