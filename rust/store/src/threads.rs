//! Thread pool as an I/O queue, used without a kernel queue.
//!
//! Invariant: only the calling thread calls the work, and `run` returns when no thread has an
//! operation. Cost: two messages per operation. Threads start at the first use.

use std::io;
use std::sync::mpsc::channel;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::work::{Op, Work};

/// Limit of operations in flight.
const DEPTH: usize = 16;

/// Create the pool.
pub(crate) fn pool() -> io::Result<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(DEPTH)
        .thread_name(|at| format!("kvtrie-disk-{at}"))
        .build()
        .map_err(io::Error::other)
}

/// Run all operations of a work with `perform`.
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
                    // The receiver is gone after a panic of the work.
                    let _ = give.send((op, moved));
                });
                flying += 1;
            }
            let more = work.between();
            // Waiting with nothing in flight would never return.
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
