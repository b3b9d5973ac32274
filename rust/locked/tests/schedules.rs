//! Schedules of three threads at the lock, drawn at random.
//!
//! The source of `locked` is compiled here once more, with locks whose every turn a scheduler
//! chooses: the real manager behind the real lock. Half of the schedules are drawn uniformly, half
//! switch threads at few places only, which finds bugs that need one exact order.
//! `KVTRIE_SCHEDULES` is their number; `make fuzz-schedules` takes a hundred thousand.

mod story;

mod sync {
    pub(crate) use shuttle::sync::{LockResult, Mutex, MutexGuard, PoisonError};
}

// The paths that the source of `locked` imports from.
mod error {
    pub(crate) use kvtrie_core::{Error, Result};
}

mod manager {
    pub(crate) use kvtrie_core::Manager;
}

#[path = "../../core/src/locked.rs"]
#[expect(unreachable_pub, dead_code, reason = "it is a library's elsewhere")]
mod locked;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner, thread};
use story::{Mix, Written, play, seen};

/// Places at which a schedule of the second half switches threads.
const TURNS: usize = 3;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Plays a story per schedule; returns how many there were.
fn run(
    scheduler: impl Scheduler + 'static,
    seed: u64,
    written: Written,
    mix: &Arc<Mutex<Mix>>,
) -> usize {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    let (next, mix) = (AtomicU64::new(seed), Arc::clone(mix));
    Runner::new(scheduler, config).run(move || {
        let story = next.fetch_add(1, Ordering::Relaxed);
        play(story, written, |locked, work| locked.call(work), &mix);
    })
}

#[test]
#[expect(clippy::print_stdout, reason = "the run exists to print counts")]
fn every_schedule_is_as_if_one_thread_called() {
    let half = usize::try_from(number("KVTRIE_SCHEDULES", 2000) / 2).expect("it fits");
    let seed = number("KVTRIE_FUZZ_SEED", 1);
    let mix = Arc::default();
    let evenly = run(RandomScheduler::new_from_seed(seed, half), seed, Written::Inside, &mix);
    let seldom = run(PctScheduler::new_from_seed(seed, TURNS, half), seed, Written::Inside, &mix);
    assert_eq!((evenly, seldom), (half, half));
    println!("{evenly} schedules drawn evenly, {seldom} with {TURNS} turns, 3 threads each");
    let mix = mix.lock().unwrap_or_else(PoisonError::into_inner);
    for (what, times) in mix.iter() {
        println!("{times:>10}  {what}");
    }
    seen(&mix);
}

#[test]
#[should_panic(expected = "story")]
fn a_lock_released_between_a_call_and_its_note_is_found() {
    run(RandomScheduler::new_from_seed(1, 2000), 1, Written::Behind, &Arc::default());
}
