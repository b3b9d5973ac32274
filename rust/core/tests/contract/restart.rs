//! Point 12: restoring the index of a tier that outlived its manager.

use kvtrie_core::{
    Acquire, Handle, Kind, Label, Layers, Manager, Mark, Outcome, Owner, Record, Row, Scope,
    ScopeOwner as Whose, Settings, Structure, TierSpec, Usage, Write, scope_key,
};

use crate::rig::{ALL, DISK, GPU, HOST, LAYERS, Rig, SIZE, holes, layered, settings, tier, tokens};

fn three() -> Settings {
    settings(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4), tier(Kind::Disk, 4)])
}

/// A row after another one, or the first of a tenant's scope.
fn row_of(tenant: &[u8], behind: Option<&Row>, tokens: &[u32], slot: u32, age: u64) -> Row {
    let scope = Whose { tenant: tenant.to_vec(), lora: String::new(), structure: None };
    let record = Record {
        parent: behind.map_or(scope_key("rig", 4, tenant, ""), |row| row.label.record.key()),
        scope: behind.is_none().then(|| Box::new(scope)),
        tokens: tokens.to_vec(),
        ..Record::default()
    };
    let usage = Usage { age, uses: 1, ..Usage::default() };
    Row { label: Label { record, usage }, slot, layers: ALL, group: 0 }
}

fn row(behind: Option<&Row>, tokens: &[u32], slot: u32, age: u64) -> Row {
    row_of(b"", behind, tokens, slot, age)
}

/// The rows of a sequence, block for block in these slots.
fn chain(tokens: &[u32], slots: &[u32]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (block, &slot) in tokens.chunks(SIZE).zip(slots) {
        rows.push(row(rows.last(), block, slot, 9));
    }
    rows
}

fn load(rig: &mut Rig, tier: usize, rows: &[Row]) -> usize {
    rig.call(|manager, now| manager.load_index(tier, rows, now)).unwrap()
}

fn index(rig: &mut Rig, tier: usize) -> Vec<Row> {
    rig.call(|manager, now| manager.index(tier, now)).unwrap()
}

#[test]
fn a_chain_is_found_again_in_its_slots() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 3);
    assert_eq!(load(&mut rig, DISK, &chain(&prompt, &[3, 0, 2])), 3);
    assert_eq!(rig.on(&prompt, DISK), [ALL; 3]);
    assert_eq!(rig.manager.occupancy(DISK).free, 1);
    rig.acquire(&prompt);
    let loads = rig.hand_out();
    let from: Vec<_> = loads.iter().filter(|m| m.src == DISK).map(|m| m.src_slot).collect();
    assert_eq!(from, [3, 0, 2]);
}

#[test]
fn ages_become_times_so_that_the_eviction_order_survives() {
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
fn a_use_before_the_clocks_zero_keeps_its_age() {
    let mut rig = Rig::new(three());
    let day = 24 * 3600 * 1_000_000_000;
    let ages = [3 * day, rig.now, 400 * day, u64::MAX];
    let prompts: Vec<_> = (1..=4).map(|stem| tokens(stem, 1)).collect();
    let rows: Vec<Row> =
        (0..4_u32).zip(&prompts).map(|(at, p)| row(None, p, at, ages[at as usize])).collect();
    load(&mut rig, DISK, &rows);
    for (at, rank) in [(0, 2), (1, 3), (2, 1), (3, 0)] {
        let block = rig.blocks(&prompts[at])[0];
        let price = rig.manager.explain(block, DISK, rig.now).unwrap();
        // The greatest age that fits is 146 years.
        assert_eq!((price.idle, price.rank), (ages[at].min((1 << 62) + rig.now), Some(rank)));
    }
}

#[test]
fn impossible_rows_are_skipped_with_their_descendants() {
    let prompt = tokens(1, 3);
    let good = chain(&prompt, &[0, 1, 2]);
    let mut short = good.clone();
    short[0].label.record.tokens.pop();
    let mut far = good.clone();
    far[0].slot = 99;
    let mut taken = good.clone();
    taken[1].slot = 0;
    let mut foreign = good.clone();
    foreign[0].label.record.parent = scope_key("another model", 4, b"", "");
    let mut forged = good.clone();
    forged[1].label.record.tokens[0] += 1;
    let mut tenant = good.clone();
    tenant[0].label.record.scope.as_mut().unwrap().tenant = b"b".to_vec();
    let mut digest = good.clone();
    digest[1].label.record.digests = vec![(4, b"behind the end".to_vec())];
    let mut layers = good.clone();
    layers[1].layers = Layers::new(1, LAYERS);
    let cases = [
        ("short", short, 0),
        ("far", far, 0),
        ("taken", taken, 1),
        ("foreign", foreign, 0),
        ("forged", forged, 2),
        ("tenant", tenant, 0),
        ("digest", digest, 1),
        ("layers", layers, 1),
        ("order", vec![good[1].clone(), good[0].clone()], 1),
        ("orphan", good[1..].to_vec(), 0),
        ("good", good, 3),
    ];
    for (what, rows, kept) in cases {
        let mut rig = Rig::new(three());
        assert_eq!(load(&mut rig, DISK, &rows), kept, "{what}");
        assert_eq!(rig.manager.totals().0, kept, "{what}");
        assert_eq!(rig.manager.occupancy(DISK).free, 4 - kept as u64, "{what}");
    }
}

#[test]
fn partial_blocks_are_loaded_in_holes_scopes() {
    let prompt = tokens(1, 2);
    let mut rows = chain(&prompt, &[0, 1]);
    rows[0].layers = Layers::new(2, LAYERS);
    rows[1].layers = Layers::new(0, 2);
    let mut rig = Rig::new(holes(three().tiers));
    // The lowest tier's range ends with the last layer.
    assert_eq!(load(&mut rig, DISK, &rows), 1);
    assert_eq!(rig.on(&prompt[..SIZE], DISK), [Layers::new(2, LAYERS)]);
}

#[test]
fn a_row_of_a_known_block_frees_its_slot() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 2);
    let mut rows = chain(&prompt, &[0, 2]);
    rows.insert(1, Row { slot: 1, ..rows[0].clone() });
    assert_eq!(load(&mut rig, DISK, &rows), 2);
    assert_eq!((rig.on(&prompt, DISK), rig.manager.occupancy(DISK).free), (vec![ALL, ALL], 2));
}

#[test]
fn slots_may_be_in_any_order() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 3);
    assert_eq!(load(&mut rig, DISK, &chain(&prompt, &[3, 0, 2])), 3);
    let slots: Vec<u32> = index(&mut rig, DISK).iter().map(|row| row.slot).collect();
    assert_eq!((slots, rig.manager.occupancy(DISK).free), (vec![3, 0, 2], 1));
    // The slot that is left serves the next block.
    assert_eq!(load(&mut rig, DISK, &[row(None, &tokens(2, 1), 1, 5)]), 1);
    assert_eq!(rig.manager.occupancy(DISK).free, 0);
}

#[test]
fn use_counts_are_restored() {
    let mut rig = Rig::new(Settings { policy: "retention".to_owned(), ..three() });
    let prompt = tokens(1, 1);
    let mut rows = chain(&prompt, &[0]);
    rows[0].label.usage.uses = 7;
    load(&mut rig, DISK, &rows);
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
fn given_blocks_have_the_rows_that_they_have_in_the_whole_index() {
    let mut rig = Rig::new(three());
    let (prompt, other) = (tokens(1, 3), tokens(2, 1));
    let mut known = rig.mark(&prompt, DISK);
    known.extend(rig.mark(&other, HOST));
    rig.now += 40;
    let all = index(&mut rig, DISK);
    assert_eq!((all.len(), all[2].label.usage.age), (3, 40));
    let of = |rig: &mut Rig, blocks: &[Handle]| {
        rig.call(|manager, now| manager.index_of(DISK, blocks, now)).unwrap()
    };
    // Not on the tier: the last one. In the order asked for, as often as asked for.
    let asked = [known[3], known[2], known[0], known[2]];
    assert_eq!(of(&mut rig, &asked), [all[2].clone(), all[0].clone(), all[2].clone()]);
    assert_eq!(of(&mut rig, &[]), []);
    // One that is on its way to the tier is not there yet, one that has left the trie never again.
    let host = Mark {
        tokens: &other,
        scope: Scope::default(),
        tier: HOST,
        present: false,
        ready: None,
        first: None,
    };
    rig.call(|manager, now| manager.mark(&host, now)).unwrap();
    let later = Mark { tier: DISK, present: true, ready: Some(rig.now + 9), ..host };
    let fresh = rig.call(|manager, now| manager.mark(&later, now)).unwrap()[0];
    assert_eq!(of(&mut rig, &[known[3], fresh]), []);
    rig.now += 9;
    assert_eq!(of(&mut rig, &[known[3], fresh])[0].label.record.tokens, other);
    rig.refused("no tier 3", |manager, now| manager.index_of(3, &[], now));
}

#[test]
fn a_contradictory_index_is_refused() {
    let mut rig = Rig::new(settings(vec![layered(Kind::Gpu, 4)]));
    rig.refused("layer_slots", |manager, now| manager.load_index(GPU, &[], now));
    rig.refused("layer_slots", |manager, now| manager.index(GPU, now));
    rig.refused("no tier 3", |manager, now| manager.index(3, now));
    let gpu = TierSpec { owner: Owner::Engine, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 4)]));
    rig.refused("the engine owns", |manager, now| manager.load_index(GPU, &[], now));
}

#[test]
fn nothing_is_restored_behind_a_lost_block() {
    let prompt = tokens(1, 2);
    let mut rig = Rig::new(three());
    rig.mark(&prompt, DISK);
    let rows = index(&mut rig, DISK);
    let mut again = Rig::new(Settings { ranks: 2, ..three() });
    again.mark(&prompt[..SIZE], HOST);
    let id = again.acquire(&prompt[..SIZE]);
    let moving = again.hand_out()[0].id;
    again.fail(moving);
    again.release(id);
    // The block stays until its load has ended on both ranks, and matches no request.
    assert_eq!((again.manager.totals().0, load(&mut again, DISK, &rows[1..])), (1, 0));
    again.report(&[moving], &Outcome { ok: false, rank: 1, ..Outcome::default() }).unwrap();
    assert_eq!((again.manager.totals().0, load(&mut again, DISK, &rows)), (0, 2));
}

#[test]
fn every_scope_is_found_again_with_its_structure_and_its_digests() {
    let mut rig = Rig::new(three());
    let prompt = tokens(1, 2);
    let scopes = [
        Scope { tenant: b"a".to_vec(), structure: Some(Structure::Holes), ..Scope::default() },
        Scope { lora: "b".to_owned(), extra: vec![(5, b"image".to_vec())], ..Scope::default() },
    ];
    for scope in &scopes {
        let mark = Mark {
            tokens: &prompt,
            scope: scope.clone(),
            tier: DISK,
            present: true,
            ready: None,
            first: None,
        };
        rig.call(|manager, now| manager.mark(&mark, now)).unwrap();
    }
    let rows = index(&mut rig, DISK);
    let mut again = Rig::new(three());
    assert_eq!(load(&mut again, DISK, &rows), 4);
    for scope in &scopes {
        assert_eq!(again.manager.matched(&prompt, scope, 0).unwrap(), 2 * SIZE);
    }
    let plain = Scope { extra: Vec::new(), ..scopes[1].clone() };
    assert_eq!(again.manager.matched(&prompt, &plain, 0).unwrap(), SIZE, "no image, no match");
    let other = Scope { structure: Some(Structure::LeafOnly), ..scopes[0].clone() };
    again.refused("structure", |manager, _| manager.matched(&prompt, &other, 0));
}

#[test]
fn written_blocks_are_restored_with_their_price() {
    let policies = ["retention", "weighted"];
    for (policy, structure) in policies.into_iter().zip([Structure::LeafOnly, Structure::Holes]) {
        let settings = || Settings { policy: policy.to_owned(), structure, ..three() };
        let mut rig = Rig::new(settings());
        for turn in 0..40_u32 {
            let long = tokens(1 + turn * 7 % 5, 1 + turn as usize % 3);
            rig.serve_as(Some(&format!("chat {}", turn % 5)), &long);
            rig.now += 1000;
        }
        for _ in 0..3 {
            rig.call(Manager::flush).unwrap();
            rig.run();
        }
        let rows = index(&mut rig, DISK);
        let mut again = Rig::new(settings());
        again.now = rig.now;
        load(&mut again, DISK, &rows);
        let found = index(&mut again, DISK);
        // Blocks after one that was on no disk are unreachable.
        assert!(found.len() > 1, "{policy}");
        assert!(found.iter().all(|row| rows.contains(row)), "{policy}");
        for row in &found {
            let price = |rig: &mut Rig| {
                let path = path_of(row, &rows);
                let block = *rig.blocks(&path).last().unwrap();
                let terms = rig.manager.explain(block, DISK, rig.now).unwrap();
                (terms.terms, terms.idle)
            };
            assert_eq!(price(&mut rig), price(&mut again), "{policy}");
        }
    }
}

/// All tokens up to the end of a row's block.
fn path_of(row: &Row, rows: &[Row]) -> Vec<u32> {
    let above = rows.iter().find(|other| other.label.record.key() == row.label.record.parent);
    let mut path = above.map_or(Vec::new(), |above| path_of(above, rows));
    path.extend(&row.label.record.tokens);
    path
}

#[test]
fn a_flush_leaves_usable_prefixes_on_the_last_tier() {
    // Leaf-only tiers evict leaves first: without a flush the disk holds unreachable blocks.
    let mut rig = Rig::new(three());
    for stem in 1..=3 {
        rig.serve(&tokens(stem, 4));
        rig.now += 10;
    }
    for _ in 0..3 {
        rig.call(Manager::flush).unwrap();
        rig.run();
    }
    let rows = index(&mut rig, DISK);
    let mut again = Rig::new(three());
    assert_eq!(load(&mut again, DISK, &rows), 4);
    assert_eq!(again.on(&tokens(3, 4), DISK), [ALL; 4], "the youngest is there whole");
}

#[test]
fn a_flush_ends_and_respects_never() {
    let host = TierSpec { write: Write::Never, ..tier(Kind::Host, 4) };
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4), host, tier(Kind::Disk, 4)]));
    rig.serve(&tokens(1, 4));
    assert_eq!(rig.call(Manager::flush).unwrap(), 4);
    rig.run();
    assert_eq!(rig.call(Manager::flush).unwrap(), 0);
    assert_eq!(rig.on(&tokens(1, 4), HOST), [ALL; 4]);
    assert_eq!(index(&mut rig, DISK), []);
}

#[test]
fn a_store_carries_its_record() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 2), tier(Kind::Disk, 8)]));
    let prompt = tokens(1, 2);
    rig.serve(&prompt);
    let id = rig.ask(&Acquire { tokens: &tokens(2, 2), ..Acquire::default() }).unwrap();
    let stores = rig.hand_out();
    assert_eq!(stores.len(), 2);
    for store in &stores {
        let label = store.label.as_ref().unwrap();
        assert_eq!(label.record.key(), store.key);
        let at = label.record.tokens[0] as usize % 1000;
        assert_eq!(label.record.tokens, prompt[at..at + SIZE]);
    }
    rig.run();
    rig.release(id);
}
