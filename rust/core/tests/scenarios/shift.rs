//! Loads that change: popularity that flips, a flood of prompts that come once, a scan over a loop.
//!
//! `learned` unlearns what no longer holds: once a phase has settled it finds at least what `lru` finds.

use kvtrie_core::{Acquire, Kind, Manager, Token};

use crate::rig::{settings, tier};

/// Requests per phase, and those of them after which it has settled.
const PHASE: usize = 2000;
const SETTLING: usize = 400;

struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(self.0 >> 33).unwrap() % bound
    }
}

/// Prompts of three phases.
fn prompts(mut next: impl FnMut(usize, u32) -> u32) -> Vec<u32> {
    (0..3)
        .flat_map(|phase| (0_u32..).take(PHASE).map(move |at| (phase, at)))
        .map(|(phase, at)| next(phase, at))
        .collect()
}

/// Shares of the blocks that are found in each phase: while it settles, and later.
fn shares(policy: &str, prompts: &[u32], blocks: u32) -> Vec<[f64; 2]> {
    let settings = settings(vec![tier(Kind::Gpu, 64 * blocks)]);
    let size = settings.block_tokens;
    let mut manager =
        Manager::new(kvtrie_core::Settings { policy: policy.to_owned(), ..settings }).unwrap();
    let found: Vec<f64> = (0..)
        .zip(prompts)
        .map(|(now, prompt)| {
            let tokens: Vec<Token> = (0..blocks * size).map(|at| prompt * 64 + at).collect();
            let id =
                manager.acquire(&Acquire { tokens: &tokens, ..Acquire::default() }, now).unwrap();
            let matched = manager.lease(id).unwrap().matched();
            manager.commit(id, &tokens[matched..], now).unwrap();
            manager.release(id, now).unwrap();
            f64::from(u32::try_from(matched).unwrap()) / f64::from(blocks * size)
        })
        .collect();
    let mean =
        |part: &[f64]| part.iter().sum::<f64>() / f64::from(u32::try_from(part.len()).unwrap());
    found
        .chunks(PHASE)
        .map(|phase| phase.split_at(SETTLING))
        .map(|(a, b)| [mean(a), mean(b)])
        .collect()
}

#[test]
fn learned_finds_what_lru_finds_soon_after_a_change() {
    let mut draw = Draw(7);
    let flip = prompts(|phase, _| {
        if draw.below(10) < 8 { [0, 50, 0][phase] + draw.below(40) } else { 1000 + draw.below(400) }
    });
    let flood =
        prompts(
            |phase, at| {
                if phase == 1 && draw.below(2) == 0 { 10_000 + at } else { draw.below(60) }
            },
        );
    let scan = prompts(|phase, at| if phase == 1 { 10_000 + at % 160 } else { draw.below(60) });
    for (name, prompts) in [("flip", flip), ("flood", flood), ("scan", scan)] {
        for blocks in [1, 2] {
            let [plain, learned] = ["lru", "learned"].map(|name| shares(name, &prompts, blocks));
            for (phase, ([early, late], [first, then])) in
                plain.into_iter().zip(learned).enumerate()
            {
                let place = format!("{name}, phase {phase}, prompts of {blocks} blocks");
                assert!(then >= late - 0.005, "{place}: {then:.3}, {late:.3} under lru");
                assert!(first >= early - 0.2, "{place}, first requests: {first:.3}, {early:.3}");
            }
        }
    }
}
