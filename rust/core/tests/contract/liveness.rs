//! Point 5, liveness: only leases can keep a request from being served.

use kvtrie_core::{
    Acquire, Error, Kind, LoadMode, MoveId, Outcome, POLICIES, Settings, Structure, TierSpec, Write,
};
use proptest::prelude::*;

use crate::rig::{GPU, Rig, SIZE, all_of, holes, layered, settings, share, tier, tokens};

/// Blocks of the first tier.
const ROOM: u32 = 5;

/// Hands out and ends every move. With `fails`, every n-th one fails, and half of these hang until
/// the rest has ended.
fn run(rig: &mut Rig, fails: Option<u64>) {
    let mut hanging: Vec<MoveId> = Vec::new();
    for _ in 0..200 {
        let moves = rig.hand_out();
        if moves.is_empty() && hanging.is_empty() {
            return;
        }
        if moves.is_empty() {
            let outcome = Outcome { ok: false, ..Outcome::default() };
            rig.report(&std::mem::take(&mut hanging), &outcome).unwrap();
        }
        for known in moves {
            let ok = fails.is_none_or(|every| known.id % every != 0);
            // A move that depends on a failed one has ended with it: it is never started or
            // reported.
            let hung = !ok && known.id % 2 == 0;
            let outcome = Outcome { ok, hung, ..Outcome::default() };
            if hung && rig.report(&[known.id], &outcome).is_ok() {
                hanging.push(known.id);
                continue;
            }
            match rig.report(&[known.id], &outcome) {
                Ok(_) | Err(Error::Config(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
    panic!("the moves never end");
}

/// Requests of one block up to all of the first tier over few stems; without leases or moves
/// between them.
fn serves_every_fitting_request(settings: &Settings, turns: u32, fails: Option<u64>) {
    let mut rig = Rig::new(settings.clone());
    for turn in 0..turns {
        let length = usize::try_from((turn * 7 + turn / 5) % ROOM).unwrap();
        let prompt = [tokens(turn * 5 % 4, length), vec![turn % 5; SIZE]].concat();
        for load in [LoadMode::All, LoadMode::Plan] {
            let id = rig.ask(&Acquire { load, ..all_of(&prompt) }).unwrap_or_else(|error| {
                panic!("request {turn} for {} blocks: {error}", length + 1);
            });
            run(&mut rig, fails);
            let held = rig.manager.lease_tokens(id).unwrap();
            let rest = &prompt[held..];
            // After failures the lease may have lost its slots; then it commits no tokens.
            if fails.is_none() || rig.manager.room_left(id).unwrap() >= rest.len() {
                rig.commit(id, rest);
            }
            rig.release(id);
            run(&mut rig, fails);
            assert_eq!(rig.manager.pending(), (0, 0));
        }
        rig.now += 1000;
    }
    assert_eq!(rig.manager.occupancy(GPU).coming, 0);
}

#[test]
fn every_fitting_request_is_served_on_a_single_tier() {
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        serves_every_fitting_request(&base(vec![tier(Kind::Gpu, ROOM)]), 300, None);
        serves_every_fitting_request(&base(vec![layered(Kind::Gpu, ROOM)]), 300, None);
    }
}

#[test]
fn a_full_lower_tier_blocks_no_request() {
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        for host in [1, 3, 4] {
            let tiers = vec![tier(Kind::Gpu, ROOM), tier(Kind::Host, host)];
            serves_every_fitting_request(&base(tiers), 300, None);
            let tiers = vec![layered(Kind::Gpu, ROOM), layered(Kind::Host, host)];
            serves_every_fitting_request(&base(tiers), 300, None);
        }
    }
}

#[test]
fn a_small_host_between_two_tiers_blocks_no_request() {
    for base in [settings as fn(Vec<TierSpec>) -> Settings, holes] {
        for host in [1, 2, 3, 6] {
            let tiers = vec![tier(Kind::Gpu, ROOM), tier(Kind::Host, host), tier(Kind::Disk, 9)];
            serves_every_fitting_request(&base(tiers), 300, None);
        }
    }
}

/// The parameters of a manager, short enough to read in a failure.
#[derive(Clone, Debug)]
struct Shape {
    /// Blocks, write policy, `admit_after` and `free_low` of each tier, fastest first.
    tiers: Vec<(u32, Write, u32, f64)>,
    /// Number of tiers, from the first on, that have layer slots.
    layered: usize,
    policy: &'static str,
    structure: Structure,
}

impl Shape {
    fn settings(&self) -> Settings {
        let kinds = [Kind::Gpu, Kind::Host, Kind::Disk, Kind::Remote];
        let most = if self.tiers.len() == 4 { 1 } else { 2 };
        let tiers = self.tiers.iter().zip(kinds).zip(0..).map(|((shape, kind), at)| {
            let (blocks, write, admit_after, free_low) = *shape;
            let blocks = if at == 0 { ROOM } else { blocks };
            let layer_slots = at < self.layered.min(most);
            TierSpec { write, admit_after, free_low, layer_slots, ..tier(kind, blocks) }
        });
        let policy = self.policy.to_owned();
        Settings { policy, structure: self.structure, ..settings(tiers.collect()) }
    }
}

fn any_shape() -> impl Strategy<Value = Shape> {
    let write = prop_oneof![Just(Write::Back), Just(Write::Through), Just(Write::Never)];
    let free_low = prop_oneof![2 => Just(0.0), 1 => Just(0.5)];
    let tiers = prop::collection::vec((2..9_u32, write, 1..3_u32, free_low), 1..=4);
    let structure = prop_oneof![Just(Structure::LeafOnly), Just(Structure::Holes)];
    (tiers, 0..3_usize, 0..POLICIES.len(), structure).prop_map(
        |(tiers, layered, policy, structure)| Shape {
            tiers,
            layered,
            policy: POLICIES[policy],
            structure,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: share(150),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_shape_of_manager_refuses_a_fitting_request(shape in any_shape()) {
        serves_every_fitting_request(&shape.settings(), 25, None);
    }

    #[test]
    fn failed_moves_do_not_leak_slots(shape in any_shape(), every in 2..9_u64) {
        serves_every_fitting_request(&shape.settings(), 25, Some(every));
    }
}

#[test]
fn a_block_stays_while_its_children_are_only_examined() {
    let shape = Shape {
        tiers: vec![
            (2, Write::Back, 1, 0.0),
            (5, Write::Through, 1, 0.5),
            (4, Write::Back, 1, 0.0),
        ],
        layered: 0,
        policy: "checkerboard",
        structure: Structure::LeafOnly,
    };
    serves_every_fitting_request(&shape.settings(), 25, Some(6));
}

#[test]
fn a_host_full_of_the_requests_own_blocks_does_not_refuse() {
    let tiers = vec![(2, Write::Back, 1, 0.0), (2, Write::Back, 1, 0.0), (3, Write::Back, 1, 0.0)];
    let (policy, structure) = ("weighted", Structure::LeafOnly);
    let shape = Shape { tiers, layered: 0, policy, structure };
    serves_every_fitting_request(&shape.settings(), 25, None);
}

#[test]
fn a_block_in_flight_down_is_not_dropped_to_make_room_for_itself() {
    let back = |blocks| (blocks, Write::Back, 1, 0.0);
    let tiers = vec![(2, Write::Through, 1, 0.0), back(2), (2, Write::Never, 1, 0.0), back(2)];
    let (policy, structure) = ("lru", Structure::LeafOnly);
    let shape = Shape { tiers, layered: 1, policy, structure };
    serves_every_fitting_request(&shape.settings(), 25, Some(4));
}

#[test]
fn early_stores_evict_nothing_from_the_tiers_above() {
    let tiers =
        vec![(2, Write::Through, 1, 0.5), (3, Write::Back, 2, 0.5), (4, Write::Back, 1, 0.0)];
    let (policy, structure) = ("flat", Structure::LeafOnly);
    let shape = Shape { tiers, layered: 2, policy, structure };
    serves_every_fitting_request(&shape.settings(), 25, Some(7));
}

#[test]
fn a_store_that_fails_in_transit_is_not_retried_forever() {
    let back = |free_low| (2, Write::Back, 1, free_low);
    let tiers = vec![back(0.5), back(0.0), back(0.0), back(0.0)];
    let (policy, structure) = ("lru", Structure::Holes);
    let shape = Shape { tiers, layered: 1, policy, structure };
    serves_every_fitting_request(&shape.settings(), 25, Some(3));
}

#[test]
fn a_block_in_flight_down_is_not_evicted_from_its_destination() {
    for seed in 0..u64::from(share(480)) {
        let tiers = vec![layered(Kind::Gpu, 3), layered(Kind::Host, 2), tier(Kind::Disk, 3)];
        let policy = POLICIES[usize::try_from(seed).unwrap() % POLICIES.len()].to_owned();
        let mut rig = Rig::new(Settings { layers: 3, policy, ..settings(tiers) });
        let mut state = seed;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..40 {
            let blocks = 1 + draw(3);
            let stems: Vec<u64> = (0..blocks).map(|_| draw(6)).collect();
            let stem = |&stem: &u64| [u32::try_from(stem).unwrap(); SIZE];
            rig.serve(&stems.iter().flat_map(stem).collect::<Vec<u32>>());
        }
    }
}

#[test]
fn a_block_that_two_tiers_refuse_in_turn_is_not_written_forever() {
    let through = (2, Write::Through, 1, 0.0);
    let tiers = vec![(2, Write::Back, 1, 0.5), through, through, (2, Write::Back, 1, 0.0)];
    let (policy, structure) = ("lru", Structure::LeafOnly);
    let shape = Shape { tiers, layered: 1, policy, structure };
    serves_every_fitting_request(&shape.settings(), 25, Some(2));
}
