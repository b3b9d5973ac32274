//! Point 7, second half: the state after a failed, a hung and a doomed move.

use kvtrie_core::{
    Action, Error, Failed, Hint, Kind, Layers, Mark, MoveId, MoveKind, Outcome, Scope, Settings,
    Target, TierSpec, Write,
};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, SIZE, all_of, holes, layered, settings, tier, tokens};

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
fn after_a_failed_load_a_leaf_only_lease_ends_before_the_block() {
    let prompt = tokens(1, 4);
    let (mut rig, id, moves) = loading(two(8, 8), &prompt);
    let handle = rig.blocks(&prompt)[1];
    rig.done(moves[0]);
    rig.fail(moves[1]);
    let wanted =
        Failed { lease: id, block: Some(handle), start: 4, stop: 16, reason: "EIO".into() };
    assert_eq!(failed(&mut rig), [wanted]);
    assert_eq!(failed(&mut rig), [], "each failure is reported once");
    // The lease has slots for the blocks to compute, and the rest still arrives for others.
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
    let rows: Vec<_> = failed(&mut rig).iter().map(|f| (f.lease, f.start, f.stop)).collect();
    assert_eq!(rows, [(id, 4, 8)]);
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

/// Begins to copy a prompt down, out of slots that no lease is promised.
fn demote(rig: &mut Rig, prompt: &[u32]) {
    let target = Target::Tokens { tokens: prompt.to_vec(), scope: Scope::default() };
    rig.call(|manager, now| manager.hint(&[Hint::Demote { target, tier: HOST }], now)).unwrap();
}

#[test]
fn a_failed_store_leaves_the_victim_in_a_slot_that_nothing_was_promised() {
    let mut rig = Rig::new(two(3, 4));
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    demote(&mut rig, &prompt);
    let store = rig.hand_out();
    assert_eq!((store.len(), rig.on(&prompt, GPU)), (1, vec![Layers::NONE]));
    rig.fail(store[0].id);
    assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST)), (vec![ALL], vec![Layers::NONE]));
    assert_eq!(rig.manager.occupancy(HOST).free, 4);
}

#[test]
fn a_lease_keeps_the_slot_that_it_was_promised_although_the_store_before_it_fails() {
    for slots in [false, true] {
        let gpu = if slots { layered(Kind::Gpu, 3) } else { tier(Kind::Gpu, 3) };
        let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
        let (first, second, new) = (tokens(1, 1), tokens(2, 2), tokens(3, 1));
        rig.serve(&first);
        rig.serve(&second);
        let id = rig.acquire(&new);
        let (mine, stores) = (rig.slots(id), rig.hand_out());
        for store in &stores {
            assert!(mine.contains(&store.src_slot) && !rig.awaits(id).is_empty());
            rig.fail(store.id);
            assert_eq!(rig.slots(id), mine);
        }
        assert!(rig.awaits(id).is_empty() && rig.hand_out().is_empty());
        assert_eq!((rig.matched(&first), rig.matched(&second)), (0, 2 * SIZE));
        rig.commit(id, &new);
        assert_eq!((rig.slots(id), rig.matched(&new)), (mine, SIZE));
    }
}

/// Three blocks of which the first is lost while the second is on its way to the host; that move.
fn after_a_lost_block(path: &[u32]) -> (Rig, MoveId) {
    let tiers = vec![tier(Kind::Gpu, 2), tier(Kind::Host, 2), tier(Kind::Disk, 4)];
    let mut rig = Rig::new(settings(tiers));
    rig.serve(&path[..2 * SIZE]);
    rig.call(|manager, now| manager.mark_after(&on_host(path), 2, now)).unwrap();
    // The last block makes room on the host for the first one.
    rig.acquire(&tokens(2, 2));
    let moves = rig.hand_out();
    let [last, between] = [DISK, HOST].map(|dst| moves.iter().find(|m| m.dst == dst).unwrap());
    assert!(moves.len() == 3 && between.after == 0, "{moves:?}");
    rig.fail(last.id);
    (rig, between.id)
}

fn on_host(tokens: &[u32]) -> Mark<'_> {
    let (scope, tier) = (Scope::default(), HOST);
    Mark { tokens, scope, tier, present: true, ready: None, first: None }
}

#[test]
fn a_block_after_a_lost_one_leaves_while_the_block_between_the_two_still_moves() {
    let path = tokens(1, 3);
    let (mut rig, between) = after_a_lost_block(&path);
    assert_eq!((rig.matched(&path), rig.manager.occupancy(HOST).free), (0, 1));
    rig.done(between);
    assert_eq!(rig.manager.occupancy(HOST).free, 2);
}

#[test]
fn no_block_is_marked_after_a_lost_one() {
    let path = tokens(1, 3);
    let (mut rig, between) = after_a_lost_block(&path);
    let refused = rig.call(|manager, now| manager.mark_after(&on_host(&path), 2, now));
    assert!(refused.unwrap_err().to_string().contains("2 blocks are to be cached, 0 are"));
    rig.done(between);
    assert_eq!(rig.manager.occupancy(HOST).free, 2);
}

/// Each rank may still read the slot, unless it hangs: what a hung store reads is not used.
#[test]
fn a_promised_slot_is_written_once_every_rank_has_reported_the_failed_store() {
    let hung = Outcome { hung: true, ..bad() };
    for last in [Outcome::default(), bad(), hung] {
        let mut rig = Rig::new(Settings { ranks: 3, ..two(1, 4) });
        let old = tokens(1, 1);
        let id = rig.acquire(&old);
        rig.commit(id, &old);
        rig.release(id);
        let id = rig.acquire(&tokens(2, 1));
        let store = [rig.hand_out()[0].id];
        let mine = rig.slots(id);
        rig.report(&store, &Outcome { rank: 2, ..hung }).unwrap();
        rig.report(&store, &Outcome { rank: 1, ..Outcome::default() }).unwrap();
        assert_eq!((rig.awaits(id), rig.slots(id)), (store.to_vec(), mine.clone()));
        rig.report(&store, &last).unwrap();
        assert_eq!((rig.awaits(id), rig.slots(id)), (vec![], mine));
        assert_eq!((rig.matched(&old), rig.manager.occupancy(HOST).free), (0, 3));
        rig.commit(id, &tokens(2, 1));
        for rank in [0, 2] {
            rig.report(&store, &Outcome { rank, ..bad() }).unwrap();
        }
        assert_eq!(rig.manager.occupancy(HOST).free, 4);
    }
}

/// Serves `prompt` above a tier that refuses every store. Returns how many were tried.
fn serve(rig: &mut Rig, prompt: &[u32]) -> usize {
    rig.now += 1000;
    let id = rig.acquire(prompt);
    let mut stores = 0;
    loop {
        let moves = rig.hand_out();
        if moves.is_empty() {
            break;
        }
        for known in moves {
            assert_eq!(known.kind, MoveKind::Store);
            rig.fail(known.id);
            stores += 1;
        }
    }
    rig.commit(id, prompt);
    rig.release(id);
    stores
}

#[test]
fn a_dead_tier_is_tried_once_per_block() {
    let mut rig = Rig::new(two(2, 4));
    let prompts: Vec<_> = (1..=8).map(|stem| tokens(stem, 1)).collect();
    let stores: usize = prompts.iter().map(|prompt| serve(&mut rig, prompt)).sum();
    assert_eq!(stores, 6);
    assert_eq!((rig.manager.stats(HOST).failed, rig.manager.stats(HOST).bytes_written), (6, 0));
}

#[test]
fn a_block_that_was_refused_is_written_once_the_tier_takes_another() {
    let mut rig = Rig::new(two(2, 4));
    let old = tokens(1, 1);
    rig.serve(&old);
    rig.serve(&tokens(2, 1));
    demote(&mut rig, &old);
    let store = rig.hand_out()[0].id;
    rig.fail(store);
    demote(&mut rig, &old);
    assert!(rig.hand_out().is_empty(), "it was refused");
    demote(&mut rig, &tokens(2, 1));
    rig.run();
    for stem in 4..6 {
        rig.serve(&tokens(stem, 1));
    }
    assert_eq!((rig.matched(&old), rig.manager.stats(GPU).dropped), (SIZE, 0));
}

/// Copies `bad` down above a tier that refuses it alone, until it is not tried any more. Returns how
/// often it was tried.
fn refusals(rig: &mut Rig, bad: &[u32]) -> usize {
    let mut refusals = 0;
    for stem in 2..8 {
        demote(rig, bad);
        for known in rig.hand_out() {
            rig.fail(known.id);
            refusals += 1;
        }
        demote(rig, &tokens(stem, 1));
        rig.run();
        rig.serve(&tokens(stem + 1, 1));
    }
    rig.serve(&tokens(20, 2));
    assert_eq!((rig.matched(bad), rig.manager.stats(GPU).dropped), (0, 1));
    refusals
}

#[test]
fn a_block_that_is_refused_three_times_is_given_up() {
    let mut rig = Rig::new(two(2, 9));
    let bad = tokens(1, 1);
    rig.serve(&bad);
    rig.serve(&tokens(2, 1));
    assert_eq!(refusals(&mut rig, &bad), 3);
}

/// A block is in use until its lease ends: refusals before that do not count.
#[test]
fn a_block_that_is_refused_while_it_is_used_is_given_up_three_times_later() {
    let gpu = TierSpec { write: Write::Through, ..tier(Kind::Gpu, 2) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 9)]));
    let bad = tokens(1, 1);
    let id = rig.acquire(&bad);
    rig.commit(id, &bad);
    let store = rig.hand_out()[0].id;
    rig.fail(store);
    rig.release(id);
    rig.serve(&tokens(2, 1));
    assert_eq!(refusals(&mut rig, &bad), 3);
}

#[test]
fn a_cancelled_store_is_tried_again() {
    let mut rig = Rig::new(two(2, 4));
    let old = tokens(1, 1);
    rig.serve(&old);
    rig.serve(&tokens(2, 1));
    let cancelled = Outcome { ok: false, cancelled: true, ..Outcome::default() };
    demote(&mut rig, &old);
    let store = rig.hand_out()[0].id;
    rig.report(&[store], &cancelled).unwrap();
    assert_eq!(rig.on(&old, GPU), [ALL]);
    for stem in 4..6 {
        rig.serve(&tokens(stem, 1));
    }
    assert_eq!((rig.on(&old, GPU), rig.on(&old, HOST)), (vec![Layers::NONE], vec![ALL]));
    let id = rig.acquire(&old);
    let moves = rig.hand_out();
    let load = moves.iter().find(|m| m.src == HOST).unwrap().id;
    for store in moves.iter().filter(|m| m.src == GPU) {
        rig.done(store.id);
    }
    rig.report(&[load], &cancelled).unwrap();
    rig.release(id);
    assert_eq!(rig.on(&old, HOST), [ALL], "the source is as good as before");
    let id = rig.acquire(&old);
    assert!(rig.hand_out().iter().any(|m| m.src == HOST), "and is loaded from again");
    rig.run();
    rig.release(id);
}

#[test]
fn the_only_slot_stays_with_its_holder_and_the_victim_is_lost() {
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
fn a_failed_early_store_leaves_the_block_resident() {
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
    // Even if it went well after all: the lease does not wait for it any more.
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
    demote(&mut rig, &old);
    let store = rig.hand_out()[0].clone();
    let hung = Outcome { hung: true, ..bad() };
    rig.report(&[store.id], &hung).unwrap();
    // The block is resident again, but busy: another one has to be evicted.
    assert_eq!(rig.on(&old, GPU), [ALL]);
    let id = rig.acquire(&tokens(3, 1));
    let instead = rig.hand_out();
    assert_ne!(instead[0].src_slot, store.src_slot);
    rig.done(instead[0].id);
    rig.release(id);
    assert_eq!(rig.manager.occupancy(HOST).free, 2, "the hung store's slot is not given out");
    rig.report(&[store.id], &bad()).unwrap();
    assert_eq!(rig.manager.occupancy(HOST).free, 3);
}

#[test]
fn landed_layers_of_a_failed_move_do_not_count_while_it_runs() {
    let prompt = tokens(1, 1);
    for (ranks, hung, stays) in [(1, false, true), (1, true, false), (2, false, false)] {
        let gpu = TierSpec { write: Write::Through, ..tier(Kind::Gpu, 2) };
        let tiers = vec![gpu, tier(Kind::Host, 2)];
        let mut rig = Rig::new(Settings { ranks, ..holes(tiers) });
        let id = rig.acquire(&prompt);
        rig.commit(id, &prompt);
        let store = [rig.hand_out()[0].id];
        for rank in 0..ranks {
            let part = Outcome { layers_done: Some(1), rank, ..Outcome::default() };
            rig.report(&store, &part).unwrap();
        }
        assert_eq!(rig.on(&prompt, HOST), [Layers::new(0, 1)]);
        let left = if stays { Layers::new(0, 1) } else { Layers::NONE };
        rig.report(&store, &Outcome { hung, ..bad() }).unwrap();
        assert_eq!(rig.on(&prompt, HOST), [left]);
        rig.report(&store, &Outcome { rank: ranks - 1, ..bad() }).unwrap();
        assert_eq!(rig.on(&prompt, HOST), [left]);
        assert_eq!(rig.manager.occupancy(HOST).free, if stays { 1 } else { 2 });
    }
}

#[test]
fn a_move_that_waits_for_a_failed_one_fails_with_it() {
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
    let rows = failed(&mut rig);
    assert!(
        rows.iter().any(|row| row.reason.contains(&format!("move {}", moves[0].id))),
        "{rows:?}"
    );
    rig.commit(id, &prompts[2]);
    rig.release(id);
}

/// A match truncated within a block that is being loaded, whose load then fails.
#[test]
fn no_slots_are_held_behind_a_lost_block() {
    let prompt = tokens(1, 3);
    let (mut rig, id, loads) = loading(two(8, 8), &prompt);
    rig.call(|manager, now| manager.truncate(id, SIZE + 1, now)).unwrap();
    assert_eq!(rig.manager.lease_tokens(id), Ok(SIZE + 1));
    rig.fail(loads[0]);
    let lost = failed(&mut rig).iter().map(|row| (row.lease, row.start, row.stop)).next();
    assert_eq!((lost, rig.manager.lease_tokens(id)), (Some((id, 0, 5)), Ok(0)));
    for &load in &loads[1..] {
        rig.done(load);
    }
    rig.call(|manager, now| manager.reserve(id, prompt.len(), now)).unwrap();
    assert!(rig.awaits(id).is_empty() && rig.hand_out().is_empty(), "there is nothing to copy");
    rig.commit(id, &prompt);
    rig.release(id);
    rig.run();
    assert_eq!(rig.manager.pending(), (0, 0));
}

#[test]
fn the_latest_4096_rows_are_kept_and_the_others_counted() {
    let prompt = tokens(1, 1);
    let mut rig = Rig::new(two(2, 2));
    let manager = &mut rig.manager;
    for now in 1..=5000 {
        let (scope, ready, first) = (Scope::default(), None, None);
        let mark = Mark { tokens: &prompt, scope, tier: HOST, present: true, ready, first };
        manager.mark(&mark, now).unwrap();
        let id = manager.acquire(&all_of(&prompt), now).unwrap();
        let moves: Vec<MoveId> = manager.moves(9).unwrap().iter().map(|known| known.id).collect();
        let reason = now.to_string();
        let outcome = Outcome { error: Some(&reason), ..bad() };
        manager.complete(&moves, &outcome, now).unwrap();
        manager.release(id, now).unwrap();
    }
    assert_eq!(manager.requested().failed_lost, 5000 - 4096);
    let rows = failed(&mut rig);
    let reasons: Vec<usize> = rows.iter().map(|row| row.reason.parse().unwrap()).collect();
    assert_eq!(reasons, (905..=5000).collect::<Vec<_>>());
    assert_eq!(failed(&mut rig), []);
}
