//! Point 7: completion is the only point at which a copy counts.

use kvtrie_core::{Error, Kind, Layers, MoveId, Outcome, Scope, Settings};

use crate::rig::{ALL, GPU, HOST, Rig, all_of, settings, tier, tokens};

fn two(gpu: u32, host: u32) -> Settings {
    settings(vec![tier(Kind::Gpu, gpu), tier(Kind::Host, host)])
}

fn bad() -> Outcome<'static> {
    Outcome { ok: false, error: Some("EIO"), ..Outcome::default() }
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
fn a_batch_of_reports_with_an_unknown_move_is_refused_completely() {
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
fn layers_complete_one_by_one_so_that_layer_0_is_usable_early() {
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
fn a_layer_completes_when_every_rank_has_it() {
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
