//! The same three threads as system threads, for `ThreadSanitizer`.
//!
//! `make fuzz-sanitize` runs it so. The standard library's own code is not instrumented there, so
//! the sanitizer cannot see how a thread waiting for a lock is woken; it can see a lock that is
//! tried until it is free, and with the argument `try` only that is used. There is no test harness,
//! whose own threads would be reported. Invariant: that of `story`. `KVTRIE_STORIES` is the number
//! of stories of each.

mod story;

mod locked {
    pub(crate) use kvtrie_core::Locked;
}

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;

use kvtrie_core::Manager;
use story::{Call, Written, play};

fn stories() -> u64 {
    std::env::var("KVTRIE_STORIES").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

fn try_until_free(mutex: &Mutex<Manager>) -> LockResult<MutexGuard<'_, Manager>> {
    loop {
        match mutex.try_lock() {
            Ok(manager) => return Ok(manager),
            Err(TryLockError::Poisoned(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => thread::yield_now(),
        }
    }
}

#[expect(clippy::print_stdout, reason = "the run exists to print counts")]
fn stress(call: Call) {
    let mix = Mutex::default();
    for seed in 0..stories() {
        play(seed, Written::Inside, call, &mix);
    }
    for (what, times) in mix.into_inner().unwrap_or_else(PoisonError::into_inner) {
        println!("{times:>10}  {what}");
    }
}

fn main() {
    stress(|locked, work| locked.call_by(try_until_free, work));
    if std::env::args().all(|argument| argument != "try") {
        stress(|locked, work| locked.call(work));
    }
}
