//! Point 8: commit appends written tokens; only full blocks enter the trie.

use kvtrie_core::{Acquire, Committed, Error, Kind, Layers, LoadMode, TierSpec};

use crate::rig::{ALL, GPU, HOST, Rig, SIZE, all_of, holes, settings, tier, tokens};

fn one(blocks: u32) -> Rig {
    Rig::new(settings(vec![tier(Kind::Gpu, blocks)]))
}

#[test]
fn only_full_blocks_enter_the_trie_and_the_tail_stays_with_the_lease() {
    let mut rig = one(8);
    let prompt = tokens(1, 3);
    let id = rig.acquire(&prompt);
    assert_eq!(rig.commit(id, &prompt[..3]), Committed::default());
    assert_eq!((rig.matched(&prompt), rig.manager.totals().0), (0, 0));
    let done = rig.commit(id, &prompt[3..10]);
    assert_eq!((done.new.len(), rig.matched(&prompt)), (2, 2 * SIZE));
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), 10);
    assert_eq!(rig.blocks(&prompt), done.new);
    rig.release(id);
    assert_eq!((rig.matched(&prompt), rig.manager.occupancy(GPU).free), (2 * SIZE, 6));
}

#[test]
fn a_committed_block_keeps_the_slot_that_it_was_written_to() {
    let mut rig = one(8);
    let prompt = tokens(1, 3);
    let id = rig.ask(&Acquire { reserve: 1, ..all_of(&prompt) }).unwrap();
    let slots = rig.slots(id);
    for token in &prompt {
        rig.commit(id, &[*token]);
        assert_eq!(rig.slots(id), slots, "no slot moves while tokens are appended");
    }
    assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
}

#[test]
fn the_tail_counts_against_the_room() {
    let mut rig = one(8);
    let id = rig.acquire(&tokens(1, 1));
    rig.commit(id, &[1, 2, 3]);
    assert_eq!(rig.manager.room_left(id).unwrap(), 1);
    rig.refused("has room for 1", |manager, now| manager.commit(id, &[4, 5], now));
    // Room for one more token after three of four takes no new slot; for two it does.
    rig.call(|manager, now| manager.reserve(id, 1, now)).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 7);
    rig.call(|manager, now| manager.reserve(id, 2, now)).unwrap();
    assert_eq!(rig.manager.occupancy(GPU).free, 6);
    rig.commit(id, &[4, 5]);
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), 5);
}

#[test]
fn the_first_commit_of_a_block_wins_and_the_second_learns_of_it() {
    let mut rig = one(8);
    let prompt = tokens(1, 2);
    let (one, two) = (rig.acquire(&prompt), rig.acquire(&prompt));
    let (winner, loser) = (rig.slots(one), rig.slots(two));
    let first = rig.commit(one, &prompt);
    assert!(first.duplicate.is_empty() && first.new.len() == 2);
    let second = rig.commit(two, &prompt);
    assert_eq!(
        second,
        Committed { duplicate: loser.clone(), canonical: first.new, ..Committed::default() }
    );
    // The loser keeps reading its own copy; the slot is not reused before release.
    assert_eq!((rig.slots(one), rig.slots(two)), (winner.clone(), loser));
    assert_eq!(rig.manager.occupancy(GPU).free, 4);
    rig.release(two);
    assert_eq!(rig.manager.occupancy(GPU).free, 6);
    rig.release(one);
    let third = rig.acquire(&prompt);
    assert_eq!(rig.slots(third), winner);
}

#[test]
fn a_block_computed_again_takes_the_place_of_a_copy_that_nothing_else_uses() {
    let mut rig = one(2);
    let prompt = tokens(1, 1);
    let (one, two) = (rig.acquire(&prompt), rig.acquire(&prompt));
    let own = rig.slots(two);
    rig.commit(one, &prompt);
    rig.release(one);
    // The tier has room for the tokens of this lease, and not for a second copy of any.
    assert_eq!(rig.commit(two, &prompt), Committed::default());
    rig.call(|manager, now| manager.reserve(two, SIZE, now)).unwrap();
    assert_eq!(rig.slots(two)[..1], own);
}

#[test]
fn prompts_that_diverge_share_their_prefix() {
    let mut rig = one(8);
    let stem = tokens(1, 2);
    let branch = |last: u32| [stem.as_slice(), &[last; SIZE]].concat();
    rig.serve(&branch(7));
    rig.serve(&branch(8));
    assert_eq!((rig.manager.totals().0, rig.manager.requested().inserted), (4, 4));
    let (seven, eight) = (rig.blocks(&branch(7)), rig.blocks(&branch(8)));
    assert_eq!(seven[..2], eight[..2]);
    assert_ne!(seven[2], eight[2]);
}

#[test]
fn a_batch_commits_completely_or_not_at_all() {
    let mut rig = one(8);
    let (one, two) = (rig.acquire(&tokens(1, 1)), rig.acquire(&tokens(2, 1)));
    let batch: [(u64, &[u32]); 2] = [(one, &[1, 2]), (two, &[3; 5])];
    rig.refused("has room for 4", |manager, now| manager.commit_many(&batch, now));
    let batch: [(u64, &[u32]); 3] = [(one, &[1]), (two, &[2]), (one, &[3])];
    rig.refused("is named twice", |manager, now| manager.commit_many(&batch, now));
    let batch: [(u64, &[u32]); 2] = [(one, &[1]), (99, &[2])];
    let error = rig.call(|manager, now| manager.commit_many(&batch, now)).unwrap_err();
    assert!(matches!(error, Error::Closed(_)), "{error}");
    let batch: [(u64, &[u32]); 2] = [(one, &[1, 2, 3, 4]), (two, &[2])];
    let done = rig.call(|manager, now| manager.commit_many(&batch, now)).unwrap();
    assert_eq!(done.iter().map(|c| c.new.len()).collect::<Vec<_>>(), [1, 0]);
    assert_eq!([one, two].map(|id| rig.manager.lease_tokens(id).unwrap()), [4, 1]);
}

#[test]
fn the_first_commit_confirms_the_spans_that_the_plan_recomputes() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, HOST);
    let id = rig.ask(&Acquire { load: LoadMode::None, ..all_of(&prompt) }).unwrap();
    assert_eq!(rig.manager.lease(id).unwrap().recompute().count(), 3);
    assert_eq!(rig.on(&prompt, GPU), [Layers::NONE; 3]);
    assert_eq!(rig.commit(id, &[]), Committed::default());
    assert_eq!(rig.on(&prompt, GPU), [ALL; 3]);
    assert_eq!(rig.manager.lease(id).unwrap().recompute().count(), 0);
    rig.release(id);
    let again = rig.acquire(&prompt);
    assert!(rig.awaits(again).is_empty());
}

#[test]
fn the_first_commit_of_a_hole_wins() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 8), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 1);
    rig.mark(&prompt, HOST);
    let ask = Acquire { load: LoadMode::None, ..all_of(&prompt) };
    let (one, two) = (rig.ask(&ask).unwrap(), rig.ask(&ask).unwrap());
    let own = rig.slots(two);
    rig.commit(one, &[]);
    let done = rig.commit(two, &[]);
    assert_eq!((done.duplicate, done.canonical), (own, rig.blocks(&prompt)));
    rig.release(one);
    rig.release(two);
    assert_eq!(rig.manager.occupancy(GPU).free, 7);
}

#[test]
fn computed_layers_join_the_resident_ones() {
    // Layers 2 and 3 were dropped below; the first tier still has 0 and 1.
    let gpu = TierSpec { layer_slots: true, ..tier(Kind::Gpu, 2) };
    let mut rig = Rig::new(kvtrie_core::Settings {
        policy: "checkerboard".to_owned(),
        ..holes(vec![gpu, tier(Kind::Host, 8)])
    });
    let (one, two) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&one);
    rig.serve(&two);
    rig.now += 1 << 30;
    rig.serve(&tokens(3, 1));
    let part = [Layers::new(0, 2)];
    assert_eq!((rig.on(&one, GPU), rig.on(&two, GPU)), (part.to_vec(), part.to_vec()));
    let id = rig.ask(&Acquire { load: LoadMode::None, ..all_of(&one) }).unwrap();
    let computed: Vec<_> = rig.manager.lease(id).unwrap().recompute().collect();
    assert_eq!(computed, [(0, Layers::new(2, 4))]);
    rig.run();
    assert_eq!(rig.commit(id, &[]), Committed::default());
    assert_eq!(rig.on(&one, GPU), [ALL]);
}
