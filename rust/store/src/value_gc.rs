//! Garbage collection of a shared value folder in use.
//!
//! Invariant: a file is removed only if its name, first bytes and age mark it as an expired value
//! or as the staging file of an ended writer. No link is followed. A value written again between
//! the check and the removal is lost, at the cost of a miss. Cost: a listing, a status per file,
//! and a read of 80 bytes per old file.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, OFlags, Stat, statat, unlinkat};

use crate::device::Access;
use crate::error::Result;
use crate::regular;
use crate::value;
use crate::value_place::{Places, STAGING, first_bytes, folder_at, is_ours, is_shard, listed};

/// Removed files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of files.
    pub files: u64,
    /// Total bytes.
    pub bytes: u64,
}

impl Removed {
    fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }
}

/// Result of a collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Expired values.
    pub expired: Removed,
    /// Staging files.
    pub staged: Removed,
    /// Number of remaining files with value names.
    pub kept: u64,
}

/// Remove values last refreshed before `expired`, if given, and staging files last changed before
/// `stale`.
///
/// # Errors
/// [`crate::Error::Config`] if it is not a value folder.
pub fn collect(folder: &Path, expired: Option<SystemTime>, stale: SystemTime) -> Result<Collected> {
    let places = Places::existing(folder)?;
    let mut found = Collected { staged: sweep(&places, stale), ..Collected::default() };
    for shard in listed(places.root(), OFlags::empty()).unwrap_or_default() {
        if !is_shard(&shard) {
            continue;
        }
        each(&places, &shard, |folder, file| {
            if file.len() != 62 {
                return;
            }
            match expired.and_then(|before| remove_old(folder, &shard, file, before)) {
                Some(bytes) => found.expired.add(bytes),
                None => found.kept += 1,
            }
        });
    }
    Ok(found)
}

/// Remove staging files last changed before a time.
pub(crate) fn sweep(places: &Places, before: SystemTime) -> Removed {
    let mut gone = Removed::default();
    each(places, STAGING, |folder, file| {
        if let Some(bytes) = remove_old(folder, STAGING, file, before) {
            gone.add(bytes);
        }
    });
    gone
}

/// Call `visit` with the names in a subfolder of the root. A linked subfolder counts as empty.
fn each(places: &Places, name: &str, mut visit: impl FnMut(&OwnedFd, &str)) {
    let path = places.root().join(name);
    let (Ok(folder), Ok(files)) =
        (folder_at(&path, OFlags::NOFOLLOW), listed(&path, OFlags::NOFOLLOW))
    else {
        return;
    };
    for file in files {
        visit(&folder, &file);
    }
}

/// Remove a kvtrie file last changed before a time. Returns its bytes. Foreign, unreadable and
/// unremovable files stay.
fn remove_old(folder: &OwnedFd, of: &str, file: &str, before: SystemTime) -> Option<u64> {
    let look = || statat(folder, file, AtFlags::SYMLINK_NOFOLLOW).ok();
    let found = look().filter(|found| modified(found) < before)?;
    let opened = regular::open(folder, OsStr::new(file), Access::Read, OFlags::empty()).ok()?;
    let head = first_bytes(&opened, value::HEAD).ok()?;
    let same = |now: &Stat| (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino);
    // A process refreshing the value in between wants to keep it.
    let stays = |now: &Stat| !same(now) || modified(now) >= before;
    if !is_ours(of, file, &head) || look().is_none_or(|now| stays(&now)) {
        return None;
    }
    unlinkat(folder, file, AtFlags::empty()).ok()?;
    Some(length(&found))
}

/// Time of the last change of a file's bytes.
pub(crate) fn modified(found: &Stat) -> SystemTime {
    let seconds = found.st_mtime;
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let part = Duration::from_nanos(u32::try_from(found.st_mtime_nsec).unwrap_or(0).into());
    let epoch = SystemTime::UNIX_EPOCH;
    let at = if seconds < 0 { epoch.checked_sub(whole) } else { epoch.checked_add(whole) };
    at.and_then(|at| at.checked_add(part)).unwrap_or(epoch)
}

/// Bytes of a file.
pub(crate) fn length(found: &Stat) -> u64 {
    u64::try_from(found.st_size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};
    use std::time::{Duration, SystemTime};

    use super::{Collected, Removed, collect};
    use crate::settings::hex;
    use crate::value::MAGIC;
    use crate::value_place::{MARKER, Places, STAGING};

    const HOUR: Duration = Duration::from_secs(3600);

    /// Create a file with an age, and its folder.
    fn put(path: &Path, bytes: &[u8], age: Duration) -> PathBuf {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        let file = fs::File::open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        path.to_owned()
    }

    /// First bytes of a value with a name.
    fn value(name: [u8; 32]) -> Vec<u8> {
        [&MAGIC[..], &[0; 40], &name, &[7; 20]].concat()
    }

    fn at(root: &Path, name: [u8; 32]) -> PathBuf {
        root.join(hex(&name[..1])).join(hex(&name[1..]))
    }

    #[test]
    fn only_old_files_of_kvtrie_are_removed() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("kv");
        Places::claim(&root).unwrap();
        let old = 2 * HOUR;
        let staging =
            |name: &str, bytes: &[u8], age| put(&root.join(STAGING).join(name), bytes, age);
        let gone = [
            put(&at(&root, [1; 32]), &value([1; 32]), old),
            staging("value-1-2-3", &value([9; 32]), old),
            staging("value-1-2-4", b"", old),
            staging("1-2-5", &value([9; 32]), old),
        ];
        let outside = put(&top.path().join(hex(&[3; 31])), &value([3; 32]), old);
        let stay = [
            put(&at(&root, [2; 32]), &value([2; 32]), Duration::ZERO),
            // The name of a different value, no value, a foreign folder, and an invalid name.
            put(&at(&root, [4; 32]), &value([5; 32]), old),
            put(&at(&root, [6; 32]), b"an object of another store", old),
            put(&root.join("ef/notes"), b"notes", old),
            put(&root.join("README"), b"readme", old),
            staging("value-1-2-6", &value([9; 32]), Duration::ZERO),
            staging("2024-01-02", b"", old),
            staging("value-1-2-7", b"thesis", old),
            staging("thesis.docx", &value([9; 32]), old),
            outside,
        ];
        symlink(top.path(), root.join("03")).unwrap();
        symlink(&stay[9], root.join(STAGING).join("value-1-2-8")).unwrap();
        let before = SystemTime::now() - HOUR;
        let nothing = collect(&root, None, SystemTime::now() - 3 * HOUR).unwrap();
        assert_eq!(nothing, Collected { kept: 4, ..Collected::default() });
        let found = collect(&root, Some(before), before).unwrap();
        let staged = Removed { files: 3, bytes: 200 };
        assert_eq!(found, Collected { expired: Removed { files: 1, bytes: 100 }, staged, kept: 3 });
        assert!(gone.iter().all(|path| !path.exists()) && stay.iter().all(|path| path.exists()));
        assert!(root.join(STAGING).join("value-1-2-8").is_symlink());
    }

    #[test]
    fn a_folder_without_the_marker_is_collected_only_if_all_is_of_kvtrie() {
        let top = tempfile::tempdir().unwrap();
        let (root, now) = (top.path(), SystemTime::now());
        let ours = put(&at(root, [1; 32]), &value([1; 32]), 2 * HOUR);
        let foreign = put(&root.join("ef/notes"), b"", HOUR);
        let said = collect(root, Some(now), now).unwrap_err().to_string();
        assert!(said.contains(MARKER) && said.contains("ef/notes") && ours.exists(), "{said}");
        fs::remove_file(foreign).unwrap();
        assert_eq!(collect(root, Some(now), now).unwrap().expired.files, 1);
        assert!(!root.join(MARKER).exists());
        let said = collect(&root.join("none"), None, now).unwrap_err().to_string();
        assert!(said.contains("is no folder"), "{said}");
    }
}
