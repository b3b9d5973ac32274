//! Point 6: moves are handed out once, in topological order, and joined rather than repeated.

use std::collections::BTreeSet;

use kvtrie_core::{Kind, Manager, Move, MoveId, MoveKind, Outcome, Settings};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, settings, tier, tokens};

fn three(gpu: u32, host: u32, disk: u32) -> Settings {
    settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host), tier(Kind::Disk, disk)])
}

#[test]
fn a_store_names_the_lease_that_waits_for_its_slot() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 1), tier(Kind::Host, 4)]));
    rig.serve(&tokens(1, 1));
    let id = rig.acquire(&tokens(2, 1));
    let leases: Vec<_> = rig.hand_out().iter().map(|m| (m.kind, m.lease)).collect();
    assert_eq!(leases, [(MoveKind::Store, id)]);
    rig.run();
    rig.release(id);
    rig.call(Manager::flush).unwrap();
    assert!(rig.hand_out().iter().all(|m| m.lease == 0), "no lease waits for a flush");
}

#[test]
fn each_move_is_handed_out_exactly_once() {
    let mut rig = Rig::new(three(8, 8, 8));
    let prompt = tokens(1, 5);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    let mut seen = Vec::new();
    for limit in [0, 2, 1, 9, 9] {
        let moves = rig.call(|manager, _| manager.moves(limit)).unwrap();
        assert!(moves.len() <= limit);
        seen.extend(moves.iter().map(|known| known.id));
    }
    assert_eq!((seen.len(), rig.awaits(id)), (5, seen));
    assert_eq!(rig.manager.pending(), (0, 5));
}

/// An executor that ends the newest move that may end, and checks what each one waits for.
fn run_backwards(rig: &mut Rig, ended: &mut BTreeSet<MoveId>) -> usize {
    let (mut running, mut chained) = (Vec::new(), 0);
    loop {
        let moves = rig.hand_out();
        for known in &moves {
            let before = running.iter().chain(&moves).map(|other: &Move| other.id);
            let before: BTreeSet<MoveId> = before.take_while(|id| *id != known.id).collect();
            let after = known.after;
            assert!(after == 0 || before.contains(&after) || ended.contains(&after));
            chained += usize::from(after != 0);
        }
        running.extend(moves);
        let runs = |known: &Move| known.after == 0 || ended.contains(&known.after);
        let Some(at) = running.iter().rposition(runs) else {
            assert!(running.is_empty());
            return chained;
        };
        let known = running.remove(at);
        rig.done(known.id);
        ended.insert(known.id);
    }
}

#[test]
fn a_move_is_handed_out_after_those_it_waits_for() {
    let mut rig = Rig::new(three(3, 4, 8));
    let (mut ended, mut chained) = (BTreeSet::new(), 0);
    for turn in 0..40 {
        let prompt = tokens(turn % 7, 2);
        let id = rig.acquire(&prompt);
        chained += run_backwards(&mut rig, &mut ended);
        let held = rig.manager.lease_tokens(id).unwrap();
        rig.commit(id, &prompt[held..]);
        rig.release(id);
        rig.now += 1000;
    }
    assert!(chained > 40 && ended.len() > 150, "{chained} of {}", ended.len());
}

#[test]
fn a_load_into_a_slot_that_a_store_still_reads_comes_after_it() {
    let mut rig = Rig::new(three(1, 4, 4));
    let (old, wanted) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&old);
    rig.mark(&wanted, HOST);
    rig.acquire(&wanted);
    let moves = rig.hand_out();
    let shape: Vec<_> = moves.iter().map(|m| (m.kind, m.after)).collect();
    assert_eq!(shape, [(MoveKind::Store, 0), (MoveKind::Load, moves[0].id)]);
    assert_eq!(moves[0].src_slot, moves[1].dst_slot);
}

#[test]
fn a_load_of_a_block_that_is_still_being_stored_comes_after_the_store() {
    let mut rig = Rig::new(three(2, 4, 4));
    let old = tokens(1, 1);
    rig.serve(&old);
    let id = rig.acquire(&tokens(2, 1));
    rig.acquire(&tokens(3, 1));
    rig.release(id);
    // The old block's store is in flight and its slot granted. A new request waits for that copy.
    let again = rig.acquire(&old);
    let moves = rig.hand_out();
    let shape: Vec<_> = moves.iter().map(|m| (m.kind, m.src, m.dst, m.after)).collect();
    let store = moves[0].id;
    assert_eq!(shape, [(MoveKind::Store, GPU, HOST, 0), (MoveKind::Load, HOST, GPU, store)]);
    assert_eq!(moves[0].dst_slot, moves[1].src_slot);
    for known in moves {
        rig.done(known.id);
    }
    assert_eq!((rig.awaits(again).len(), rig.on(&old, GPU)), (0, vec![ALL]));
}

#[test]
fn a_move_that_waits_for_two_others_is_handed_out_when_one_is_left() {
    // The load waits for the store of its block into the host and for the store out of its slot.
    let mut rig = Rig::new(three(2, 4, 4));
    let (one, two, new) = (tokens(1, 1), tokens(2, 1), tokens(3, 1));
    rig.serve(&one);
    rig.serve(&two);
    let id = rig.acquire(&new);
    rig.acquire(&one);
    let moves = rig.hand_out();
    assert!(moves.iter().all(|known| known.kind == MoveKind::Store), "the load is parked");
    assert_eq!(moves.len(), 2);
    rig.done(moves[0].id);
    let load = rig.hand_out();
    assert_eq!(
        load.iter().map(|m| (m.kind, m.after)).collect::<Vec<_>>(),
        [(MoveKind::Load, moves[1].id)]
    );
    rig.done(moves[1].id);
    rig.done(load[0].id);
    rig.release(id);
}

#[test]
fn a_second_request_for_an_arriving_block_joins_its_move() {
    let mut rig = Rig::new(three(8, 8, 8));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let (one, two) = (rig.acquire(&prompt), rig.acquire(&prompt));
    assert_eq!(rig.awaits(one), rig.awaits(two));
    assert_eq!(rig.slots(one), rig.slots(two));
    let moves = rig.hand_out();
    assert_eq!(moves.len(), 2);
    rig.release(one);
    for known in moves {
        rig.done(known.id);
    }
    assert!(rig.awaits(two).is_empty());
    assert_eq!(rig.on(&prompt, GPU), [ALL, ALL]);
}

#[test]
fn a_move_is_done_when_all_ranks_have_reported() {
    let mut rig = Rig::new(Settings { ranks: 3, ..three(8, 8, 8) });
    let prompt = tokens(1, 1);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    let known = rig.hand_out()[0].id;
    for (rank, ended) in [(2, 0), (0, 0), (0, 0), (1, 1)] {
        assert_eq!(rig.awaits(id), [known]);
        let outcome = Outcome { rank, ..Outcome::default() };
        assert_eq!(rig.report(&[known], &outcome).unwrap(), ended);
    }
    assert!(rig.awaits(id).is_empty());
}

#[test]
fn a_failed_move_holds_its_slots_until_every_rank_has_ended_it() {
    let mut rig = Rig::new(Settings { ranks: 2, ..three(1, 8, 8) });
    let prompt = tokens(1, 1);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    let known = rig.hand_out()[0].id;
    rig.release(id);
    let failed = |rank| Outcome { ok: false, rank, ..Outcome::default() };
    rig.report(&[known], &failed(1)).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 0);
    rig.report(&[known], &failed(0)).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 1);
}

#[test]
fn predictions_follow_the_lanes_first_layer_first() {
    let mut rig = Rig::new(three(8, 8, 8));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    // 10 ns of latency and 400 bytes at 1 GB/s, one block after the other.
    let times = rig.manager.predict(&rig.awaits(id), rig.now).unwrap();
    assert_eq!(times, [(1110, 1410), (1520, 1820)]);
    let spans = &rig.manager.lease(id).unwrap().plan().spans;
    assert_eq!(spans.iter().map(|s| (s.first_ready, s.ready)).collect::<Vec<_>>(), [(1110, 1820)]);
    rig.run();
    assert_eq!(rig.manager.predict(&[1, 2], 5000).unwrap(), [(5000, 5000); 2]);
}

#[test]
fn keys_name_content_wherever_a_disk_takes_part() {
    let keys = |settings: Settings| {
        let mut rig = Rig::new(settings);
        let prompt = tokens(1, 2);
        rig.mark(&prompt, DISK);
        rig.acquire(&prompt);
        let moves = rig.hand_out();
        let up: Vec<_> = moves.iter().filter(|m| m.src == DISK).map(|m| m.key).collect();
        assert_eq!(up.len(), 2);
        assert!(up[0] != up[1] && up[0] != [0; 32]);
        up
    };
    let plain = keys(three(8, 8, 8));
    assert_eq!(plain, keys(three(9, 7, 8)), "the pools' sizes are not content");
    let other = Settings { fingerprint: "other weights".to_owned(), ..three(8, 8, 8) };
    assert!(plain.iter().zip(keys(other)).all(|(a, b)| *a != b));
    let mut rig = Rig::new(three(8, 8, 8));
    rig.mark(&tokens(1, 1), HOST);
    rig.acquire(&tokens(1, 1));
    assert_eq!(rig.hand_out()[0].key, [0; 32], "between memories nothing is hashed");
}
