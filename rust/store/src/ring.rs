//! `io_uring`, the kernel's I/O queue.
//!
//! Invariant: while the kernel has an operation, its memory and file stay in place and are used
//! only by the kernel. `run` never returns or unwinds before the kernel has returned all of them.
//! Cost: a system call for several operations, without an allocation per operation.

#![expect(
    unsafe_code,
    reason = "the kernel is handed addresses; the invariant above keeps them good"
)]

use std::io;
use std::os::fd::RawFd;
use std::sync::Mutex;

use io_uring::{IoUring, opcode, types};

use crate::claim::lock;
use crate::work::{Op, Work};

/// Limit of operations in flight per ring.
const DEPTH: u32 = 64;

/// Byte limit of an operation. The kernel counts in 31 bits.
const MOST: u32 = 1 << 30;

/// Pool of idle rings.
#[derive(Default)]
pub(crate) struct Rings {
    /// With the process id: a child after `fork` shares the kernel's side of its parent's rings.
    idle: Mutex<Vec<(u32, IoUring)>>,
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rings({} idle)", lock(&self.idle).len())
    }
}

/// Operations in the kernel.
struct Flight<'r, 'a> {
    ring: &'r mut IoUring,
    ops: Vec<Option<Op<'a>>>,
    free: Vec<usize>,
}

impl Rings {
    /// Check for kernel support, and keep a ring.
    pub(crate) fn probe(&self) -> io::Result<()> {
        let ring = Self::make()?;
        lock(&self.idle).push((std::process::id(), ring));
        Ok(())
    }

    fn make() -> io::Result<IoUring> {
        let ring = IoUring::new(DEPTH)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE) {
            Ok(ring)
        } else {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// Run all operations of a work. `file` returns an operation's descriptor.
    ///
    /// # Errors
    /// No ring could be created. The work was not called then.
    pub(crate) fn run<'a>(
        &self,
        work: &mut dyn Work<'a>,
        file: &dyn Fn(&mut Op<'a>) -> RawFd,
    ) -> io::Result<()> {
        let process = std::process::id();
        let found = lock(&self.idle).pop();
        let mut ring = match found {
            Some((owner, ring)) if owner == process => ring,
            other => {
                // A parent's ring. A child does not inherit its mappings, so it cannot be dropped.
                std::mem::forget(other);
                Self::make()?
            }
        };
        let mut flight = Flight {
            ring: &mut ring,
            ops: std::iter::repeat_with(|| None).take(DEPTH as usize).collect(),
            free: (0..DEPTH as usize).rev().collect(),
        };
        loop {
            while let Some(&at) = flight.free.last()
                && let Some(op) = work.next()
            {
                flight.free.pop();
                flight.begin(at, op, file);
            }
            flight.submit();
            let mut more = false;
            while work.between() {
                more = true;
                if !flight.ring.completion().is_empty() {
                    // Completions have arrived: feed the device before further hashing.
                    break;
                }
            }
            // Waiting with nothing in flight would never return.
            if flight.free.len() == DEPTH as usize {
                if more {
                    continue;
                }
                break;
            }
            for (op, moved) in flight.wait() {
                work.done(op, moved);
            }
        }
        drop(flight);
        lock(&self.idle).push((process, ring));
        Ok(())
    }
}

impl<'a> Flight<'_, 'a> {
    fn begin(&mut self, at: usize, mut op: Op<'a>, file: &dyn Fn(&mut Op<'a>) -> RawFd) {
        let fd = types::Fd(file(&mut op));
        let place = op.place();
        let length = u32::try_from(op.rest().len()).unwrap_or(MOST).min(MOST);
        let entry = if op.writes() {
            opcode::Write::new(fd, op.rest().as_ptr(), length).offset(place).build()
        } else {
            opcode::Read::new(fd, op.rest_mut().as_mut_ptr(), length).offset(place).build()
        };
        let entry = entry.user_data(at as u64);
        self.ops[at] = Some(op);
        // SAFETY: the operation owns the memory and the file until its completion is seen, and
        // dropping `self` waits for it. The queue is as long as `ops`.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "a ring has room for {DEPTH} operations");
    }

    /// Submit new entries, if any.
    fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            self.enter(0);
        }
    }

    fn enter(&mut self, wait_for: usize) {
        while let Err(error) = self.ring.submit_and_wait(wait_for) {
            let passes = matches!(
                error.kind(),
                io::ErrorKind::Interrupted
                    | io::ErrorKind::WouldBlock
                    | io::ErrorKind::ResourceBusy
            );
            if !passes {
                // The kernel may still write to memory freed by unwinding.
                std::process::abort();
            }
        }
    }

    /// Wait for a completion and take all arrived completions.
    fn wait(&mut self) -> Vec<(Op<'a>, io::Result<usize>)> {
        self.enter(1);
        let mut done = Vec::new();
        for entry in self.ring.completion() {
            let at = usize::try_from(entry.user_data()).expect("a place in `ops`");
            let op = self.ops[at].take().expect("a completion has an operation");
            self.free.push(at);
            let result = entry.result();
            let moved = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            done.push((op, moved));
        }
        done
    }
}

impl Drop for Flight<'_, '_> {
    fn drop(&mut self) {
        while self.free.len() < DEPTH as usize {
            drop(self.wait());
        }
    }
}
