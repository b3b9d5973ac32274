//! Metrics: hits and misses, evictions by cause, ages, latencies, copies and the log.

use kvtrie_core::{
    Acquire, Cause, Eviction, Hint, Kind, Layers, LeaseId, LoadMode, Mark, MoveKind, Outcome,
    Owner, Reason, Scope, Target, TierSpec, TierStats,
};

use crate::rig::{
    ALL, DISK, GPU, HOST, Rig, SIZE, all_of, holes, layered, retain, settings, tier, tokens,
};

fn rig(rooms: [u32; 2]) -> Rig {
    let mut settings = settings(vec![tier(Kind::Gpu, rooms[0]), tier(Kind::Host, rooms[1])]);
    settings.eviction_log = 3;
    Rig::new(settings)
}

fn by(stats: &TierStats, cause: Cause) -> u64 {
    stats.evicted[cause as usize]
}

fn last(rig: &Rig) -> Vec<Eviction> {
    rig.manager.evictions(usize::MAX).unwrap()
}

#[test]
fn hits_count_where_blocks_are_found_with_their_ages() {
    let mut rig = rig([6, 4]);
    rig.mark(&tokens(1, 3), HOST);
    rig.mark(&tokens(1, 2), GPU);
    rig.now += 500;
    let id = rig.acquire(&[&tokens(1, 3)[..], &[7; 9]].concat());
    let asked = rig.manager.requested();
    assert_eq!((asked.requests, asked.blocks, asked.tokens, asked.refused), (1, 5, 21, 0));
    let hits = [GPU, HOST].map(|tier| rig.manager.stats(tier).hits);
    assert_eq!((hits, rig.manager.stats(HOST).tokens_hit), ([2, 1], SIZE as u64));
    let ages = [GPU, HOST].map(|tier| rig.manager.times(tier).hit_age.sum());
    assert_eq!(ages, [2 * 500, 500]);
    assert_eq!(rig.manager.stats(HOST).promoted, 1);
    rig.run();
    rig.release(id);
    let prompt = tokens(2, 9);
    rig.ask(&all_of(&prompt)).unwrap_err();
    let asked = rig.manager.requested();
    assert_eq!((asked.requests, asked.refused, asked.blocks), (1, 1, 5));
}

#[test]
fn a_block_that_is_computed_in_part_is_no_hit() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 2)]));
    rig.serve(&tokens(1, 2));
    rig.serve(&tokens(2, 1));
    let id = rig.acquire(&tokens(1, 2));
    assert_eq!(rig.manager.lease(id).unwrap().matched(), 2 * SIZE);
    assert_eq!(rig.manager.stats(GPU).hits, 1);
}

/// A request that loads nothing by itself.
fn deferred(rig: &mut Rig, tokens: &[u32]) -> LeaseId {
    rig.ask(&Acquire { load: LoadMode::None, ..all_of(tokens) }).unwrap()
}

fn load(
    rig: &mut Rig,
    id: LeaseId,
    layers: Option<Layers>,
    blocks: std::ops::Range<usize>,
) -> usize {
    rig.call(|manager, now| manager.load(id, layers, Some(blocks), now)).unwrap().len()
}

/// Hits and the sum of their ages.
fn hits(rig: &Rig, tier: usize) -> (u64, u64, u128) {
    let ages = &rig.manager.times(tier).hit_age;
    assert_eq!(rig.manager.stats(tier).tokens_hit, rig.manager.stats(tier).hits * SIZE as u64);
    (rig.manager.stats(tier).hits, ages.count(), ages.sum())
}

#[test]
fn what_is_loaded_after_acquire_counts_as_a_hit_once() {
    for owner in [Owner::Kvtrie, Owner::Engine] {
        let gpu = TierSpec { owner, ..tier(Kind::Gpu, 8) };
        let mut rig = Rig::new(settings(vec![gpu, tier(Kind::Host, 8), tier(Kind::Disk, 8)]));
        let prompt = tokens(1, 6);
        rig.mark(&prompt, DISK);
        rig.mark(&prompt[..3 * SIZE], HOST);
        rig.now += 500;
        let id = deferred(&mut rig, &prompt);
        let all = |rig: &Rig| [GPU, HOST, DISK].map(|tier| hits(rig, tier));
        assert_eq!(all(&rig), [(0, 0, 0); 3], "nothing is loaded yet");
        assert_eq!(rig.manager.requested().undecided, 6);
        if owner == Owner::Engine {
            rig.call(|manager, _| manager.bind(id, 0, &[10, 11, 12, 13, 14, 15])).unwrap();
        }
        rig.now += 70;
        // Blocks that the engine has or computes are never loaded.
        assert_eq!(load(&mut rig, id, None, 1..3), 2);
        let host = (2, 2, 2 * 500);
        assert_eq!(all(&rig), [(0, 0, 0), host, (0, 0, 0)]);
        assert_eq!(load(&mut rig, id, None, 1..3), 0);
        rig.run();
        assert!(load(&mut rig, id, None, 1..5) > 0);
        assert_eq!(all(&rig), [(0, 0, 0), host, (2, 2, 2 * 500)]);
        rig.run();
        assert_eq!(load(&mut rig, id, None, 1..5), 0);
        assert_eq!(rig.manager.requested().undecided, 2);
        rig.release(id);
        assert_eq!(all(&rig), [(0, 0, 0), host, (2, 2, 2 * 500)]);
        let asked = rig.manager.requested();
        assert_eq!((asked.requests, asked.blocks, asked.undecided), (1, 6, 0));
    }
}

#[test]
fn what_acquire_has_counted_is_counted_by_no_load() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, HOST);
    let id = rig.acquire(&prompt);
    assert_eq!(hits(&rig, HOST).0, 3);
    assert_eq!(load(&mut rig, id, None, 0..3), 0);
    rig.run();
    rig.commit(id, &[]);
    rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
    rig.run();
    rig.call(|manager, now| manager.resume(id, 0, LoadMode::None, now)).unwrap();
    assert_eq!(rig.manager.requested().undecided, 0);
    assert_eq!(load(&mut rig, id, None, 0..3), 3);
    assert_eq!((hits(&rig, GPU).0, hits(&rig, HOST).0), (0, 3), "it is the same request");
}

#[test]
fn what_is_never_loaded_is_missed_when_its_lease_lets_go() {
    let mut rig = Rig::new(holes(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 8)]));
    let prompt = tokens(1, 3);
    rig.mark(&prompt, HOST);
    for suspended in [true, false] {
        let id = deferred(&mut rig, &prompt);
        assert_eq!(rig.manager.requested().undecided, 3);
        if suspended {
            rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
            assert_eq!(rig.manager.requested().undecided, 0);
        }
        rig.release(id);
        assert_eq!((rig.manager.requested().undecided, hits(&rig, HOST).0), (0, 0));
    }
    // Computed instead: as long as the lease is held it is undecided, forks of it are not.
    let id = deferred(&mut rig, &prompt);
    rig.run();
    rig.commit(id, &[]);
    let forks = rig.call(|manager, now| manager.fork(id, 2, now)).unwrap();
    assert_eq!(rig.manager.requested().undecided, 3);
    rig.release(id);
    assert_eq!(rig.manager.requested().undecided, 0);
    for fork in forks {
        assert_eq!(load(&mut rig, fork, None, 0..3), 0);
        rig.release(fork);
    }
    assert_eq!(hits(&rig, HOST).0, 0);
}

#[test]
fn a_block_counts_when_the_last_of_its_layers_is_loaded() {
    let mut rig = Rig::new(holes(vec![layered(Kind::Gpu, 4), layered(Kind::Host, 4)]));
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    let id = deferred(&mut rig, &prompt);
    assert_eq!(load(&mut rig, id, Some(Layers::new(2, 4)), 0..2), 4);
    assert_eq!(hits(&rig, HOST).0, 0, "its first layers may be computed");
    assert_eq!(load(&mut rig, id, Some(Layers::new(0, 2)), 0..1), 2);
    assert_eq!(hits(&rig, HOST).0, 1);
    assert_eq!(load(&mut rig, id, None, 0..2), 2);
    assert_eq!(load(&mut rig, id, None, 0..2), 0);
    assert_eq!((hits(&rig, GPU).0, hits(&rig, HOST).0), (0, 2));
}

#[test]
fn what_another_request_has_loaded_meanwhile_is_found_above() {
    let mut rig = rig([6, 4]);
    let prompt = tokens(1, 2);
    rig.mark(&prompt, HOST);
    rig.now += 30;
    let id = deferred(&mut rig, &prompt);
    let other = rig.acquire(&prompt);
    assert_eq!(hits(&rig, HOST), (2, 2, 0));
    rig.run();
    rig.release(other);
    assert_eq!(load(&mut rig, id, None, 0..2), 0);
    assert_eq!(hits(&rig, GPU), (2, 2, 2 * 30));
    assert_eq!(load(&mut rig, id, None, 0..2), 0);
    assert_eq!((hits(&rig, GPU).0, hits(&rig, HOST).0), (2, 2));
}

#[test]
fn latencies_run_from_handing_out_to_the_end() {
    let mut rig = rig([2, 4]);
    rig.mark(&tokens(1, 1), HOST);
    let id = rig.acquire(&tokens(1, 1));
    rig.now += 300;
    rig.manager.predict(&[], rig.now).unwrap();
    rig.manager.transmit("gpu up", 0, rig.now, 1).unwrap();
    let moves = rig.hand_out();
    rig.now += 70;
    rig.done(moves[0].id);
    let times = rig.manager.times(HOST);
    assert_eq!((times.load.count(), times.load.sum()), (1, 70));
    assert_eq!((times.store.count(), times.copy.count()), (0, 0));
    rig.release(id);
    rig.serve(&tokens(2, 2));
    assert_eq!(rig.manager.times(HOST).store.count(), 0, "it left clean");
    rig.serve(&tokens(3, 1));
    assert_eq!(rig.manager.times(HOST).store.count(), 1);
    let stats = [GPU, HOST].map(|tier| rig.manager.stats(tier));
    assert_eq!((stats[0].bytes_read, stats[0].bytes_written), (400, 400));
    assert_eq!((stats[1].bytes_read, stats[1].bytes_written), (400, 400));
}

#[test]
fn every_eviction_has_a_cause() {
    // Demand: the third block needs a slot.
    let mut rig = rig([2, 2]);
    for stem in 1..=3 {
        rig.serve(&tokens(stem, 1));
    }
    let gpu = rig.manager.stats(GPU);
    assert_eq!((by(&gpu, Cause::Demand), gpu.evicted_dirty, gpu.bytes_freed), (1, 1, 400));
    assert_eq!((gpu.copies, rig.manager.stats(HOST).copies), (2, 1));
    // Cleared by hand.
    let prompt = tokens(1, 1);
    let scope = Scope::default();
    let mark =
        Mark { tokens: &prompt, scope, tier: HOST, present: false, ready: None, first: None };
    rig.call(|manager, now| manager.mark(&mark, now)).unwrap();
    let host = rig.manager.stats(HOST);
    assert_eq!((by(&host, Cause::Cleared), host.dropped, host.copies), (1, 1, 0));
    // Suspended.
    let id = rig.acquire(&tokens(2, 1));
    rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
    assert_eq!(by(&rig.manager.stats(GPU), Cause::Suspended), 1);
    rig.run();
    rig.release(id);
    // Failed: the copy below cannot be read, and is removed once a good one is resident above.
    let id = rig.acquire(&tokens(2, 1));
    let load = rig.hand_out().iter().find(|known| known.kind == MoveKind::Load).unwrap().id;
    let good = rig.manager.stats(HOST).copies;
    rig.fail(load);
    assert_eq!(rig.manager.stats(HOST).copies, good - 1, "a bad copy is none");
    rig.run();
    rig.commit(id, &tokens(2, 1));
    rig.release(id);
    let host = rig.manager.stats(HOST);
    assert_eq!((by(&host, Cause::Failed), host.evicted_clean), (1, 1));
    // Reset forgets the rest; counters stay, the log does not.
    let before = rig.manager.stats(GPU);
    assert_eq!(last(&rig).len(), 3);
    rig.call(|manager, _| manager.reset()).unwrap();
    let after = rig.manager.stats(GPU);
    assert_eq!(by(&after, Cause::Reset), before.copies);
    assert_eq!((after.copies, after.clean, last(&rig).len()), (0, 0, 0));
    assert_eq!(rig.manager.times(GPU).evict_age.count(), after.evicted.iter().sum::<u64>());
}

#[test]
fn early_eviction_is_not_demand() {
    let watched = TierSpec { free_low: 0.5, ..tier(Kind::Gpu, 4) };
    let mut rig = Rig::new(settings(vec![watched, tier(Kind::Host, 2), tier(Kind::Disk, 9)]));
    for stem in 1..=6 {
        rig.serve(&tokens(stem, 1));
    }
    let host = rig.manager.stats(HOST);
    assert!(by(&host, Cause::Ahead) > 0, "{host:?}");
    assert_eq!(by(&rig.manager.stats(GPU), Cause::Ahead), 0, "above they stay valid");
}

#[test]
fn copies_are_clean_while_their_layers_are_resident_elsewhere() {
    let mut rig = rig([4, 4]);
    let seen = |rig: &Rig| {
        [GPU, HOST].map(|tier| {
            let stats = rig.manager.stats(tier);
            (stats.copies, stats.clean)
        })
    };
    rig.mark(&tokens(1, 2), GPU);
    assert_eq!(seen(&rig), [(2, 0), (0, 0)]);
    rig.mark(&tokens(1, 1), HOST);
    assert_eq!(seen(&rig), [(2, 1), (1, 1)], "on the last tier a copy above counts");
    rig.mark(&tokens(2, 4), GPU);
    assert_eq!(seen(&rig), [(4, 0), (1, 0)], "one was dropped clean, the other is on its way");
    rig.run();
    assert_eq!(seen(&rig), [(4, 0), (2, 0)]);
}

#[test]
fn a_run_evicted_at_once_counts_block_by_block() {
    let mut rig = rig([4, 4]);
    rig.mark(&tokens(1, 3), GPU);
    rig.mark(&tokens(1, 3), HOST);
    let seen = |rig: &Rig| [GPU, HOST].map(|tier| rig.manager.stats(tier));
    let [gpu, host] = seen(&rig);
    assert_eq!((gpu.copies, gpu.clean, host.copies, host.clean), (3, 3, 3, 3));
    rig.now += 90;
    let id = rig.acquire(&tokens(2, 3));
    let [gpu, host] = seen(&rig);
    assert_eq!((gpu.evicted_clean, by(&gpu, Cause::Demand), gpu.bytes_freed), (2, 2, 2 * 400));
    assert_eq!((gpu.copies, gpu.clean, host.copies, host.clean), (1, 1, 3, 1));
    let ages = &rig.manager.times(GPU).evict_age;
    assert_eq!((ages.count(), ages.sum()), (2, 2 * 90));
    let left = last(&rig).iter().map(|entry| (entry.position, entry.idle)).collect::<Vec<_>>();
    assert_eq!(left, [(2, 90), (1, 90)]);
    rig.release(id);
}

#[test]
fn demotion_by_a_hint_is_not_demand() {
    let mut rig = rig([4, 4]);
    rig.serve(&tokens(1, 3));
    let target = Target::Tokens { tokens: tokens(1, 3), scope: Scope::default() };
    rig.call(|manager, now| manager.hint(&[Hint::Demote { target, tier: HOST }], now)).unwrap();
    rig.run();
    let [gpu, host] = [GPU, HOST].map(|tier| rig.manager.stats(tier));
    assert_eq!((by(&gpu, Cause::Hinted), gpu.evicted_dirty), (3, 3));
    assert_eq!((gpu.copies, host.copies, host.demoted), (0, 3, 3));
}

#[test]
fn copies_that_a_hint_retains_are_reported() {
    let mut rig = rig([4, 4]);
    rig.serve(&tokens(1, 3));
    let target = Target::Tokens { tokens: tokens(1, 2), scope: Scope::default() };
    rig.call(|manager, now| manager.hint(&[Hint::Retain(retain(target, 90))], now)).unwrap();
    assert_eq!([GPU, HOST].map(|tier| rig.manager.stats(tier).retained), [2, 0]);
}

#[test]
fn a_block_computed_twice_is_reported_and_counted() {
    let mut rig = rig([4, 4]);
    let (one, two) = (rig.acquire(&tokens(1, 1)), rig.acquire(&tokens(1, 1)));
    rig.commit(one, &tokens(1, 1));
    rig.commit(two, &tokens(1, 1));
    let asked = rig.manager.requested();
    assert_eq!((asked.inserted, asked.duplicates), (1, 1));
}

#[test]
fn the_log_keeps_the_last_evictions_with_their_ranks() {
    let mut rig = rig([2, 9]);
    let tenant = Scope { tenant: b"one".to_vec(), lora: "two".to_owned(), ..Scope::default() };
    let id = {
        let ask = kvtrie_core::Acquire { scope: tenant, ..all_of(&[1, 2, 3, 4]) };
        rig.ask(&ask).unwrap()
    };
    rig.commit(id, &[1, 2, 3, 4]);
    rig.release(id);
    rig.now += 1000;
    for stem in 2..=6 {
        rig.serve(&tokens(stem, 1));
        if stem == 3 {
            let first = &last(&rig)[0];
            assert_eq!((&first.tenant[..], &first.lora[..]), (&b"one"[..], "two"));
        }
    }
    let log = last(&rig);
    assert_eq!(log.iter().map(|entry| entry.at).collect::<Vec<_>>(), [4000, 5000, 6000]);
    assert_eq!(rig.manager.evictions(1).unwrap(), log[2..]);
    let entry = &log[2];
    assert_eq!((entry.tier, entry.to, entry.layers), (GPU, Some(HOST), ALL));
    assert_eq!((entry.cause, entry.reason), (Cause::Demand, Reason::Demoted));
    assert_eq!((entry.position, entry.uses, entry.idle), (0, 1, 2000));
    // The remaining one was used a thousand nanoseconds ago, at the same cost.
    assert!((entry.value - entry.terms.cost / 2e-6).abs() < 1e-3 * entry.value);
    assert_eq!(entry.next.map(|next| next / entry.value), Some(2.0));
}

#[test]
fn audits_compare_victims_and_find_no_regret() {
    let mut rig = rig([2, 4]);
    rig.serve(&tokens(1, 2));
    let stats = rig.manager.stats(GPU);
    assert!(stats.compared > 3);
    assert_eq!((stats.regrets, stats.retained), (0, 0));
}

#[test]
fn a_failed_move_has_no_latency() {
    let mut rig = rig([1, 2]);
    rig.serve(&tokens(1, 1));
    let id = rig.acquire(&tokens(2, 1));
    let store = rig.hand_out()[0].id;
    let outcome = Outcome { ok: false, error: Some("EIO"), ..Outcome::default() };
    rig.report(&[store], &outcome).unwrap();
    let (stats, times) = (rig.manager.stats(HOST), rig.manager.times(HOST));
    assert_eq!((stats.moves, stats.failed, stats.bytes_written), (1, 1, 0));
    assert_eq!(times.store.count(), 0);
    rig.release(id);
}
