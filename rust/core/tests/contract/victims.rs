//! Order of eviction as only a manager shows it: rounded costs, and the age of sessions.

use kvtrie_core::{CostModel, Kind, Settings};

use crate::rig::{DISK, GPU, HOST, Rig, all_of, holes, settings, tier, tokens};

/// Sequences of one and two blocks, the first block of the longer one evicted; the others' costs
/// 1.4 and 1 are of one class if rounded by a half.
fn rounded(epsilon: f64) -> Rig {
    let cost = CostModel::affine(0.1, 1.0, 0.0, 1000.0).unwrap();
    let policy = "flat".to_owned();
    let settings = holes(vec![tier(Kind::Gpu, 3)]);
    let mut rig = Rig::new(Settings { epsilon, cost, policy, ..settings });
    rig.serve(&tokens(1, 2));
    rig.serve(&tokens(2, 1));
    rig.now = 12_000;
    rig.acquire(&tokens(3, 1));
    rig
}

#[test]
fn a_victim_by_rounded_costs_is_within_epsilon_and_counts_as_regret() {
    for (epsilon, older) in [(0.0, false), (0.5, true)] {
        let mut rig = rounded(epsilon);
        let dear = *rig.blocks(&tokens(1, 2)).last().unwrap();
        let cheap = rig.blocks(&tokens(2, 1))[0];
        let explain = |rig: &Rig, block| rig.manager.explain(block, GPU, rig.now).unwrap();
        let (dear, cheap) = (explain(&rig, dear), explain(&rig, cheap));
        // The values that are shown are not rounded: the younger block is worth less.
        assert!(cheap.value < dear.value && dear.value < 1.5 * cheap.value, "{dear:?} {cheap:?}");
        let ranks = (dear.rank, cheap.rank);
        assert_eq!(ranks, if older { (Some(0), Some(1)) } else { (Some(1), Some(0)) });
        let before = rig.manager.stats(GPU);
        rig.call(|_, _| Ok(())).unwrap();
        let after = rig.manager.stats(GPU);
        assert_eq!(after.compared - before.compared, 1);
        assert_eq!(after.regrets - before.regrets, u64::from(older), "by {epsilon}");
        assert!(older || after.regrets == 0);
    }
}

/// Two sessions of two blocks; of the first one only the front was used again.
fn sessions() -> Rig {
    let policy = "checkerboard".to_owned();
    let mut rig = Rig::new(Settings { policy, ..holes(vec![tier(Kind::Gpu, 4)]) });
    rig.serve_as(Some("a"), &tokens(1, 2));
    rig.serve_as(Some("b"), &tokens(2, 2));
    rig.now = 100_000;
    rig.serve_as(Some("a"), &tokens(1, 1));
    rig
}

#[test]
fn checkerboard_uses_the_age_of_the_session_not_of_the_block() {
    let mut rig = sessions();
    let ages = |rig: &Rig, stem| -> Vec<u64> {
        let idle = |&block| rig.manager.explain(block, GPU, rig.now).unwrap().idle;
        rig.blocks(&tokens(stem, 2)).iter().map(idle).collect()
    };
    let (young, old) = (ages(&rig, 1), ages(&rig, 2));
    assert!(
        young[0] == young[1] && old[0] == old[1] && young[1] * 64 < old[0],
        "{young:?} {old:?}"
    );
    let front = rig.blocks(&tokens(1, 2));
    // By the block's age the end of the first session would be evicted before that of the second.
    rig.acquire(&tokens(3, 2));
    assert_eq!(rig.blocks(&tokens(1, 2)), front);
    assert_eq!(rig.matched(&tokens(2, 2)), 0);
}

#[test]
fn a_block_has_the_age_of_the_session_that_used_it_last() {
    let mut rig = sessions();
    // A third session starts with the front of the second one, whose end stays old.
    rig.now = 200_000;
    rig.serve_as(Some("c"), &tokens(2, 1));
    let blocks = rig.blocks(&tokens(2, 2));
    let idle = |rig: &Rig, at: usize| rig.manager.explain(blocks[at], GPU, rig.now).unwrap().idle;
    assert!(idle(&rig, 0) * 64 < idle(&rig, 1));
    // Its next request makes all of it young again, and so does a request in flight.
    rig.now = 300_000;
    let id = rig.ask(&kvtrie_core::Acquire { session: Some("b"), ..all_of(&tokens(2, 1)) });
    assert_eq!((idle(&rig, 0), idle(&rig, 1)), (0, 0));
    rig.release(id.unwrap());
}

#[test]
fn the_end_of_a_suspended_lease_is_no_use_of_its_session() {
    let policy = "checkerboard".to_owned();
    let mut rig =
        Rig::new(Settings { policy, ..holes(vec![tier(Kind::Gpu, 4), tier(Kind::Host, 4)]) });
    let shared = tokens(1, 1);
    let session = Some("a");
    rig.serve_as(session, &shared);
    let ask = kvtrie_core::Acquire { session, ..all_of(&shared) };
    let id = rig.ask(&ask).unwrap();
    rig.call(|manager, now| manager.suspend(id, Kind::Host, now)).unwrap();
    rig.run();
    rig.now += 100_000;
    let block = rig.blocks(&shared)[0];
    let idle = |rig: &Rig| rig.manager.explain(block, HOST, rig.now).unwrap().idle;
    let before = idle(&rig);
    rig.release(id);
    assert!(before > 0 && idle(&rig) >= before, "{before} {}", idle(&rig));
}

#[test]
fn host_memory_above_a_shared_store_loses_clean_copies_first() {
    for (below, kept) in [(Kind::Remote, [0, 1]), (Kind::Disk, [1, 0])] {
        let mut rig =
            Rig::new(settings(vec![tier(Kind::Gpu, 2), tier(Kind::Host, 2), tier(below, 4)]));
        let (dirty, clean, new) = (tokens(1, 1), tokens(2, 1), tokens(3, 1));
        rig.mark(&dirty, HOST);
        // Used later than the dirty one, so worth more.
        rig.now += 10;
        rig.mark(&clean, HOST);
        rig.mark(&clean, DISK);
        rig.mark(&new, HOST);
        let on_host =
            |rig: &Rig, tokens| rig.on(tokens, HOST).iter().filter(|at| !at.is_empty()).count();
        assert_eq!([on_host(&rig, &clean), on_host(&rig, &dirty)], kept, "above {below:?}");
        // Without a clean copy the order is that of value. No victim waits for a shared store.
        rig.run();
        rig.now += 10;
        rig.mark(&tokens(4, 1), HOST);
        rig.run();
        assert_eq!(on_host(&rig, &tokens(4, 1)), 1);
        let shared = below == Kind::Remote;
        assert_eq!(rig.on(&dirty, DISK).len(), usize::from(!shared), "above {below:?}");
        assert_eq!(rig.manager.shared_stores(), (0, u64::from(shared)));
    }
}
