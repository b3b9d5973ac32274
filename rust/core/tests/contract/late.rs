//! Prefetches with a deadline: they begin as late as the lanes allow, and end in time.

use kvtrie_core::{
    Acquire, Answer, Hint, HintCode, Kind, LaneSpec, Scope, Settings, Target, Write,
};
use proptest::prelude::*;

use crate::contract::hints::{answer, path, say};
use crate::rig::{ALL, DISK, GPU, HOST, Rig, all_of, settings, share, tier, tokens};

const MS: u64 = 1_000_000;

/// A block takes 10 ms and the latency from disk.
const BLOCK: u64 = 10 * MS + 10;

/// A prefetch ends so long before its deadline, and an eighth of its time.
const STEP: u64 = 50 * MS;

fn slow_disk(blocks: u32) -> Settings {
    let mut tiers = vec![tier(Kind::Gpu, 8), tier(Kind::Host, blocks), tier(Kind::Disk, blocks)];
    for tier in &mut tiers {
        tier.write = Write::Through;
    }
    tiers[2].read = LaneSpec { bytes_per_s: 40_000, ..tiers[2].read.clone() };
    settings(tiers)
}

fn by_time(stem: u32, blocks: usize, deadline: u64) -> Hint {
    Hint::Prefetch { target: path(&tokens(stem, blocks)), tier: HOST, deadline: Some(deadline) }
}

/// A naive model: all loads that wait, and when the lane is idle.
#[derive(Default)]
struct Model {
    /// By, deadline, stem and blocks.
    waiting: Vec<(u64, u64, u32, u64)>,
    idle: u64,
    /// Whether there was ever more to load than time.
    overloaded: bool,
}

impl Model {
    fn add(&mut self, stem: u32, blocks: u64, deadline: u64, now: u64) {
        let by = deadline.saturating_sub(STEP + blocks * BLOCK / 8);
        self.waiting.push((by, deadline, stem, blocks));
        self.waiting.sort_unstable_by_key(|&(by, _, stem, _)| (by, stem));
        self.overloaded |= self.latest() < now.max(self.idle);
    }

    /// The latest time at which the first load can begin so that all end in time, one after another.
    fn latest(&self) -> u64 {
        let ends = (1..=self.waiting.len()).map(|count| {
            let together: u64 = self.waiting[..count].iter().map(|load| load.3 * BLOCK).sum();
            self.waiting[count - 1].0.saturating_sub(together)
        });
        ends.min().unwrap_or(u64::MAX)
    }

    /// The blocks that begin by `now`, by stem.
    fn begin(&mut self, now: u64) -> Vec<(u32, u64)> {
        let mut begun = Vec::new();
        while !self.waiting.is_empty() && self.latest() <= now.max(self.idle) {
            let (_, deadline, stem, blocks) = self.waiting.remove(0);
            let start = now.max(self.idle);
            let fit = (deadline.saturating_sub(start) / BLOCK).min(blocks);
            self.idle = if fit > 0 { start + fit * BLOCK } else { self.idle };
            begun.push((stem, fit));
        }
        begun.retain(|&(_, blocks)| blocks > 0);
        begun
    }
}

/// The blocks on their way to the host since the last call, by stem, in the order in which they go.
/// They are complete afterwards.
fn begun(rig: &mut Rig, deadlines: &[u64], in_time: bool) -> Vec<(u32, u64)> {
    let mut all: Vec<(u32, u64)> = Vec::new();
    for (stem, &deadline) in (0..).zip(deadlines) {
        let coming = rig.manager.lookup(&tokens(stem, 3), rig.now, &Scope::default(), 0);
        let blocks = coming.expect("a good lookup").blocks;
        let moves: Vec<_> = blocks
            .iter()
            .flat_map(|block| {
                block.copies.iter().filter(|copy| copy.tier == HOST && copy.ready > rig.now)
            })
            .collect();
        if !moves.is_empty() {
            assert!(!in_time || moves.iter().all(|copy| copy.ready <= deadline), "{stem} is late");
            all.push((stem, moves.len() as u64));
        }
    }
    rig.run();
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(share(400)))]

    /// No load begins before the latest time at which it can, nor after; all are there by their
    /// deadlines if the lane can carry that.
    #[test]
    fn loads_begin_as_late_as_all_deadlines_allow(
        steps in prop::collection::vec((0_u64..200, 1_usize..=3, 0_u64..900), 1..12),
    ) {
        let mut rig = Rig::new(slow_disk(256));
        let (mut model, mut deadlines) = (Model::default(), Vec::new());
        for stem in 0..12 {
            rig.mark(&tokens(stem, 3), DISK);
        }
        let play = |rig: &mut Rig, model: &mut Model, deadlines: &[u64]| {
            rig.call(|manager, now| manager.hint(&[], now)).expect("no hint is good");
            let mut wanted = model.begin(rig.now);
            wanted.sort_unstable();
            assert_eq!(begun(rig, deadlines, !model.overloaded), wanted, "at {}", rig.now);
        };
        let mut steps = steps.into_iter();
        let mut next = steps.next();
        let mut at = rig.now;
        loop {
            let hinted = next.map(|(gap, ..)| at + gap * MS);
            let due = rig.manager.next_due().expect("open");
            prop_assert!(due.is_none_or(|due| due <= model.latest()), "{due:?}");
            prop_assert_eq!(due.is_none(), model.waiting.is_empty());
            match (hinted, due) {
                (None, None) => break,
                (Some(hinted), due) if due.is_none_or(|due| due > hinted) => {
                    let (_, blocks, left) = next.take().expect("seen");
                    next = steps.next();
                    (at, rig.now) = (hinted, hinted);
                    play(&mut rig, &mut model, &deadlines);
                    let (stem, deadline) = (u32::try_from(deadlines.len()).unwrap(), hinted + left * MS);
                    deadlines.push(deadline);
                    model.add(stem, blocks as u64, deadline, hinted);
                    say(&mut rig, by_time(stem, blocks, deadline));
                    play(&mut rig, &mut model, &deadlines);
                }
                (_, due) => {
                    rig.now = due.expect("seen");
                    play(&mut rig, &mut model, &deadlines);
                }
            }
        }
    }
}

#[test]
fn a_request_that_comes_early_loads_at_once() {
    let mut rig = Rig::new(slow_disk(64));
    rig.mark(&tokens(1, 2), DISK);
    let reply = say(&mut rig, by_time(1, 2, 10_000 * MS));
    assert_eq!(answer(&reply), (Answer::Accepted, 2, 0));
    assert!(rig.hand_out().is_empty());
    rig.now = 5_000 * MS;
    let lease = rig.acquire(&tokens(1, 2));
    assert!(rig.run().iter().all(|known| known.lease == lease && known.dst <= HOST));
    assert_eq!(rig.on(&tokens(1, 2), GPU), [ALL; 2]);
}

#[test]
fn the_next_request_of_a_session_ends_its_load() {
    let mut rig = Rig::new(slow_disk(64));
    rig.serve_as(Some("chat"), &tokens(1, 2));
    let target = || Target::Session { name: "chat".to_owned(), scope: Scope::default() };
    let fetch = Hint::Prefetch { target: target(), tier: GPU, deadline: Some(10_000 * MS) };
    assert_eq!(answer(&say(&mut rig, fetch)), (Answer::Accepted, 2, 0));
    assert!(rig.manager.next_due().expect("open").is_some());
    let lease = rig
        .ask(&Acquire { session: Some("chat"), ..all_of(&tokens(1, 2)) })
        .expect("there is room");
    assert_eq!(rig.manager.next_due(), Ok(None));
    // A load of a lease ends with it.
    let fetch =
        Hint::Prefetch { target: Target::Lease(lease), tier: GPU, deadline: Some(20_000 * MS) };
    say(&mut rig, fetch);
    assert!(rig.manager.next_due().expect("open").is_some());
    rig.release(lease);
    assert_eq!(rig.manager.next_due(), Ok(None));
}

#[test]
fn blocks_that_are_demoted_while_a_load_waits_are_in_time() {
    let mut rig = Rig::new(slow_disk(64));
    rig.serve(&tokens(1, 3));
    // On the host there is nothing to load yet.
    let deadline = 10_000 * MS;
    say(&mut rig, by_time(1, 3, deadline));
    say(&mut rig, Hint::Demote { target: path(&tokens(1, 3)), tier: DISK });
    rig.run();
    assert!(rig.on(&tokens(1, 3), HOST).iter().all(|layers| layers.is_empty()));
    let start = deadline - STEP - 3 * BLOCK - 3 * BLOCK / 8;
    while let Some(due) = rig.manager.next_due().expect("open") {
        assert!(due <= start);
        rig.now = due;
        say(&mut rig, by_time(9, 1, deadline));
    }
    assert_eq!(rig.now, start);
    let moves = rig.run();
    assert!(moves.len() == 3 && moves.iter().all(|known| known.ready <= deadline));
}

#[test]
fn a_tenant_has_a_bounded_number_of_loads_that_wait() {
    let mut rig = Rig::new(slow_disk(64));
    rig.mark(&tokens(1, 1), DISK);
    let by_time = |more| {
        let target = path(&[tokens(1, 1), vec![more]].concat());
        Hint::Prefetch { target, tier: HOST, deadline: Some(10_000 * MS) }
    };
    let hints: Vec<Hint> = (0..=4096).map(by_time).collect();
    let last = rig.manager.hint(&hints, rig.now).expect("good hints").pop().expect("a reply");
    assert_eq!((last.answer, last.code), (Answer::Rejected, HintCode::Full), "{}", last.reason);
}
