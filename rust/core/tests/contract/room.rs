//! Point 5: slots come from the free list, then from victims, clean ones at once and dirty ones
//! after a write; the cascade is planned completely, and two watermarks keep demand instant.

use kvtrie_core::{Error, Kind, MoveKind, Reason, Settings, Structure, TierSpec, Write};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, SIZE, all_of, layered, settings, tier, tokens};

#[test]
fn free_slots_are_used_before_any_eviction() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4)]));
    rig.serve(&tokens(1, 2));
    let id = rig.acquire(&tokens(2, 2));
    assert!(rig.events().is_empty() && rig.awaits(id).is_empty());
    assert_eq!(rig.on(&tokens(1, 2), GPU), [ALL, ALL]);
}

#[test]
fn a_clean_victim_is_evicted_at_once() {
    let gpu = TierSpec { write: Write::Through, ..tier(Kind::Gpu, 2) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
    let old = tokens(1, 2);
    rig.serve(&old);
    let id = rig.acquire(&tokens(2, 2));
    assert!(rig.awaits(id).is_empty() && rig.hand_out().is_empty());
    assert!(rig.events().iter().all(|event| event.reason == Reason::Clean));
    assert_eq!(rig.on(&old, HOST), [ALL, ALL]);
    rig.commit(id, &tokens(2, 2));
}

/// Two paths of equal cost and time: the last block of each is evicted before either's first.
#[test]
fn of_equals_the_deeper_block_is_evicted_first() {
    let alike = Settings {
        policy: "retention".to_owned(),
        epsilon: 0.5,
        ..settings(vec![tier(Kind::Gpu, 4)])
    };
    let mut rig = Rig::new(alike);
    let paths = [tokens(1, 2), tokens(2, 2)];
    for path in &paths {
        rig.mark(path, GPU);
    }
    rig.now += 1000;
    rig.acquire(&tokens(3, 2));
    assert_eq!(paths.map(|path| rig.matched(&path)), [SIZE, SIZE]);
}

/// Of three children of a block one is dropped, the others leave a copy below: once all are
/// evicted, their parent may be evicted too.
#[test]
fn the_parent_of_victims_of_both_kinds_may_be_evicted_next() {
    let gpu = TierSpec { admit_after: 2, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]));
    let paths = [1, 2, 3].map(|stem| [tokens(9, 1), tokens(stem, 1)].concat());
    for path in &paths {
        rig.serve(path);
    }
    rig.mark(&paths[0], HOST);
    rig.mark(&paths[2], HOST);
    rig.events();
    let first = rig.acquire(&tokens(4, 3));
    let reasons: Vec<_> = rig.events().iter().map(|event| event.reason).collect();
    assert_eq!(reasons, [Reason::Dropped, Reason::Clean, Reason::Clean]);
    rig.release(first);
    rig.acquire(&tokens(5, 4));
    assert_eq!(rig.on(&paths[0], GPU), [kvtrie_core::Layers::NONE; 2]);
}

#[test]
fn a_dirty_victim_is_written_first_and_the_reservation_names_the_move() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 4)]));
    let (old, new) = (tokens(1, 1), tokens(2, 2));
    rig.serve(&old);
    let id = rig.acquire(&new);
    let awaits = rig.awaits(id);
    let moves = rig.hand_out();
    assert_eq!(
        moves.iter().map(|m| (m.id, m.kind)).collect::<Vec<_>>(),
        [(awaits[0], MoveKind::Store)]
    );
    // The lease holds the very slot that the store still reads.
    assert!(rig.slots(id).contains(&moves[0].src_slot));
    rig.refused("awaits 1 moves", |manager, now| manager.commit(id, &new, now));
    rig.done(moves[0].id);
    assert!(rig.awaits(id).is_empty());
    rig.commit(id, &new);
    assert_eq!(
        (rig.on(&old, GPU), rig.on(&old, HOST)),
        (vec![kvtrie_core::Layers::NONE], vec![ALL])
    );
}

#[test]
fn loads_take_free_slots_and_computed_blocks_draining_ones() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 4)]));
    rig.serve(&tokens(1, 1));
    let prompt = tokens(2, 2);
    rig.mark(&prompt[..SIZE], HOST);
    let id = rig.acquire(&prompt);
    let moves = rig.hand_out();
    let load = moves.iter().find(|m| m.kind == MoveKind::Load).unwrap();
    let store = moves.iter().find(|m| m.kind == MoveKind::Store).unwrap();
    assert_ne!(load.dst_slot, store.src_slot);
    assert_eq!((load.after, rig.slots(id)[1]), (0, store.src_slot));
}

#[test]
fn the_cascade_is_planned_through_all_tiers_before_anything_changes() {
    let tiers = vec![tier(Kind::Gpu, 1), tier(Kind::Host, 1), tier(Kind::Disk, 1)];
    let mut rig = Rig::new(settings(tiers));
    let prompts = [1, 2, 3, 4].map(|stem| tokens(stem, 1));
    for prompt in &prompts[..3] {
        rig.serve(prompt);
    }
    assert_eq!(rig.on(&prompts[0], DISK), [ALL]);
    assert_eq!(rig.on(&prompts[1], HOST), [ALL]);
    rig.events();
    let id = rig.acquire(&prompts[3]);
    let events: Vec<_> = rig.events().iter().map(|e| (e.tier, e.reason, e.to)).collect();
    let wanted = [
        (DISK, Reason::Dropped, None),
        (HOST, Reason::Demoted, Some(DISK)),
        (GPU, Reason::Demoted, Some(HOST)),
    ];
    assert_eq!(events, wanted);
    let moves = rig.hand_out();
    let shape: Vec<_> = moves.iter().map(|m| (m.src, m.dst, m.after)).collect();
    assert_eq!(shape, [(HOST, DISK, 0), (GPU, HOST, moves[0].id)]);
    assert_eq!(rig.awaits(id), [moves[1].id]);
    for known in &moves {
        rig.done(known.id);
    }
    let places = [(&prompts[1], DISK), (&prompts[2], HOST)];
    assert!(places.iter().all(|(prompt, tier)| rig.on(prompt, *tier) == [ALL]));
    assert_eq!(rig.matched(&prompts[0]), 0);
}

#[test]
fn a_cascade_without_an_end_changes_no_tier() {
    // The only victim would go to a host whose one slot is pinned by a load in flight.
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 1)]));
    let (held, loaded) = (tokens(1, 1), tokens(2, 1));
    rig.mark(&loaded, HOST);
    let one = rig.acquire(&held);
    let two = rig.acquire(&loaded);
    let error = rig.ask(&all_of(&tokens(3, 1))).unwrap_err();
    assert!(matches!(error, Error::NoSpace { wanted: 1, free: 0, leased: 2, .. }), "{error}");
    rig.run();
    rig.release(one);
    rig.release(two);
}

#[test]
fn below_free_low_blocks_are_stored_early_and_stay_resident() {
    let gpu = TierSpec { free_low: 0.5, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 16)]));
    let prompts: Vec<_> = (1..=7).map(|stem| tokens(stem, 1)).collect();
    for prompt in &prompts {
        rig.serve(prompt);
    }
    let clean = prompts.iter().filter(|p| rig.on(p, GPU) == [ALL] && rig.on(p, HOST) == [ALL]);
    assert!(clean.count() >= 3, "at least half of the slots are free or clean");
    assert!(rig.events().is_empty(), "and yet nothing has left");
    // So a demand of half the tier is instant.
    let id = rig.acquire(&tokens(9, 4));
    assert!(rig.awaits(id).is_empty());
    assert!(rig.events().iter().all(|event| event.reason == Reason::Clean));
}

#[test]
fn the_least_valuable_blocks_are_stored_early() {
    let gpu = TierSpec { free_low: 0.5, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 16)]));
    let prompts: Vec<_> = (1..=8).map(|stem| tokens(stem, 1)).collect();
    for prompt in &prompts {
        rig.serve(prompt);
    }
    let written: Vec<bool> = prompts.iter().map(|p| rig.on(p, HOST) == [ALL]).collect();
    let first_dirty = written.iter().position(|clean| !clean).unwrap();
    assert!(first_dirty >= 4 && written[first_dirty..].iter().all(|clean| !clean), "{written:?}");
}

#[test]
fn early_stores_stop_if_the_lower_tier_is_below_the_watermark() {
    for (kind, structure) in [
        (tier as fn(Kind, u32) -> TierSpec, Structure::LeafOnly),
        (tier, Structure::Holes),
        (layered, Structure::Holes),
    ] {
        let gpu = TierSpec { free_low: 0.5, ..kind(Kind::Gpu, 8) };
        let base = settings(vec![gpu, tier(Kind::Host, 2)]);
        let mut rig = Rig::new(Settings { structure, ..base });
        for turn in 0..24 {
            // `run` within `serve` gives up on moves that never end.
            rig.serve(&tokens(turn % 11, 1 + turn as usize % 3));
            assert_eq!(rig.manager.pending(), (0, 0));
        }
    }
}

#[test]
fn acquire_cannot_use_the_growth_reserve_but_reserve_can() {
    let gpu = TierSpec { growth_reserve: 0.25, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu]));
    let id = rig.acquire(&tokens(1, 6));
    let error = rig.ask(&all_of(&tokens(2, 1))).unwrap_err();
    assert!(matches!(error, Error::NoSpace { wanted: 1, leased: 6, .. }), "{error}");
    rig.call(|manager, now| manager.reserve(id, 8 * SIZE, now)).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
    assert_eq!(rig.manager.room_left(id).unwrap(), 8 * SIZE);
}

#[test]
fn cached_blocks_do_not_count_against_the_growth_reserve() {
    let gpu = TierSpec { growth_reserve: 0.25, ..tier(Kind::Gpu, 8) };
    let mut rig = Rig::new(settings(vec![gpu]));
    rig.serve(&tokens(1, 6));
    rig.serve(&tokens(2, 2));
    rig.acquire(&tokens(3, 6));
    assert!(rig.ask(&all_of(&tokens(4, 1))).is_err());
}

#[test]
fn freed_bytes_are_counted() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2)]));
    for stem in 1..=5 {
        rig.serve(&tokens(stem, 1));
    }
    let stats = rig.manager.stats(GPU);
    assert_eq!(
        (stats.dropped, stats.bytes_freed, rig.manager.requested().inserted),
        (3, 3 * 400, 5)
    );
}
