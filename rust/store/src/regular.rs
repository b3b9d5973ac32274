//! Opening files in a folder: regular ones only, and never through a link.
//!
//! Invariant: what is opened is a regular file in a folder that is no link to one, and what is opened
//! for writing has no other name, so that nothing outside the folder changes; a pipe, a socket or a
//! device is not even opened. Links above the folder are the user's and are followed.
//! Cost: seven system calls.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, openat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::device::Access;

/// What stands where a file is wanted.
#[derive(Debug)]
struct NoFile(String);

impl fmt::Display for NoFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoFile {}

fn no_file(what: impl Into<String>) -> io::Error {
    io::Error::other(NoFile(what.into()))
}

/// Whether something that is no file of this folder alone stands where one is wanted.
pub(crate) fn is_no_file(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<NoFile>)
}

/// Whether a device refuses for good.
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

/// Refuses what is at `path` unless it is a folder and no link to one.
pub(crate) fn check_folder(path: &Path) -> io::Result<()> {
    let stat = rustix::fs::lstat(path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        other => Err(no_file(format!("{} is {}, not a folder", path.display(), kind(other)))),
    }
}

fn folder(path: &Path) -> io::Result<OwnedFd> {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let above = above.unwrap_or(Path::new("."));
    let mut flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    flags.insert(OFlags::PATH);
    match rustix::fs::open(above, flags, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            check_folder(above)?;
            Err(Errno::NOTDIR.into())
        }
        opened => Ok(opened?),
    }
}

/// Opens the file at `path`, with more flags than `access` asks for.
pub(crate) fn open(path: &Path, access: Access, more: OFlags) -> io::Result<fs::File> {
    let folder = folder(path)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            // Emptied in place it would be emptied under its other names too.
            other if access == Access::Fresh && other != FileType::Directory => {
                unlinkat(&folder, name, AtFlags::empty())?;
            }
            FileType::RegularFile => {}
            other => return Err(no_file(format!("{}, not a file", kind(other)))),
        },
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // Another process may put something else there meanwhile: it is opened without waiting for its
    // other end, and given up.
    let mut flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    flags.insert(match access {
        Access::Read => OFlags::RDONLY,
        Access::Write => OFlags::RDWR | OFlags::CREATE,
        Access::Fresh => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
    });
    let file = fs::File::from(openat(&folder, name, flags, Mode::from_raw_mode(0o666))?);
    let data = file.metadata()?;
    if !data.is_file() {
        return Err(no_file("something else by now, not a file"));
    }
    if access != Access::Read && data.nlink() > 1 {
        return Err(no_file(format!("a file with {} names (hard links)", data.nlink())));
    }
    // io_uring would not wait for a file that asks not to.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}
