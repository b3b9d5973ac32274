//! Fault injection: a device wrapper with failures on demand.
//!
//! Invariant: the same seed and calls give the same faults. All calls without a fault go to the
//! inner device. Cost: a lock per call. Stores without faults do not use it.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::claim::lock;
use crate::device::{Access, Device, Item, TransferPath};
use crate::file::{File, Size};
use crate::pages::SIZE;
use crate::work::{Op, Work};

/// Kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A read fails with `EIO`.
    Read,
    /// A write fails with `EIO`.
    Write,
    /// A sync of a file or folder fails with `EIO`.
    Sync,
    /// A read returns fewer bytes than requested, but at least one.
    ShortRead,
    /// A write takes fewer bytes than given, but at least one.
    ShortWrite,
    /// A write, a new file or a rename fails with `ENOSPC`.
    NoSpace,
    /// Opening a file for writing fails with `EACCES`.
    Denied,
}

impl Fault {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Sync,
        Self::ShortRead,
        Self::ShortWrite,
        Self::NoSpace,
        Self::Denied,
    ];

    /// Name in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Sync => "sync",
            Self::ShortRead => "short-read",
            Self::ShortWrite => "short-write",
            Self::NoSpace => "no-space",
            Self::Denied => "denied",
        }
    }
}

/// Frequency of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// In this number of calls per thousand, drawn from the seed.
    PerMille(u32),
    /// Once, after this number of calls.
    After(u64),
    /// In every call after this number of calls.
    From(u64),
}

/// Kinds of calls stopped by the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// Reads of files.
    Read,
    /// Writes to files.
    Write,
    /// Syncs of files and folders.
    Sync,
}

#[derive(Debug)]
struct Plan {
    random: u64,
    chances: BTreeMap<Fault, Chance>,
    injected: BTreeMap<Fault, u64>,
    stopped: Vec<Call>,
    waiting: usize,
    /// Queued operations in flight, by the address of their file.
    in_flight: BTreeMap<usize, usize>,
    most: (usize, usize),
}

#[derive(Debug)]
struct Shared {
    plan: Mutex<Plan>,
    gate: Condvar,
}

/// Fault-injecting device.
#[derive(Debug)]
pub struct Faults {
    inner: Arc<dyn Device>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct FaultyFile {
    inner: Arc<dyn File>,
    shared: Arc<Shared>,
}

impl Faults {
    /// Wrap `inner`, without faults.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>, seed: u64) -> Self {
        let plan = Plan {
            random: seed,
            chances: BTreeMap::new(),
            injected: BTreeMap::new(),
            stopped: Vec::new(),
            waiting: 0,
            in_flight: BTreeMap::new(),
            most: (0, 0),
        };
        let shared = Shared { plan: Mutex::new(plan), gate: Condvar::new() };
        Self { inner, shared: Arc::new(shared) }
    }

    /// Inject a fault from now on, with a frequency.
    pub fn inject(&self, fault: Fault, chance: Chance) {
        lock(&self.shared.plan).chances.insert(fault, chance);
    }

    /// End all faults.
    pub fn heal(&self) {
        lock(&self.shared.plan).chances.clear();
    }

    /// Number of injected faults of a kind.
    #[must_use]
    pub fn injected(&self, fault: Fault) -> u64 {
        lock(&self.shared.plan).injected.get(&fault).copied().unwrap_or(0)
    }

    /// Maximum number of queued operations in flight since the last call, and of files with
    /// operations in flight.
    #[must_use = "it resets the maximum"]
    pub fn most_at_once(&self) -> (usize, usize) {
        std::mem::take(&mut lock(&self.shared.plan).most)
    }

    /// Stop calls of these kinds until the gate opens.
    pub fn close_gate(&self, calls: &[Call]) {
        lock(&self.shared.plan).stopped = calls.to_vec();
    }

    /// Release all stopped calls.
    pub fn open_gate(&self) {
        lock(&self.shared.plan).stopped.clear();
        self.shared.gate.notify_all();
    }

    /// Number of stopped calls.
    #[must_use]
    pub fn hanging(&self) -> usize {
        lock(&self.shared.plan).waiting
    }

    /// Wait until at least `hanging` calls are stopped.
    pub fn wait_for(&self, hanging: usize) {
        let plan = lock(&self.shared.plan);
        let fewer = |plan: &mut Plan| plan.waiting < hanging;
        drop(self.shared.gate.wait_while(plan, fewer).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    fn pass(&self, call: Call) {
        let mut plan = lock(&self.plan);
        if !plan.stopped.contains(&call) {
            return;
        }
        plan.waiting += 1;
        self.gate.notify_all();
        let stopped = |plan: &mut Plan| plan.stopped.contains(&call);
        plan = self.gate.wait_while(plan, stopped).unwrap_or_else(PoisonError::into_inner);
        plan.waiting -= 1;
    }

    /// Draw whether a fault occurs in this call.
    fn occurs(&self, fault: Fault) -> bool {
        let mut plan = lock(&self.plan);
        let Some(chance) = plan.chances.get(&fault).copied() else { return false };
        let next = match chance {
            Chance::PerMille(_) => Some(chance),
            Chance::After(0) => None,
            Chance::After(left) => Some(Chance::After(left - 1)),
            Chance::From(left) => Some(Chance::From(left.saturating_sub(1))),
        };
        match next {
            Some(next) => plan.chances.insert(fault, next),
            None => plan.chances.remove(&fault),
        };
        let occurs = match chance {
            Chance::PerMille(often) => plan.below(1000) < u64::from(often),
            Chance::After(left) | Chance::From(left) => left == 0,
        };
        if occurs {
            *plan.injected.entry(fault).or_default() += 1;
        }
        occurs
    }

    fn fail(&self, fault: Fault, error: rustix::io::Errno) -> io::Result<()> {
        if self.occurs(fault) { Err(error.into()) } else { Ok(()) }
    }

    /// Apply the faults to a queued operation, or limit its length.
    fn apply(&self, op: &mut Op<'_>) -> io::Result<()> {
        if op.writes() {
            self.pass(Call::Write);
            self.fail(Fault::Write, rustix::io::Errno::IO)?;
            self.fail(Fault::NoSpace, rustix::io::Errno::NOSPC)?;
            op.most = self.short(Fault::ShortWrite, op.rest().len());
        } else {
            self.pass(Call::Read);
            self.fail(Fault::Read, rustix::io::Errno::IO)?;
            op.most = self.short(Fault::ShortRead, op.rest().len());
        }
        Ok(())
    }

    /// Count the start or end of an operation.
    fn count(&self, op: &Op<'_>, begins: bool) {
        let file = Arc::as_ptr(&op.file).addr();
        let mut plan = lock(&self.plan);
        let count = plan.in_flight.entry(file).or_default();
        *count = if begins { *count + 1 } else { count.saturating_sub(1) };
        plan.in_flight.retain(|_, count| *count > 0);
        let now = (plan.in_flight.values().sum(), plan.in_flight.len());
        plan.most = (plan.most.0.max(now.0), plan.most.1.max(now.1));
    }

    /// Number of bytes to transfer, `length` or fewer.
    fn short(&self, fault: Fault, length: usize) -> usize {
        if length < 2 || !self.occurs(fault) {
            return length;
        }
        let most = length as u64 - 1;
        let short = 1 + usize::try_from(lock(&self.plan).below(most)).unwrap_or(0);
        // Devices transfer sectors. Half of the time the rest starts on a page, for direct I/O.
        let pages = short - short % SIZE;
        if pages > 0 && lock(&self.plan).below(2) == 0 { pages } else { short }
    }
}

/// Work with injected faults.
struct FaultyWork<'w, 'a> {
    work: &'w mut dyn Work<'a>,
    shared: &'w Shared,
}

impl<'a> Work<'a> for FaultyWork<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        loop {
            let mut op = self.work.next()?;
            let file: &dyn Any = &*op.file;
            if let Some(faulty) = file.downcast_ref::<FaultyFile>() {
                op.file = Arc::clone(&faulty.inner);
            }
            match self.shared.apply(&mut op) {
                Ok(()) => {
                    self.shared.count(&op, true);
                    return Some(op);
                }
                Err(error) => self.work.done(op, Err(error)),
            }
        }
    }

    fn done(&mut self, op: Op<'a>, moved: io::Result<usize>) {
        self.shared.count(&op, false);
        self.work.done(op, moved);
    }

    fn between(&mut self) -> bool {
        self.work.between()
    }
}

impl Plan {
    /// Next draw of `splitmix64`, below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut draw = self.random;
        draw = (draw ^ (draw >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        draw = (draw ^ (draw >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (draw ^ (draw >> 31)) % end
    }
}

impl Device for Faults {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        if access != Access::Read {
            self.shared.fail(Fault::Denied, rustix::io::Errno::ACCESS)?;
        }
        if access == Access::Fresh {
            self.shared.fail(Fault::NoSpace, rustix::io::Errno::NOSPC)?;
        }
        let inner = self.inner.open(path, access)?;
        Ok(Arc::new(FaultyFile { inner, shared: Arc::clone(&self.shared) }))
    }

    fn open_bulk(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        if access != Access::Read {
            self.shared.fail(Fault::Denied, rustix::io::Errno::ACCESS)?;
        }
        let inner = self.inner.open_bulk(path, access)?;
        Ok(Arc::new(FaultyFile { inner, shared: Arc::clone(&self.shared) }))
    }

    fn run(&self, work: &mut dyn Work<'_>) {
        self.inner.run(&mut FaultyWork { work, shared: &self.shared });
    }

    fn travel(&self) -> TransferPath {
        self.inner.travel()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.shared.fail(Fault::NoSpace, rustix::io::Errno::NOSPC)?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn hold(&self, folder: &Path) -> io::Result<Option<Arc<dyn Device>>> {
        let Some(inner) = self.inner.hold(folder)? else { return Ok(None) };
        Ok(Some(Arc::new(Self { inner, shared: Arc::clone(&self.shared) })))
    }

    fn leads_to(&self, folder: &Path) -> bool {
        self.inner.leads_to(folder)
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.inner.make_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.shared.pass(Call::Sync);
        self.shared.fail(Fault::Sync, rustix::io::Errno::IO)?;
        self.inner.sync_folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        self.inner.list(path)
    }
}

impl File for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.shared.pass(Call::Read);
        self.shared.fail(Fault::Read, rustix::io::Errno::IO)?;
        let count = self.shared.short(Fault::ShortRead, buffer.len());
        self.inner.read_at(&mut buffer[..count], at)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.shared.pass(Call::Write);
        self.shared.fail(Fault::Write, rustix::io::Errno::IO)?;
        self.shared.fail(Fault::NoSpace, rustix::io::Errno::NOSPC)?;
        let length = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut left = self.shared.short(Fault::ShortWrite, length);
        let mut some = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            let count = left.min(buffer.len());
            some.push(IoSlice::new(&buffer[..count]));
            left -= count;
            if left == 0 {
                break;
            }
        }
        self.inner.write_at(&some, at)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }

    fn size(&self) -> io::Result<Size> {
        self.inner.size()
    }

    fn sync(&self) -> io::Result<()> {
        self.shared.pass(Call::Sync);
        self.shared.fail(Fault::Sync, rustix::io::Errno::IO)?;
        self.inner.sync()
    }

    fn data_from(&self, at: u64) -> u64 {
        self.inner.data_from(at)
    }

    fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        self.inner.punch(at, len)
    }

    fn try_lock(&self) -> io::Result<bool> {
        self.inner.try_lock()
    }

    fn lock_descriptor(&self) -> Option<RawFd> {
        self.inner.lock_descriptor()
    }

    fn paged(&self) -> bool {
        self.inner.paged()
    }
}
