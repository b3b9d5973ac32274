//! Paths of a shared value folder: its marker, staging files and shards.
//!
//! ```text
//!   kvtrie-values   the marker: this folder is kvtrie's
//!   staging/value-PID-TIME-N   incomplete values
//!   XX/(62 hex digits)   values by name
//! ```
//!
//! Invariant: no link below the folder is followed. A folder without the marker is accepted only if
//! all files at these paths are kvtrie's by their first bytes. New folders and files get the mode
//! of the root regardless of the umask, so all users with write access share it. Cost: a shard
//! handle per operation. A folder without the marker is read once.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use kvtrie_core::BlockKey;
use rustix::fs::{
    AtFlags, CWD, Dir, Gid, Mode, OFlags, Stat, UTIME_NOW, fchmod, fchown, linkat, mkdirat, openat,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::device::Access;
use crate::error::{Error, Result};
use crate::regular;
use crate::settings::hex;
use crate::value;

/// Folder of incomplete values.
pub(crate) const STAGING: &str = "staging";

/// Marker file of a value folder.
pub(crate) const MARKER: &str = "kvtrie-values";

/// Content of the marker.
const MARK: &[u8] = b"kvtrie folder of values 1\n";

/// Prefix of staging file names.
const STAGED: &str = "value-";

/// Paths of a value folder.
#[derive(Debug)]
pub(crate) struct Places {
    root: PathBuf,
    staged: AtomicU64,
}

/// A staging file. Dropping it removes the file, unless it was renamed.
#[derive(Debug)]
pub(crate) struct Staged {
    folder: OwnedFd,
    name: String,
}

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
    }
}

/// An unusable path and its error.
type Refusal<'a> = (&'a Path, io::Error);

impl Places {
    /// Take a folder for values. Creates the folder and its marker if missing.
    ///
    /// # Errors
    /// [`Error::Config`] if it cannot be created or written, or has foreign files at these paths.
    /// Nothing was changed then.
    pub(crate) fn claim(root: &Path) -> Result<Self> {
        let this = Self::at(root)?;
        let mut made = Vec::new();
        let claimed = this.begin(&mut made);
        if claimed.is_err() {
            for folder in made.iter().rev() {
                let _ = fs::remove_dir(folder);
            }
        }
        claimed.map(|()| this)
    }

    /// Open an existing value folder.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not a value folder.
    pub(crate) fn existing(root: &Path) -> Result<Self> {
        let this = Self::at(root)?;
        if !this.root.is_dir() {
            return Err(Error::config(format!("{} is no folder", this.root.display())));
        }
        this.marked().map(|_| this)
    }

    fn at(root: &Path) -> Result<Self> {
        let root = std::path::absolute(root)
            .map_err(|error| Error::io(format!("finding {}", root.display()), error))?;
        Ok(Self { root, staged: AtomicU64::new(0) })
    }

    fn begin(&self, made: &mut Vec<PathBuf>) -> Result<()> {
        let refused = |(path, error): Refusal<'_>| self.refusal(path, &error);
        let missing: Vec<&Path> = self.root.ancestors().take_while(|path| !path.exists()).collect();
        for path in missing.into_iter().rev() {
            match fs::create_dir(path) {
                Ok(()) => made.push(path.to_owned()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(refused((path, error))),
            }
        }
        let marked = self.marked()?;
        let staging = self.root.join(STAGING);
        if self.make_folder(&staging).map_err(|error| refused((&self.root, error)))? {
            made.push(staging.clone());
        }
        let (staged, mut file) = self.stage().map_err(|error| refused((&staging, error)))?;
        file.write_all(MARK).map_err(|error| refused((&staging, error)))?;
        if marked {
            return Ok(());
        }
        let root =
            folder_at(&self.root, OFlags::empty()).map_err(|error| refused((&self.root, error)))?;
        place(&staged, &root, MARKER).map_err(|error| refused((&self.root, error)))
    }

    /// Error of an unusable path, with its owner for a missing permission.
    fn refusal(&self, path: &Path, error: &io::Error) -> Error {
        let root = self.root.display();
        let owner = match rustix::fs::stat(path) {
            Ok(stat) if error.kind() == io::ErrorKind::PermissionDenied => format!(
                "; {} belongs to user {} and group {} with mode {:o}, and this is user {}: users \
                 share a folder if their group may write to it and to all below it (chmod -R \
                 g+rwX {root})",
                path.display(),
                stat.st_uid,
                stat.st_gid,
                stat.st_mode & 0o7777,
                rustix::process::geteuid().as_raw(),
            ),
            _ => String::new(),
        };
        let path = path.display();
        Error::config(format!("folder {root} cannot be written: {path}: {error}{owner}"))
    }

    /// Whether the folder has the marker. Without it, checks for foreign files.
    fn marked(&self) -> Result<bool> {
        let path = self.root.join(MARKER);
        let opened = folder_at(&self.root, OFlags::empty()).and_then(|root| {
            regular::open(root, OsStr::new(MARKER), Access::Read, OFlags::empty())
        });
        match opened.and_then(|file| first_bytes(&file, MARK.len() + 1)) {
            Ok(found) if found == MARK => Ok(true),
            Ok(found) => Err(Error::config(format!(
                "{} is {:?}, {:?} wanted: this version does not read the folder",
                path.display(),
                String::from_utf8_lossy(&found),
                String::from_utf8_lossy(MARK),
            ))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.adopt().map(|()| false),
            Err(error) => Err(self.refusal(&path, &error)),
        }
    }

    /// Refuse foreign files at kvtrie's paths.
    fn adopt(&self) -> Result<()> {
        let refused = |path: &Path, error: &io::Error| self.refusal(path, error);
        for name in
            listed(&self.root, OFlags::empty()).map_err(|error| refused(&self.root, &error))?
        {
            if name != STAGING && !is_shard(&name) {
                continue;
            }
            let path = self.root.join(&name);
            let files = match listed(&path, OFlags::NOFOLLOW) {
                Ok(files) => files,
                Err(error) if is_no_folder(&error) => return Err(self.foreign(&path)),
                Err(error) => return Err(refused(&path, &error)),
            };
            let folder = regular::folder(&path).map_err(|error| refused(&path, &error))?;
            for file in files {
                let found =
                    regular::open(&folder, OsStr::new(&file), Access::Read, OFlags::empty())
                        .and_then(|opened| first_bytes(&opened, value::HEAD));
                match found {
                    Ok(head) if is_ours(&name, &file, &head) => {}
                    // A concurrent process has ended its write.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) if regular::forbidden(&error) => {
                        return Err(refused(&path.join(file), &error));
                    }
                    _ => return Err(self.foreign(&path.join(file))),
                }
            }
        }
        Ok(())
    }

    fn foreign(&self, path: &Path) -> Error {
        Error::config(format!(
            "folder {} has no file {MARKER}, and kvtrie did not write {}: give a shared store an \
             empty folder",
            self.root.display(),
            path.display()
        ))
    }

    /// Path of the folder.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Path of a value.
    pub(crate) fn path(&self, name: &BlockKey) -> PathBuf {
        self.root.join(hex(&name[..1])).join(hex(&name[1..]))
    }

    /// Shard handle of a value, and its file name in the shard.
    pub(crate) fn shard(&self, name: &BlockKey) -> io::Result<(OwnedFd, String)> {
        let shard = regular::folder(&self.root.join(hex(&name[..1])))?;
        Ok((shard, hex(&name[1..])))
    }

    /// Find the file of a value.
    ///
    /// # Errors
    /// The system's errors, or a different kind of file, such as a link.
    pub(crate) fn find(&self, name: &BlockKey) -> io::Result<Stat> {
        let (shard, file) = self.shard(name)?;
        let found = statat(shard, &file, AtFlags::SYMLINK_NOFOLLOW)?;
        regular::check_regular(&found)?;
        Ok(found)
    }

    /// Remove the file of a value.
    pub(crate) fn remove(&self, name: &BlockKey) -> io::Result<()> {
        let (shard, file) = self.shard(name)?;
        Ok(unlinkat(shard, file, AtFlags::empty())?)
    }

    /// Set the time of a value's file to now. Allowed for all users with write access.
    pub(crate) fn touch(&self, name: &BlockKey) -> io::Result<()> {
        let (shard, file) = self.shard(name)?;
        let file = regular::open(shard, OsStr::new(&file), Access::Read, OFlags::empty())?;
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        Ok(rustix::fs::futimens(file, &times)?)
    }

    /// Create a staging file. Its name has the process and the time, because several machines write
    /// here.
    pub(crate) fn stage(&self) -> io::Result<(Staged, fs::File)> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let number = self.staged.fetch_add(1, Ordering::Relaxed);
        let name = format!("{STAGED}{}-{}-{number}", process::id(), now.as_nanos());
        let folder = regular::folder(&self.root.join(STAGING))?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = fs::File::from(openat(&folder, &name, flags, Mode::from_raw_mode(0o666))?);
        self.share(&file, 0o666, 0o600);
        Ok((Staged { folder, name }, file))
    }

    /// Link a complete file under the name of a value, unless the name exists.
    pub(crate) fn link(&self, staged: &Staged, name: &BlockKey) -> io::Result<()> {
        let (shard, file) = match self.shard(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folder(&self.root.join(hex(&name[..1])))?;
                self.shard(name)?
            }
            other => other?,
        };
        place(staged, &shard, &file)
    }

    /// Create a folder with the mode of the root. Returns whether it is new.
    fn make_folder(&self, path: &Path) -> io::Result<bool> {
        match mkdirat(CWD, path, Mode::from_raw_mode(0o777)) {
            Ok(()) => {}
            Err(Errno::EXIST) => return regular::check_folder(path).map(|()| false),
            Err(error) => return Err(error.into()),
        }
        if let Ok(folder) = folder_at(path, OFlags::NOFOLLOW) {
            self.share(&folder, 0o7777, 0o700);
        }
        Ok(true)
    }

    /// Give a new file or folder the group and the mode of the root, as far as permitted.
    fn share(&self, new: impl AsFd, mask: u32, least: u32) {
        let (Ok(root), Ok(own)) = (rustix::fs::stat(&self.root), rustix::fs::fstat(&new)) else {
            return;
        };
        let mut mode = root.st_mode & mask | least;
        if own.st_gid != root.st_gid {
            let _ = fchown(&new, None, Some(Gid::from_raw(root.st_gid)));
            // New entries of the folder get the group too.
            mode |= mask & 0o2000;
        }
        if own.st_mode & 0o7777 != mode {
            let _ = fchmod(&new, Mode::from_raw_mode(mode));
        }
    }
}

/// Whether a file is kvtrie's by its folder, its name and its first [`value::HEAD`] bytes.
pub(crate) fn is_ours(folder: &str, file: &str, head: &[u8]) -> bool {
    if folder != STAGING {
        return value::name_in(head).is_some_and(|name| hex(name) == format!("{folder}{file}"));
    }
    let known = file.strip_prefix(STAGED);
    let mut parts = known.unwrap_or(file).split('-');
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !(parts.clone().count() == 3 && parts.all(digits)) {
        return false;
    }
    let begins = |magic: &[u8]| {
        // A writer may have ended before the first byte. Names of earlier versions had digits only.
        head.starts_with(magic) || known.is_some() && magic.starts_with(head)
    };
    begins(&value::MAGIC) || begins(MARK)
}

/// Whether a name is a shard name.
pub(crate) fn is_shard(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Open a folder, for listing or for names in it. `NOFOLLOW` refuses a link.
pub(crate) fn folder_at(path: &Path, more: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Whether an error of [`folder_at`] means a different kind of file, such as a link.
fn is_no_folder(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::LOOP | Errno::NOTDIR))
}

/// List the names in a folder, sorted.
pub(crate) fn listed(path: &Path, more: OFlags) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder_at(path, more)?)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// First bytes of a file, at most `most`.
pub(crate) fn first_bytes(file: &fs::File, most: usize) -> io::Result<Vec<u8>> {
    let mut found = Vec::new();
    file.take(most as u64).read_to_end(&mut found)?;
    Ok(found)
}

/// Link a staging file under a name, unless the name exists.
fn place(staged: &Staged, folder: &OwnedFd, name: &str) -> io::Result<()> {
    match linkat(&staged.folder, &staged.name, folder, name, AtFlags::empty()) {
        Err(Errno::EXIST) => Ok(()),
        // Without hard links: an existing file of this name has the same bytes.
        Err(error) if io::Error::from(error).kind() == io::ErrorKind::Unsupported => {
            Ok(renameat(&staged.folder, &staged.name, folder, name)?)
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::{MARK, MARKER, Places, STAGING, listed};
    use rustix::fs::OFlags;

    const NAME: [u8; 32] = [0xab; 32];

    fn names(path: &Path) -> Vec<String> {
        listed(path, OFlags::empty()).unwrap()
    }

    fn write(places: &Places) {
        let (staged, _) = places.stage().unwrap();
        places.link(&staged, &NAME).unwrap();
    }

    fn refused(root: &Path) -> String {
        Places::claim(root).unwrap_err().to_string()
    }

    #[test]
    fn a_new_folder_and_one_of_other_names_get_the_marker() {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("a/kv");
        for _ in 0..2 {
            Places::claim(&root).unwrap();
            assert_eq!(names(&root), [MARKER, STAGING]);
            assert_eq!(fs::read(root.join(MARKER)).unwrap(), MARK);
        }
        fs::write(top.path().join("README"), "readme").unwrap();
        Places::claim(top.path()).unwrap();
        assert_eq!(names(top.path()), ["README", "a", MARKER, STAGING]);
    }

    #[test]
    fn files_of_others_at_the_places_refuse_the_folder_and_stay() {
        for (path, bytes) in [
            ("staging/thesis.docx", "thesis"),
            ("staging/deep/er.txt", ""),
            ("staging", ""),
            ("ef/notes.txt", "notes"),
            ("ef", ""),
            (MARKER, "kvtrie folder of values 2\n"),
            (MARKER, ""),
        ] {
            let top = tempfile::tempdir().unwrap();
            let file = top.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, bytes).unwrap();
            let before = names(top.path());
            let said = refused(top.path());
            let of = path.trim_end_matches("/er.txt");
            assert!(said.contains(of) && said.contains(MARKER), "{said}");
            assert_eq!((names(top.path()), fs::read(&file).unwrap()), (before, bytes.into()));
        }
    }

    #[test]
    fn a_link_to_a_folder_is_refused_below_the_root_and_followed_above() {
        let top = tempfile::tempdir().unwrap();
        let (root, link) = (top.path().join("kv"), top.path().join("link"));
        symlink(top.path(), &link).unwrap();
        fs::create_dir(&root).unwrap();
        symlink(top.path(), root.join("ab")).unwrap();
        assert!(refused(&root).contains("kv/ab"));
        fs::remove_file(root.join("ab")).unwrap();
        let places = Places::claim(&link.join("kv")).unwrap();
        symlink(top.path(), root.join("ab")).unwrap();
        let (staged, _) = places.stage().unwrap();
        assert!(places.link(&staged, &NAME).unwrap_err().to_string().contains("symbolic link"));
        assert!(places.find(&NAME).is_err() && places.remove(&NAME).is_err());
        assert_eq!(names(top.path()), ["kv", "link"]);
    }

    #[test]
    fn new_folders_and_files_have_the_mode_of_the_root() {
        for mode in [0o700, 0o755, 0o2770, 0o2777] {
            let top = tempfile::tempdir().unwrap();
            fs::set_permissions(top.path(), fs::Permissions::from_mode(mode)).unwrap();
            let places = Places::claim(top.path()).unwrap();
            write(&places);
            let mode_of = |path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode_of(top.path().join(STAGING)), mode);
            assert_eq!(mode_of(top.path().join("ab")), mode);
            assert_eq!(mode_of(top.path().join(MARKER)), mode & 0o666);
            assert_eq!(mode_of(places.path(&NAME)), mode & 0o666);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_taken_leaves_nothing() {
        let top = tempfile::tempdir().unwrap();
        fs::write(top.path().join("file"), "").unwrap();
        assert!(refused(&top.path().join("file/a/kv")).contains("cannot be written"));
        assert_eq!(names(top.path()), ["file"]);
    }
}
