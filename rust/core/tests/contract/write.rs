//! Point 11, first half: the write policies of a tier.

use kvtrie_core::{Kind, Layers, MoveKind, Reason, TierSpec, Write};

use crate::rig::{ALL, DISK, GPU, HOST, Rig, SIZE, settings, tier, tokens};

fn rig(write: Write, admit_after: u32) -> Rig {
    let gpu = TierSpec { write, admit_after, ..tier(Kind::Gpu, 2) };
    Rig::new(settings(vec![gpu, tier(Kind::Host, 8)]))
}

#[test]
fn through_copies_down_at_commit() {
    let mut rig = rig(Write::Through, 1);
    let prompt = tokens(1, 2);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt[..SIZE]);
    let moves = rig.hand_out();
    let shape: Vec<_> = moves.iter().map(|m| (m.kind, m.src, m.dst)).collect();
    assert_eq!(shape, [(MoveKind::Store, GPU, HOST)]);
    assert_eq!(rig.on(&prompt, GPU), [ALL], "the copy above stays valid during the store");
    rig.done(moves[0].id);
    assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST)), (vec![ALL], vec![ALL]));
    rig.commit(id, &prompt[SIZE..]);
    assert_eq!(rig.run().len(), 1);
}

#[test]
fn through_continues_down_the_tiers_that_write_through() {
    let through = |kind| TierSpec { write: Write::Through, ..tier(kind, 8) };
    let tiers = vec![through(Kind::Gpu), through(Kind::Host), tier(Kind::Disk, 8)];
    let mut rig = Rig::new(settings(tiers));
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    let places = [GPU, HOST, DISK].map(|tier| rig.on(&prompt, tier));
    assert_eq!(places, [vec![ALL], vec![ALL], vec![ALL]]);
}

#[test]
fn back_writes_a_victim_and_nothing_earlier() {
    let mut rig = rig(Write::Back, 1);
    rig.serve(&tokens(1, 1));
    rig.serve(&tokens(2, 1));
    assert_eq!(rig.manager.stats(HOST).moves, 0);
    rig.serve(&tokens(3, 1));
    assert_eq!(rig.manager.stats(HOST).moves, 1);
    assert_eq!(rig.on(&tokens(1, 1), HOST), [ALL]);
}

#[test]
fn never_drops_its_victims() {
    let mut rig = rig(Write::Never, 1);
    for stem in 1..4 {
        rig.serve(&tokens(stem, 1));
    }
    assert_eq!((rig.matched(&tokens(1, 1)), rig.manager.stats(HOST).moves), (0, 0));
    assert_eq!(rig.events()[0].reason, Reason::Dropped);
}

#[test]
fn a_block_is_worth_a_write_after_enough_uses() {
    let mut rig = rig(Write::Back, 2);
    let (once, twice) = (tokens(1, 1), tokens(2, 1));
    rig.serve(&once);
    rig.serve(&twice);
    rig.serve(&twice);
    rig.serve(&tokens(3, 2));
    assert_eq!((rig.matched(&once), rig.on(&twice, HOST)), (0, vec![ALL]));
}

#[test]
fn through_waits_for_the_uses_too() {
    let mut rig = rig(Write::Through, 3);
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    assert_eq!(rig.on(&prompt, HOST), [Layers::NONE]);
    rig.serve(&prompt);
    rig.serve(&prompt);
    // The third use: it is evicted with a write-back.
    rig.serve(&tokens(2, 2));
    assert_eq!(rig.on(&prompt, HOST), [ALL]);
}

#[test]
fn write_through_is_skipped_without_room() {
    let gpu = TierSpec { write: Write::Through, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 1)]));
    let held = tokens(9, 1);
    rig.mark(&held, HOST);
    let reading = rig.acquire(&held);
    let prompt = tokens(1, 1);
    let id = rig.acquire(&prompt);
    rig.commit(id, &prompt);
    assert_eq!((rig.on(&prompt, GPU), rig.on(&prompt, HOST)), (vec![ALL], vec![Layers::NONE]));
    rig.run();
    rig.release(reading);
    rig.release(id);
}
