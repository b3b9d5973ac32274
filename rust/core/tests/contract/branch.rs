//! Point 9, first half: forks share full blocks and copy the partial one at the first write;
//! truncation frees the lease's private slots.

use kvtrie_core::{Acquire, Kind, LoadMode, MoveKind};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, settings, tier, tokens};

/// A lease that has written one block and two more tokens, in a pool of `blocks`.
fn written(blocks: u32) -> (Rig, u64) {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, blocks)]));
    let id = rig.acquire(&tokens(1, 2));
    rig.commit(id, &tokens(1, 2)[..SIZE + 2]);
    (rig, id)
}

fn fork(rig: &mut Rig, id: u64, n: usize) -> Vec<u64> {
    rig.call(|manager, now| manager.fork(id, n, now)).unwrap()
}

fn reserve(rig: &mut Rig, id: u64, tokens: usize) {
    rig.call(|manager, now| manager.reserve(id, tokens, now)).unwrap();
}

#[test]
fn a_fork_shares_full_blocks_and_the_partial_one_until_a_write() {
    let (mut rig, id) = written(8);
    let forks = fork(&mut rig, id, 2);
    let shared = rig.slots(id);
    assert_eq!(rig.slots(forks[0]), shared);
    assert_eq!(rig.manager.occupancy(GPU).free, 6, "no slot was taken");
    assert!(rig.hand_out().is_empty(), "and nothing copied");
    for lease in [id, forks[0], forks[1]] {
        assert_eq!(rig.manager.lease_tokens(lease).unwrap(), SIZE + 2);
        assert_eq!(rig.manager.room_left(lease).unwrap(), 0);
        rig.refused("call reserve first", |manager, now| manager.commit(lease, &[9], now));
    }
}

#[test]
fn the_partial_block_is_copied_before_the_first_write_and_not_for_the_last_holder() {
    let (mut rig, id) = written(8);
    let other = fork(&mut rig, id, 1)[0];
    let source = rig.slots(id)[1];
    reserve(&mut rig, other, 1);
    let moves = rig.hand_out();
    let [copy] = &moves[..] else { panic!("{moves:?}") };
    assert_eq!((copy.kind, copy.src, copy.dst, copy.tokens), (MoveKind::Copy, GPU, GPU, 2));
    assert_eq!((copy.src_slot, copy.dst_slot), (source, rig.slots(other)[1]));
    assert_ne!(copy.src_slot, copy.dst_slot);
    // The copy is still reading: neither of them may write yet.
    assert_eq!(rig.awaits(other), [copy.id]);
    assert_eq!(rig.manager.room_left(id).unwrap(), 0);
    rig.done(copy.id);
    reserve(&mut rig, id, 1);
    assert!(rig.hand_out().is_empty(), "the last holder writes in place");
    assert_eq!(rig.slots(id)[1], source);
    rig.commit(id, &[7, 7]);
    rig.commit(other, &[8, 8]);
    let path = |last: u32| [&tokens(1, 2)[..SIZE + 2], &[last; 2]].concat();
    assert_eq!((rig.matched(&path(7)), rig.matched(&path(8))), (2 * SIZE, 2 * SIZE));
}

#[test]
fn a_fork_of_full_blocks_copies_nothing() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let prompt = tokens(1, 2);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    let other = fork(&mut rig, id, 1)[0];
    reserve(&mut rig, other, 1);
    reserve(&mut rig, id, 1);
    assert!(rig.hand_out().is_empty());
    assert_ne!(rig.slots(id)[2], rig.slots(other)[2]);
}

#[test]
fn beams_are_forks_and_releases() {
    let (mut rig, id) = written(8);
    let beams = fork(&mut rig, id, 3);
    rig.release(id);
    rig.release(beams[0]);
    rig.release(beams[1]);
    reserve(&mut rig, beams[2], 1);
    assert!(rig.hand_out().is_empty());
    rig.commit(beams[2], &[1, 2]);
    rig.release(beams[2]);
    assert_eq!((rig.manager.occupancy(GPU).free, rig.manager.totals().1), (6, 0));
}

#[test]
fn a_fork_waits_until_everything_planned_has_arrived() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    rig.mark(&tokens(1, 2), HOST);
    let id = rig.acquire(&tokens(1, 2));
    rig.refused("awaits 2 moves", |manager, now| manager.fork(id, 1, now));
    rig.run();
    fork(&mut rig, id, 1);
    rig.mark(&tokens(2, 1), HOST);
    let prompt = tokens(2, 1);
    let id = rig.ask(&Acquire { load: LoadMode::None, ..all_of(&prompt) }).unwrap();
    rig.refused("1 blocks to compute", |manager, now| manager.fork(id, 1, now));
}

#[test]
fn a_failed_copy_loses_the_tail_of_the_fork() {
    let (mut rig, id) = written(8);
    let other = fork(&mut rig, id, 1)[0];
    reserve(&mut rig, other, 1);
    let copy = rig.hand_out()[0].id;
    rig.fail(copy);
    let failed = rig.call(|manager, _| manager.failed()).unwrap();
    let rows: Vec<_> = failed.iter().map(|f| (f.lease, f.block, f.start, f.stop)).collect();
    assert_eq!(rows, [(other, None, 4, 6)]);
    assert_eq!(rig.manager.lease_tokens(other).unwrap(), SIZE);
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), SIZE + 2);
}

#[test]
fn truncation_frees_private_slots_and_leaves_committed_blocks_cached() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let prompt = tokens(1, 3);
    let id = rig.ask(&Acquire { reserve: 8, ..all_of(&prompt) }).unwrap();
    rig.commit(id, &prompt);
    rig.call(|manager, now| manager.truncate(id, SIZE, now)).unwrap();
    assert_eq!((rig.manager.lease_tokens(id).unwrap(), rig.slots(id).len()), (SIZE, 1));
    assert_eq!(rig.manager.occupancy(GPU).free, 5);
    assert_eq!(rig.matched(&prompt), 3 * SIZE);
    // Truncated blocks can be victims now, the rest cannot.
    rig.acquire(&tokens(2, 7));
    assert_eq!(rig.on(&prompt, GPU), [ALL]);
}

#[test]
fn truncating_the_tail_keeps_its_slot() {
    let (mut rig, id) = written(8);
    let slots = rig.slots(id);
    rig.call(|manager, now| manager.truncate(id, SIZE + 1, now)).unwrap();
    assert_eq!(rig.slots(id), slots);
    rig.commit(id, &[5, 6, 7]);
    assert_eq!(rig.matched(&[&tokens(1, 1)[..], &[1004, 5, 6, 7]].concat()), 2 * SIZE);
}

#[test]
fn truncation_within_a_shared_block_copies_it_before_the_next_write() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8)]));
    let prompt = tokens(1, 2);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    let second = rig.slots(id)[1];
    rig.call(|manager, now| manager.truncate(id, SIZE + 1, now)).unwrap();
    assert_eq!((rig.manager.lease_tokens(id).unwrap(), rig.slots(id)[1]), (SIZE + 1, second));
    assert!(rig.hand_out().is_empty(), "lazily");
    reserve(&mut rig, id, 3);
    let moves = rig.hand_out();
    assert_eq!((moves[0].kind, moves[0].src_slot, moves[0].tokens), (MoveKind::Copy, second, 1));
    rig.done(moves[0].id);
    rig.commit(id, &[7, 8, 9]);
    let other = [&prompt[..=SIZE], &[7, 8, 9]].concat();
    assert_eq!((rig.matched(&prompt), rig.matched(&other)), (2 * SIZE, 2 * SIZE));
}

#[test]
fn truncation_beyond_the_end_or_into_uncomputed_tokens_is_refused() {
    let (mut rig, id) = written(8);
    rig.refused("it holds 6", |manager, now| manager.truncate(id, 7, now));
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let id = rig.ask(&Acquire { load: LoadMode::None, ..all_of(&prompt) }).unwrap();
    rig.refused("commit first", |manager, now| manager.truncate(id, SIZE + 1, now));
    rig.call(|manager, now| manager.truncate(id, SIZE, now)).unwrap();
    let spans = &rig.manager.lease(id).unwrap().plan().spans;
    assert_eq!(spans.iter().map(|span| (span.start, span.stop)).collect::<Vec<_>>(), [(0, 1)]);
}
