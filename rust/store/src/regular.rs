//! Opening of files: regular files only, never through a symbolic link.
//!
//! Invariant: the file is regular, its folder is no link, and a file opened for writing has a
//! single hard link, so nothing outside the folder changes. Pipes, sockets and devices are not even
//! opened. Links above the folder are the user's choice and are followed. Cost: seven system calls.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fcntl_getfl, fcntl_setfl, openat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::device::Access;

/// Error: the path is not a regular file in the folder.
#[derive(Debug)]
struct NotRegular(String);

impl fmt::Display for NotRegular {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotRegular {}

fn not_regular(what: impl Into<String>) -> io::Error {
    io::Error::other(NotRegular(what.into()))
}

/// Whether an error is a [`NotRegular`].
pub(crate) fn is_not_regular(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<NotRegular>)
}

/// Whether the device refuses permanently.
pub(crate) fn forbidden(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

fn kind(of: FileType) -> &'static str {
    match of {
        FileType::RegularFile => "a file",
        FileType::Directory => "a folder",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    }
}

/// Check for a folder at `path` that is not a link.
pub(crate) fn check_folder(path: &Path) -> io::Result<()> {
    let stat = rustix::fs::lstat(path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        other => Err(not_regular(format!("{} is {}, not a folder", path.display(), kind(other)))),
    }
}

/// Check for a regular file.
pub(crate) fn check_regular(found: &Stat) -> io::Result<()> {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => Ok(()),
        other => Err(not_regular(format!("{}, not a file", kind(other)))),
    }
}

/// Open a handle of the folder at `path`, for names in it.
pub(crate) fn folder(path: &Path) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let mut flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    flags.insert(OFlags::PATH);
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            check_folder(path)?;
            Err(Errno::NOTDIR.into())
        }
        opened => Ok(opened?),
    }
}

/// Whether `path` still leads to the folder or file of a handle.
pub(crate) fn leads_to(path: &Path, held: impl AsFd) -> bool {
    let place = |stat: Stat| (stat.st_dev, stat.st_ino);
    let Ok(known) = rustix::fs::fstat(held) else { return true };
    match rustix::fs::stat(path) {
        Ok(found) => place(found) == place(known),
        // The remaining errors may be temporary, for example a disconnected network.
        Err(error) => !matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP),
    }
}

/// Open a file of a folder, with flags in addition to `access`.
pub(crate) fn open(
    folder: impl AsFd,
    name: &OsStr,
    access: Access,
    more: OFlags,
) -> io::Result<fs::File> {
    match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            // Truncating in place would also truncate it under further hard links.
            other if access == Access::Fresh && other != FileType::Directory => {
                unlinkat(&folder, name, AtFlags::empty())?;
            }
            FileType::RegularFile => {}
            other => return Err(not_regular(format!("{}, not a file", kind(other)))),
        },
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // A different process may replace the file in between, so open without blocking, then check.
    let mut flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    flags.insert(match access {
        Access::Read => OFlags::RDONLY,
        Access::Write => OFlags::RDWR | OFlags::CREATE,
        Access::Fresh => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
    });
    let file = fs::File::from(openat(&folder, name, flags, Mode::from_raw_mode(0o666))?);
    let data = file.metadata()?;
    if !data.is_file() {
        return Err(not_regular("something else by now, not a file"));
    }
    if access != Access::Read && data.nlink() > 1 {
        return Err(not_regular(format!("a file with {} names (hard links)", data.nlink())));
    }
    // On a non-blocking file, io_uring would return EAGAIN instead of waiting.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}
