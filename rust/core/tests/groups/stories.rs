//! Random stories: every match is what attention can use.

use kvtrie_core::{Group, GroupKind, Owner, Settings, Structure, Write};
use proptest::prelude::*;

use crate::group_story::shared::above_shared;
use crate::group_story::{FULL, Step, Story, on};
use crate::rig::share;

/// One to three groups after the first.
pub(super) fn groups() -> impl Strategy<Value = Vec<Group>> {
    let sliding =
        (1_u64..30, 0_u64..6).prop_map(|(window, sinks)| GroupKind::Sliding { window, sinks });
    let chunked = (1_u64..30).prop_map(|chunk| GroupKind::Chunked { chunk });
    let kind = prop_oneof![3 => sliding, 2 => chunked, 2 => Just(GroupKind::State)];
    let group =
        (kind, 20_u64..900).prop_map(|(kind, slot_bytes)| Group { kind, slot_bytes, layers: 2 });
    prop::collection::vec(group, 1..4).prop_map(|rest| [vec![FULL], rest].concat())
}

/// Pages of each tier, resume points of a path that stay, and blocks between regular ones.
type Sizes = (u64, Vec<u64>, u32, u32);

/// Sizes of one to three tiers.
fn sizes() -> impl Strategy<Value = Sizes> {
    let every = prop_oneof![4 => Just(0), 1 => 1_u32..4];
    (6_u64..60, prop::collection::vec(4_u64..40, 0..3), 1_u32..4, every)
}

/// Policy, owner of the first tier, its growth reserve, and how each tier writes.
pub(super) type Ways = (&'static str, Owner, f64, [Write; 3]);

pub(super) fn ways() -> impl Strategy<Value = Ways> {
    (
        prop::sample::select(kvtrie_core::POLICIES),
        prop::sample::select(vec![Owner::Kvtrie, Owner::Nobody, Owner::Engine]),
        prop_oneof![3 => Just(0.0), 1 => Just(0.3)],
        prop::array::uniform3(prop::sample::select(vec![
            Write::Back,
            Write::Through,
            Write::Never,
        ])),
    )
}

fn steps(kinds: u8) -> impl Strategy<Value = Vec<Step>> {
    let step = (0..kinds, 0_u32..4, 0_usize..7, 1_usize..9, 0_usize..9);
    prop::collection::vec(step, 1..60)
}

/// Settings of a story.
fn settings_of(groups: &[Group], (pages, below, newest, every): Sizes, ways: Ways) -> Settings {
    let (policy, owner, growth, writes) = ways;
    let largest = groups.iter().map(|group| group.slot_bytes).max().unwrap();
    let bytes: Vec<u64> = std::iter::once(pages).chain(below).map(|n| n * largest).collect();
    let mut settings = on(groups, &bytes);
    policy.clone_into(&mut settings.policy);
    settings.block_events = 100_000;
    settings.tiers[0].growth_reserve = growth;
    // Of the number of pages, so that the seeds of earlier failures play what failed.
    settings.tiers[0].free_low = if pages % 3 == 0 { 0.6 } else { 0.0 };
    settings.tiers[0].owner = owner;
    // A fourth tier is the last one, which writes nothing.
    for (tier, write) in settings.tiers.iter_mut().zip(writes) {
        tier.write = write;
    }
    if let Some(groups) = &mut settings.groups {
        (groups.newest, groups.every) = (newest, every);
    }
    settings
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(share(300)))]

    #[test]
    fn a_match_is_what_attention_can_use(
        groups in groups(),
        sizes in sizes(),
        ways in ways(),
        steps in steps(18),
    ) {
        if let Some(mut story) = Story::new(settings_of(&groups, sizes, ways)) {
            story.play(&steps);
        }
    }

    #[test]
    fn a_match_over_holes_is_what_attention_can_use(
        groups in groups(),
        sizes in sizes(),
        ways in ways(),
        steps in steps(22),
    ) {
        let mut settings = settings_of(&groups, sizes, ways);
        settings.structure = Structure::Holes;
        if let Some(mut story) = Story::new(settings) {
            story.play(&steps);
        }
    }

    #[test]
    fn a_match_above_a_shared_store_is_what_attention_can_use(
        groups in groups(),
        sizes in (6_u64..60, prop::collection::vec(4_u64..40, 1..4), 1_u32..4, Just(0)),
        ways in ways(),
        holes: bool,
        steps in steps(22),
    ) {
        let mut settings = above_shared(settings_of(&groups, sizes, ways));
        settings.structure = if holes { Structure::Holes } else { Structure::LeafOnly };
        if let Some(mut story) = Story::new(settings) {
            story.play(&steps);
        }
    }
}
