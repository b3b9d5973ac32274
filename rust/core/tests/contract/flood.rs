//! A flood of hints: every request that succeeds without the hints succeeds with them.

use kvtrie_core::{
    Acquire, Error, Hint, Kind, LeaseId, POLICIES, Result, Retain, Settings, TierSpec,
};
use proptest::prelude::*;

use crate::contract::hints::{keep, path, say};
use crate::rig::{Rig, all_of, holes, retain, settings, share, tier, tokens};

/// A request that a manager without hints can serve.
fn fits(rig: &mut Rig, ask: &Acquire<'_>) -> Result<LeaseId> {
    let result = rig.ask(ask);
    assert!(!matches!(result, Err(Error::Config(_))), "{result:?}");
    result
}

fn three(seed: u64) -> Settings {
    let share = |kind, blocks| TierSpec {
        retained_share: 1.0,
        layer_slots: kind == Kind::Gpu && seed % 5 == 4,
        ..tier(kind, blocks)
    };
    let count = usize::try_from(seed % 3).expect("small") + 1;
    let tiers = [share(Kind::Gpu, 6), share(Kind::Host, 5), share(Kind::Disk, 7)];
    let policy = POLICIES[usize::try_from(seed / 3).expect("small") % POLICIES.len()].to_owned();
    let plain = if seed.is_multiple_of(2) {
        settings(tiers[..count].to_vec())
    } else {
        holes(tiers[..count].to_vec())
    };
    Settings { policy, ..plain }
}

/// Two managers with one past, with moves in flight and leases held; one of them is flooded with
/// hints. It must serve every request that the other one serves.
fn flooded(
    seed: u64,
    past: &[(u32, usize, u8)],
    flood: Vec<(u32, usize, u8)>,
    ask: (u32, usize, usize),
) -> std::result::Result<(), TestCaseError> {
    let mut rigs = [Rig::new(three(seed)), Rig::new(three(seed))];
    for rig in &mut rigs {
        let mut held: Vec<LeaseId> = Vec::new();
        for &(stem, blocks, end) in past {
            rig.now += 10;
            let prompt = tokens(stem, blocks);
            let Ok(id) = rig.ask(&all_of(&prompt)) else { continue };
            if end > 1 {
                rig.run();
            }
            if rig.awaits(id).is_empty() {
                let known = rig.manager.lease_tokens(id).unwrap();
                rig.commit(id, &prompt[known..]);
            }
            held.push(id);
            if end > 0 {
                rig.release(held.remove(0));
            }
        }
    }
    let [plain, hinted] = &mut rigs;
    for (stem, blocks, priority) in flood {
        keep(hinted, &tokens(stem, blocks), priority);
    }
    let (stem, blocks, reserve) = ask;
    let prompt = tokens(stem, blocks);
    let ask = Acquire { reserve, ..all_of(&prompt) };
    let (without, with) = (fits(plain, &ask), fits(hinted, &ask));
    prop_assert_eq!(without.is_ok(), with.is_ok(), "{:?} {:?}", without, with);
    let matched = |rig: &Rig, id| rig.manager.lease(id).unwrap().matched();
    if let (Ok(a), Ok(b)) = (without, with) {
        prop_assert_eq!(matched(plain, a), matched(hinted, b));
    }
    Ok(())
}

/// A block above one whose store is in flight can be written but not dropped, and the others have
/// to be dropped: the host has no room for all.
#[test]
fn some_victims_are_written_and_the_others_dropped() {
    let past = [(2, 3, 1), (6, 1, 1), (1, 2, 1), (6, 2, 1)];
    flooded(112, &past, vec![(1, 1, 36)], (3, 4, 5)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(share(400)))]

    #[test]
    fn a_flood_of_hints_takes_no_slots(
        seed in 0..600u64,
        past in prop::collection::vec((1..7u32, 1..4usize, 0..6u8), 0..25),
        flood in prop::collection::vec((1..7u32, 1..4usize, 0..=100u8), 1..12),
        ask in (1..9u32, 1..5usize, 0..12usize),
    ) {
        flooded(seed, &past, flood, ask)?;
    }

    /// The same over a sequence of requests with hints between them.
    #[test]
    fn hints_never_make_a_request_fail(
        seed in 0..600u64,
        ops in prop::collection::vec((1..9u32, 1..5usize, 0..=100u8, 0..5u8), 1..60),
    ) {
        let mut rigs = [Rig::new(three(seed)), Rig::new(three(seed))];
        for (stem, blocks, priority, kind) in ops {
            let prompt = tokens(stem, blocks);
            match kind {
                0..=2 => {
                    let fit = rigs.each_mut().map(|rig| {
                        rig.now += 10;
                        rig.run();
                        let id = fits(rig, &all_of(&prompt));
                        rig.run();
                        if let Ok(id) = id {
                            let known = rig.manager.lease_tokens(id).unwrap();
                            rig.commit(id, &prompt[known..]);
                            rig.release(id);
                        }
                        id.is_ok()
                    });
                    prop_assert_eq!(fit[0], fit[1]);
                }
                3 => drop(keep(&mut rigs[1], &prompt, priority)),
                _ => {
                    let owner = Some(format!("{}", priority % 3));
                    let ttl = Some(u64::from(priority) + 1);
                    let hint = Retain { owner, ttl, ..retain(path(&prompt), priority) };
                    say(&mut rigs[1], Hint::Retain(hint));
                }
            }
        }
    }
}
