//! Open files of a process, and their locks in a fork of it.
//!
//! In a fork the files are the parent's, their threads do not run, and their mutexes may be locked
//! forever. So every call fails there, and the files are never dropped. A fork also shares the lock
//! on a folder or file, and would keep it after the death of the writer. So `os.fork` closes the
//! descriptors of all such locks in the child.
//! Invariant: `LOCKS` has these descriptors. Only calls with the interpreter attached change it, and
//! `os.fork` stops those, so no fork finds it locked. Cost: a process id and a shared reference per
//! call, and an entry per lock.

use std::collections::BTreeSet;
use std::mem;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCFunction};

use crate::error::{ClosedError, bad};

static LOCKS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

fn locks() -> MutexGuard<'static, BTreeSet<RawFd>> {
    LOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Files usable only in the process that opened them.
pub(crate) struct OwnFiles<T> {
    path: PathBuf,
    pid: u32,
    lock: Option<RawFd>,
    files: RwLock<Option<Arc<T>>>,
}

impl<T> OwnFiles<T> {
    /// Files at `path`, with the descriptor of their lock, if any.
    pub(crate) fn new(path: PathBuf, lock: Option<RawFd>, files: T) -> Self {
        locks().extend(lock);
        Self { path, pid: process::id(), lock, files: RwLock::new(Some(Arc::new(files))) }
    }

    /// Fail in a fork of the process that opened the files.
    pub(crate) fn check_process(&self) -> PyResult<()> {
        let (pid, this) = (self.pid, process::id());
        if pid == this {
            return Ok(());
        }
        Err(bad(format!(
            "{}: process {pid} opened this, and process {this} is a fork of it that cannot use its \
             threads and its files: open it here",
            self.path.display()
        )))
    }

    /// The open files.
    pub(crate) fn get(&self) -> PyResult<Arc<T>> {
        self.check_process()?;
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || ClosedError::new_err(format!("{} is closed", self.path.display()));
        files.clone().ok_or_else(closed)
    }

    /// Take the files to close them. `None` if they are closed.
    pub(crate) fn take(&self) -> PyResult<Option<Arc<T>>> {
        self.check_process()?;
        let taken = self.files.write().unwrap_or_else(PoisonError::into_inner).take();
        if taken.is_some() {
            self.forget_lock();
        }
        Ok(taken)
    }

    /// Before the files are closed: their descriptor's number may then become that of another file.
    fn forget_lock(&self) {
        if let Some(lock) = self.lock {
            locks().remove(&lock);
        }
    }
}

impl<T> Drop for OwnFiles<T> {
    fn drop(&mut self) {
        let files = self.files.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.pid != process::id() {
            mem::forget(files);
        } else if files.is_some() {
            self.forget_lock();
        }
    }
}

/// Have each fork close the locks that it shares with its parent.
pub(crate) fn close_locks_in_forks(py: Python<'_>) -> PyResult<()> {
    let close = PyCFunction::new_closure(py, None, None, |arguments, _| {
        let os = arguments.py().import("os")?;
        for lock in mem::take(&mut *locks()) {
            // One that cannot be closed keeps no other open.
            let _ = os.call_method1("close", (lock,));
        }
        PyResult::Ok(())
    })?;
    let hook = [("after_in_child", close)].into_py_dict(py)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hook)).map(drop)
}
