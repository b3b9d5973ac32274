//! Point 13: one manager per scheduler process. It has no threads, clock or randomness,
//! so one lock around it is enough, and equal calls give equal moves.

use kvtrie_core::{Kind, Manager, Move, POLICIES, Settings, Structure, TierSpec, Write};

use crate::rig::{Rig, SIZE, layered, settings, tier, tokens};

fn shared<T: Send + Sync + 'static>() {}

#[test]
#[expect(clippy::disallowed_methods, reason = "the threads are the caller's")]
fn a_manager_is_send_and_sync_behind_a_lock() {
    shared::<Manager>();
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 4)]));
    let thread = std::thread::spawn(move || {
        rig.serve(&tokens(1, 2));
        rig
    });
    assert_eq!(thread.join().unwrap().matched(&tokens(1, 2)), 2 * SIZE);
}

/// Sixty requests with all of their moves.
fn replay(settings: &Settings) -> (Vec<Move>, Vec<u8>) {
    let mut rig = Rig::new(settings.clone());
    let mut log = Vec::new();
    let mut open = Vec::new();
    for turn in 0..60_u32 {
        let stem = turn * 7 % 11;
        let prompt = [tokens(stem, 2), tokens(100 + turn % 5, 1)].concat();
        let session = ["a", "b", "c"][turn as usize % 3];
        let ask = kvtrie_core::Acquire { session: Some(session), ..crate::rig::all_of(&prompt) };
        if let Ok(id) = rig.ask(&ask) {
            log.extend(rig.run());
            let held = rig.manager.lease_tokens(id).unwrap();
            rig.commit(id, &prompt[held..]);
            open.push(id);
        }
        if open.len() > 2 {
            rig.release(open.remove(turn as usize % 3));
        }
        rig.now += 17;
    }
    log.extend(rig.run());
    (log, rig.manager.snapshot())
}

#[test]
fn the_same_calls_give_the_same_moves_byte_for_byte() {
    let mut seen = Vec::new();
    for &policy in POLICIES {
        for structure in [Structure::LeafOnly, Structure::Holes] {
            let gpu = TierSpec { write: Write::Through, ..layered(Kind::Gpu, 12) };
            let tiers = vec![gpu, tier(Kind::Host, 14), tier(Kind::Disk, 16)];
            let settings = Settings { policy: policy.to_owned(), structure, ..settings(tiers) };
            let (moves, state) = replay(&settings);
            let (again, same) = replay(&settings);
            assert_eq!(format!("{moves:?}"), format!("{again:?}"));
            assert_eq!(state, same);
            assert!(moves.len() > 100, "{policy}: {}", moves.len());
            seen.push(format!("{moves:?}"));
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > 5, "the policies differ");
}
