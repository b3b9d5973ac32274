//! A queue of threads, where the kernel has none.
//!
//! Invariant: a work is asked and told by the calling thread only; `run` returns when no thread has
//! an operation. Cost: a message each way per operation; threads are made at the first use.

use std::io;
use std::sync::mpsc::channel;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::work::{Op, Work};

/// As many operations are under way.
const DEPTH: usize = 16;

/// Threads that wait for the device.
pub(crate) fn pool() -> io::Result<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(DEPTH)
        .thread_name(|at| format!("kvtrie-disk-{at}"))
        .build()
        .map_err(io::Error::other)
}

/// Does all of a work's operations, each by `perform`.
pub(crate) fn run<'a>(
    pool: &ThreadPool,
    work: &mut dyn Work<'a>,
    perform: &(dyn Fn(&mut Op<'a>) -> io::Result<usize> + Sync),
) {
    let (give, take) = channel();
    pool.in_place_scope(|scope| {
        let mut flying = 0;
        loop {
            while flying < DEPTH
                && let Some(mut op) = work.next()
            {
                let give = give.clone();
                scope.spawn(move |_| {
                    let moved = perform(&mut op);
                    // Nobody takes it if the work has panicked meanwhile.
                    let _ = give.send((op, moved));
                });
                flying += 1;
            }
            let more = work.between();
            if flying == 0 {
                if more {
                    continue;
                }
                return;
            }
            let Ok((op, moved)) = take.recv() else { return };
            flying -= 1;
            work.done(op, moved);
        }
    });
}
