//! Point 12: the index of a tier that outlived its manager.

use kvtrie_core::block::Layers;
use kvtrie_core::error::Error;
use kvtrie_core::manager::{Manager, Row, Settings};
use kvtrie_core::scope::Scope;
use kvtrie_core::tier::{Kind, Owner, TierSpec};

use crate::rig::{ALL, DISK, HOST, Rig, SIZE, layered, settings, tier, tokens};

fn three() -> Settings {
    settings(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4), tier(Kind::Disk, 4)])
}

fn row(parent: Option<usize>, tokens: &[u32], slot: u32, age: u64) -> Row {
    Row { parent, tokens: tokens.to_vec(), slot, age, uses: 1 }
}

fn load(rig: &mut Rig, tier: usize, rows: &[Row]) -> usize {
    let load = |manager: &mut Manager, now| manager.load_index(tier, &Scope::default(), rows, now);
    rig.call(load).unwrap()
}

#[test]
fn a_chain_is_found_again_in_its_slots() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 3);
    let blocks: Vec<&[u32]> = prompt.chunks(SIZE).collect();
    let rows =
        [row(None, blocks[0], 3, 9), row(Some(0), blocks[1], 0, 9), row(Some(1), blocks[2], 2, 9)];
    assert_eq!(load(&mut rig, DISK, &rows), 3);
    assert_eq!(rig.on(&prompt, DISK), [ALL; 3]);
    assert_eq!(rig.manager.occupancy(DISK).free, 1);
    rig.acquire(&prompt);
    let loads = rig.hand_out();
    let from: Vec<_> = loads.iter().filter(|m| m.src == DISK).map(|m| m.src_slot).collect();
    assert_eq!(from, [3, 0, 2]);
}

#[test]
fn ages_become_times_so_that_the_order_of_leaving_survives() {
    let mut rig = Rig::new(three());
    rig.now = 1_000_000;
    let ages = [500, 900_000, 100, 700];
    let prompts: Vec<_> = (1..=4).map(|stem| tokens(stem, 1)).collect();
    let rows: Vec<Row> =
        (0..4_u32).zip(&prompts).map(|(at, p)| row(None, p, at, ages[at as usize])).collect();
    load(&mut rig, DISK, &rows);
    let block = |rig: &Rig, at: usize| rig.blocks(&prompts[at])[0];
    let order = [1, 3, 0, 2];
    for (rank, at) in order.into_iter().enumerate() {
        let price = rig.manager.explain(block(&rig, at), DISK, rig.now).unwrap();
        assert_eq!((price.idle, price.rank), (ages[at], Some(rank)));
    }
}

#[test]
fn an_age_beyond_the_clock_counts_from_its_start() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 1);
    load(&mut rig, DISK, &[row(None, &prompt, 0, u64::MAX)]);
    let price = rig.manager.explain(rig.blocks(&prompt)[0], DISK, rig.now).unwrap();
    assert_eq!(price.idle, rig.now);
}

#[test]
fn rows_that_cannot_be_true_are_left_out_with_all_that_stands_behind_them() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 2);
    let (first, second) = prompt.split_at(SIZE);
    let rows = [
        row(None, &first[..3], 0, 0),
        row(Some(0), second, 1, 0),
        row(None, first, 99, 0),
        row(None, first, 2, 0),
        row(Some(3), second, 2, 0),
        row(Some(4), second, 3, 0),
    ];
    // A short block and what names it, a slot that is none, a slot that is taken and its child.
    assert_eq!(load(&mut rig, DISK, &rows), 1);
    assert_eq!((rig.on(&prompt, DISK), rig.manager.occupancy(DISK).free), (vec![ALL], 3));
}

#[test]
fn a_row_that_is_known_already_gives_its_slot_back() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 2);
    let (first, second) = prompt.split_at(SIZE);
    let rows = [row(None, first, 0, 0), row(None, first, 1, 0), row(Some(1), second, 2, 0)];
    assert_eq!(load(&mut rig, DISK, &rows), 2);
    assert_eq!((rig.on(&prompt, DISK), rig.manager.occupancy(DISK).free), (vec![ALL, ALL], 2));
}

#[test]
fn uses_are_remembered() {
    let mut rig = Rig::new(Settings { policy: "retention".to_owned(), ..three() });
    let prompt = tokens(1, 1);
    load(&mut rig, DISK, &[Row { uses: 7, ..row(None, &prompt, 0, 10) }]);
    let price = rig.manager.explain(rig.blocks(&prompt)[0], DISK, rig.now).unwrap();
    assert_eq!(price.terms.uses, 7);
}

#[test]
fn two_tiers_can_hold_the_same_blocks() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 1);
    load(&mut rig, DISK, &[row(None, &prompt, 0, 900)]);
    load(&mut rig, HOST, &[row(None, &prompt, 3, 100)]);
    assert_eq!((rig.on(&prompt, HOST), rig.on(&prompt, DISK)), (vec![ALL], vec![ALL]));
    let price = rig.manager.explain(rig.blocks(&prompt)[0], DISK, rig.now).unwrap();
    assert_eq!(price.idle, 100, "the younger age counts");
    assert_eq!(rig.manager.totals().0, 1);
}

#[test]
fn an_orphan_on_a_leaf_only_tier_is_not_taken_in() {
    // The disk lost the first block; what stands behind it would serve nobody.
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 2);
    let rows = [row(None, &prompt[..SIZE], 99, 0), row(Some(0), &prompt[SIZE..], 1, 0)];
    assert_eq!(load(&mut rig, DISK, &rows), 0);
    assert_eq!((rig.manager.totals().0, rig.manager.occupancy(DISK).free), (0, 4));
}

#[test]
fn what_the_index_cannot_mean_is_refused() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 1);
    let scope = Scope::default();
    let rows = [row(None, &prompt, 0, 0), row(Some(1), &prompt, 1, 0)];
    rig.refused("row 1 names row 1", |manager, now| manager.load_index(DISK, &scope, &rows, now));
    let mut rig = Rig::new(settings(vec![layered(Kind::Gpu, 4)]));
    rig.refused("layer_slots", |manager, now| manager.load_index(0, &scope, &rows[..1], now));
    let gpu = TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
    rig.refused("the engine owns", |manager, now| manager.load_index(0, &scope, &rows[..1], now));
}

#[test]
fn another_scope_may_follow_with_its_own_rows() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 1);
    load(&mut rig, DISK, &[row(None, &prompt, 0, 0)]);
    let other = Scope { tenant: b"b".to_vec(), ..Scope::default() };
    let rows = [row(None, &prompt, 1, 0)];
    let loaded = rig.call(|manager, now| manager.load_index(DISK, &other, &rows, now));
    assert!(matches!(loaded, Ok(1) | Err(Error::Config(_))));
    assert_eq!(loaded, Ok(1));
    assert_eq!(rig.manager.matched(&prompt, &other, 0).unwrap(), SIZE);
    assert_eq!(rig.on(&prompt, HOST), [Layers::NONE]);
}
