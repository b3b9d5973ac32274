//! Point 2: a residency is one contiguous range of layers; which end of it stays.

use kvtrie_core::{Action, DropOrder, Kind, Layers, Reason, Settings};

use crate::rig::{DISK, GPU, HOST, Rig, holes, layered, settings, tier, tokens};

fn checkerboard(settings: Settings) -> Rig {
    Rig::new(Settings { policy: "checkerboard".to_owned(), ..settings })
}

/// Two old blocks fill the first tier; then half of each is evicted from it.
fn half_out(settings: Settings) -> (Rig, [Vec<u32>; 2]) {
    let mut rig = checkerboard(settings);
    let old = [tokens(1, 1), tokens(2, 1)];
    rig.serve(&old[0]);
    rig.serve(&old[1]);
    rig.now += 1 << 30;
    rig.serve(&tokens(3, 1));
    (rig, old)
}

#[test]
fn the_first_tier_keeps_layer_0_and_the_lowest_tier_the_last_layer() {
    let (rig, old) = half_out(holes(vec![layered(Kind::Gpu, 2), tier(Kind::Host, 8)]));
    for block in old {
        assert_eq!(rig.on(&block, GPU), [Layers::new(0, 2)]);
        assert_eq!(rig.on(&block, HOST), [Layers::new(2, 4)]);
    }
}

#[test]
fn a_single_tier_is_the_lowest_and_drops_its_shallow_layers() {
    let (rig, old) = half_out(holes(vec![layered(Kind::Gpu, 2)]));
    for block in old {
        assert_eq!(rig.on(&block, GPU), [Layers::new(2, 4)]);
    }
}

#[test]
fn a_single_tier_keeps_layer_0_in_the_source_documents_order() {
    let settings = holes(vec![layered(Kind::Gpu, 2)]);
    let (rig, old) = half_out(Settings { drop_order: DropOrder::Seed, ..settings });
    for block in old {
        assert_eq!(rig.on(&block, GPU), [Layers::new(0, 2)]);
    }
}

/// Four old blocks, each spread over three tiers.
fn spread() -> (Rig, [Vec<u32>; 4]) {
    let tiers = vec![layered(Kind::Gpu, 4), layered(Kind::Host, 2), tier(Kind::Disk, 8)];
    let mut rig = checkerboard(holes(tiers));
    let old = [1, 2, 3, 4].map(|stem| tokens(stem, 1));
    for block in &old {
        rig.serve(block);
    }
    rig.now += 1 << 30;
    // Two new blocks push layers 3 and 2 of every old one down to the host and fill it; a copy
    // that comes to the host from elsewhere pushes layer 3 of each on to the disk.
    rig.serve(&tokens(5, 1));
    rig.serve(&tokens(6, 1));
    rig.mark(&tokens(7, 1), HOST);
    rig.run();
    (rig, old)
}

#[test]
fn a_middle_tier_may_hold_any_range() {
    let (rig, old) = spread();
    for block in &old {
        let on = [GPU, HOST, DISK].map(|tier| rig.on(block, tier)[0]);
        assert_eq!(on, [Layers::new(0, 2), Layers::new(2, 3), Layers::new(3, 4)]);
    }
}

#[test]
fn a_scattered_block_is_computed_to_its_last_gap_and_loaded_behind() {
    let (mut rig, [block, ..]) = spread();
    rig.unmark(&block, GPU);
    let id = rig.acquire(&block);
    let lease = rig.manager.lease(id).expect("held");
    assert_eq!(lease.recompute().collect::<Vec<_>>(), [(0, Layers::new(0, 2))]);
    let spans = lease.plan().spans.iter().map(|span| (span.action, span.tier, span.layers));
    let wanted = [
        (Action::Recompute, GPU, Layers::new(0, 2)),
        (Action::Load, HOST, Layers::new(2, 3)),
        (Action::Load, DISK, Layers::new(3, 4)),
    ];
    assert_eq!(spans.collect::<Vec<_>>(), wanted);
}

#[test]
fn a_layer_that_would_leave_a_gap_below_is_dropped_not_written() {
    let tiers = vec![layered(Kind::Gpu, 4), layered(Kind::Host, 2)];
    let mut rig = checkerboard(holes(tiers));
    let old = [1, 2, 3, 4].map(|stem| tokens(stem, 1));
    for block in &old {
        rig.serve(block);
    }
    rig.now += 1 << 30;
    rig.serve(&tokens(5, 1));
    rig.serve(&tokens(6, 1));
    rig.mark(&tokens(7, 1), HOST);
    // The host has dropped layer 2 of each, so layer 1 could not join layer 3 there.
    assert_eq!(old.each_ref().map(|block| rig.on(block, HOST)[0]), [Layers::new(3, 4); 4]);
    rig.events();
    rig.serve(&tokens(8, 1));
    let left: Vec<_> = rig.events().iter().map(|e| (e.tier, e.layers, e.reason)).collect();
    assert_eq!(left, [(GPU, Layers::new(0, 2), Reason::Dropped); 2]);
    assert_eq!(rig.on(&old[0], GPU), [Layers::NONE]);
    assert_eq!(rig.on(&old[0], HOST), [Layers::new(3, 4)]);
}

#[test]
fn one_record_per_block_and_tier_serves_any_number_of_layers() {
    let mut rig = Rig::new(Settings { layers: 500, ..settings(vec![tier(Kind::Gpu, 2)]) });
    let prompt = tokens(1, 1);
    rig.serve(&prompt);
    assert_eq!(rig.on(&prompt, GPU), [Layers::new(0, 500)]);
    assert_eq!(rig.manager.occupancy(GPU).free, 1);
}
