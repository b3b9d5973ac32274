//! Opening of a store: takes the lock, reads the manifest, cleans up the folder.
//!
//! Invariant: a single writer, any number of readers. Files of a different identity are not
//! touched. Cost: a pass over the manifest. No segment is read.

use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use crate::claim::{Claims, lock};
use crate::device::{Access, Device};
use crate::error::{Error, Result};
use crate::file::{File, read_full, write_full};
use crate::frame::{Head, VERSION};
use crate::manifest::{self, Manifest};
use crate::quarantine::{self, UNUSABLE, quarantine};
use crate::regular::{forbidden, is_not_regular};
use crate::scan;
use crate::segment::Segments;
use crate::settings::Settings;
use crate::store::{LOCK, Store};
use crate::table::Table;

/// File name in both parts of a two-folder store of earlier versions.
const PAIR: &str = "pair";

/// Maximum number of lock file replacements while locking.
const TRIES: usize = 8;

/// A listed store.
#[derive(Debug)]
pub struct Listed {
    /// Folder of the store.
    pub folder: PathBuf,
    /// Settings, or the reason for a failed read.
    pub settings: Result<Settings>,
}

/// List the stores in a folder. Empty if the folder does not exist.
///
/// # Errors
/// The device's errors.
pub fn stores(device: &dyn Device, folder: &Path) -> Result<Vec<Listed>> {
    let items = match device.list(folder) {
        Ok(items) => items,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(format!("listing {}", folder.display()), error)),
    };
    let named = |name: &str| name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    Ok(items
        .into_iter()
        .filter(|item| item.folder && named(&item.name))
        .map(|item| {
            let folder = folder.join(item.name);
            let settings = described(device, &folder).map(|(settings, _)| settings);
            Listed { folder, settings }
        })
        .collect())
}

/// Settings and file of a manifest.
fn described(device: &dyn Device, folder: &Path) -> Result<(Settings, Arc<dyn File>)> {
    let path = folder.join(manifest::NAME);
    let failed = |error| Error::io(format!("reading {}", path.display()), error);
    let file = device.open(&path, Access::Read).map_err(failed)?;
    match scan::head(&*file).map_err(failed)? {
        Head::Good(settings, ..) => Ok((*settings, file)),
        Head::Version(found) => Err(other_version(&path, found)),
        Head::TwoFolders => Err(two_folders(folder)),
        Head::Bad(reason) => Err(Error::config(format!("{}: {reason}", path.display()))),
    }
}

fn other_version(path: &Path, found: u32) -> Error {
    let path = path.display();
    Error::config(format!("{path} is of format {found}, this version reads format {VERSION}"))
}

/// Refuse a part of a two-folder store. The part without the manifest is `folder.second`.
fn one_folder(device: &dyn Device, folder: &Path) -> Result<()> {
    let second = folder.with_extension("second");
    let part = [folder, &second]
        .into_iter()
        .find(|part| device.open(&part.join(PAIR), Access::Read).is_ok());
    part.map_or(Ok(()), |part| Err(two_folders(part)))
}

fn two_folders(folder: &Path) -> Error {
    Error::config(format!(
        "{} is spread over two folders, which this version does not read: remove it, and put a \
         folder over several devices by RAID 0 or LVM",
        folder.display()
    ))
}

/// Lock a folder. Returns the lock file, or the reason for its refusal.
fn take_lock(
    device: &mut Arc<dyn Device>,
    folder: &Path,
) -> io::Result<std::result::Result<Arc<dyn File>, String>> {
    device.make_folder(folder)?;
    if let Some(held) = device.hold(folder)? {
        *device = held;
    }
    let device = &**device;
    let path = folder.join(LOCK);
    let mut file = device.open(&path, Access::Write)?;
    let mut free = file.try_lock()?;
    // The last holder may have removed it with the store, and a new process created it again.
    for _ in 0..TRIES {
        if !free || file.is_at(&path) {
            break;
        }
        file = device.open(&path, Access::Write)?;
        free = file.try_lock()?;
    }
    if free {
        // A writer must be able to create files, because a rewrite does.
        match quarantine::create(device, folder, manifest::NEXT) {
            Err(error) if forbidden(&error) => return Err(error),
            _ => {}
        }
        // For information only: the lock itself decides.
        let line = format!("process {}\n", std::process::id());
        let _ = file.set_len(0);
        let _ = write_full(&*file, &mut [IoSlice::new(line.as_bytes())], 0);
        return Ok(Ok(file));
    }
    let mut line = [0; 64];
    let count = read_full(&*file, &mut line, 0).unwrap_or(0);
    let who = String::from_utf8_lossy(&line[..count]).trim().to_string();
    let who = if who.is_empty() { "another process".into() } else { who };
    Ok(Err(format!("{who} writes here")))
}

impl Store {
    /// Open the store of these settings under `folder`, or create it. It is read-only if a
    /// different process has the lock or the folder forbids writes.
    ///
    /// # Errors
    /// [`Error::Config`] for settings out of range or in conflict with the manifest, or the
    /// device's errors.
    pub fn open(mut device: Arc<dyn Device>, folder: &Path, settings: Settings) -> Result<Self> {
        settings.check()?;
        // The path is compared with the held folder later, when the working directory may differ.
        let folder = &std::path::absolute(folder)
            .map_err(|error| Error::io(format!("finding {}", folder.display()), error))?;
        let own = folder.join(settings.folder_name());
        one_folder(&*device, &own)?;
        let path = own.join(manifest::NAME);
        let (guard, refusal) = match take_lock(&mut device, &own) {
            Ok(Ok(guard)) => (Some(guard), None),
            Ok(Err(why)) => (None, Some(why)),
            // A reader needs a manifest. Without a manifest, a read-only folder is an error.
            Err(error) if forbidden(&error) && device.open(&path, Access::Read).is_ok() => {
                (None, Some(format!("nothing may be written here ({error})")))
            }
            Err(error) if is_not_regular(&error) => (None, Some(no_lock(&own, &error))),
            Err(error) => return Err(Error::io(format!("locking {}", own.display()), error)),
        };
        let found = Found::in_folder(&*device, &own, guard.is_some())?;
        let store = Self::load(device, own, settings, guard, refusal, found)?;
        if !store.read_only() {
            // Make the names of new folders durable, each in its parent.
            for parent in folder.parent().into_iter().chain([&**folder]) {
                match store.device.sync_folder(parent) {
                    // A parent folder this user cannot open was not created by this call.
                    Err(error) if !forbidden(&error) => {
                        return Err(Error::io(format!("syncing {}", parent.display()), error));
                    }
                    _ => {}
                }
            }
        }
        Ok(store)
    }

    /// Open a store read-only, with the settings of its manifest.
    ///
    /// # Errors
    /// [`Error::Config`] without a good manifest, or the device's errors.
    pub fn inspect(device: Arc<dyn Device>, folder: &Path) -> Result<Self> {
        one_folder(&*device, folder)?;
        let device = match device.hold(folder) {
            Ok(Some(held)) => held,
            // Reading the manifest below reports the problem.
            Ok(None) | Err(_) => device,
        };
        let (settings, file) = described(&*device, folder)?;
        let refusal = Some("opened for looking only".to_string());
        let found = Found { file: Some(file), exact: true, ..Found::default() };
        Self::load(device, folder.to_path_buf(), settings, None, refusal, found)
    }

    fn load(
        mut device: Arc<dyn Device>,
        folder: PathBuf,
        settings: Settings,
        guard: Option<Arc<dyn File>>,
        refusal: Option<String>,
        mut found: Found,
    ) -> Result<Self> {
        let path = folder.join(manifest::NAME);
        let failed = |error| Error::io(format!("reading {}", path.display()), error);
        let mut table = Table::default();
        let mut reasons = std::mem::take(&mut found.reasons);
        let mut blocks = settings.blocks;
        if let Some(file) = found.file.clone() {
            match scan::head(&*file).map_err(failed)? {
                Head::Version(version) => return Err(other_version(&path, version)),
                Head::TwoFolders => return Err(two_folders(&folder)),
                // The folder's name is only a prefix of the identity, so two stores may share it.
                Head::Good(other, ..) if other.identity != settings.identity => {
                    let other = other.folder_name();
                    reasons.push(format!("manifest: of identity {other}"));
                    if guard.is_some() {
                        quarantine(&*device, &folder, manifest::NAME, &other).map_err(failed)?;
                    }
                    found.file = None;
                }
                Head::Good(known, sequence, length) => {
                    fits(&settings, &known)?;
                    table.skip_to(sequence);
                    // The old manifest may be longer, from a larger budget.
                    blocks = blocks.max(known.blocks);
                    found.exact &= known.blocks == settings.blocks && known.about == settings.about;
                    found.end = length as u64;
                }
                Head::Bad(reason) => {
                    found.exact = false;
                    reasons.push(format!("manifest: {reason}"));
                }
            }
        }
        // Also after a bad header: frames have separate checksums.
        if let Some(file) = &found.file {
            found.end =
                scan::frames(&**file, found.end, blocks, &settings, &mut table, &mut reasons)
                    .map_err(failed)?;
        }
        // A writer already holds its folder. A reader may lack it.
        if let Ok(Some(held)) = device.hold(&folder) {
            device = held;
        }
        // Open once for direct I/O, to detect a refusal now instead of at the first block.
        drop(device.open_bulk(&folder.join(LOCK), Access::Read));
        let access = if guard.is_some() { Access::Write } else { Access::Read };
        let segments = Segments::new(Arc::clone(&device), folder.clone(), &settings, access);
        let settings = Arc::new(settings);
        let manifest = Manifest::new(
            Arc::clone(&device),
            folder.clone(),
            Arc::clone(&settings),
            found.file,
            found.end,
        );
        let store = Self {
            settings,
            device,
            folder,
            guard,
            refusal,
            lost: OnceLock::new(),
            manifest: Mutex::new(manifest),
            table: Mutex::new(table),
            segments,
            claims: Claims::default(),
            synced: Mutex::new(0),
            reasons: Mutex::new(reasons),
        };
        if store.guard.is_some() {
            store.begin(found.exact)?;
        }
        Ok(store)
    }

    /// Prepare a writer: valid header, no tail after the last frame, no leftovers.
    fn begin(&self, exact: bool) -> Result<()> {
        self.device
            .sync_folder(&self.folder)
            .map_err(|error| Error::io(format!("syncing {}", self.folder.display()), error))?;
        lock(&self.reasons).append(&mut self.segments.quarantine_unusable()?);
        self.segments.set_segments(self.segments.list()?);
        {
            let mut manifest = lock(&self.manifest);
            let len = manifest.len;
            let failed = |error| {
                let path = self.folder.join(manifest::NAME);
                Error::io(format!("cutting {} at {len}", path.display()), error)
            };
            match manifest.file.clone().filter(|_| exact) {
                // No old tail may follow the next frame.
                Some(file) if file.size().map_err(failed)?.len > len => {
                    file.set_len(len).map_err(failed)?;
                }
                Some(_) => {}
                None => manifest.rewrite(&self.table, &mut |_, _| true)?,
            }
        }
        self.trim()
    }
}

/// Message for a folder with an unusable lock file.
fn no_lock(folder: &Path, error: &io::Error) -> String {
    format!("{}: {error}; without it the store is read-only", folder.join(LOCK).display())
}

/// A found manifest.
#[derive(Default)]
struct Found {
    file: Option<Arc<dyn File>>,
    /// End of the last good frame.
    end: u64,
    /// Whether appending is possible: its header equals the settings, and it is writable.
    exact: bool,
    /// Defects.
    reasons: Vec<String>,
}

impl Found {
    /// Find the manifest. An unusable file counts as missing, and a writer quarantines it.
    fn in_folder(device: &dyn Device, folder: &Path, writes: bool) -> Result<Self> {
        let path = folder.join(manifest::NAME);
        let failed = |error| Error::io(format!("opening {}", path.display()), error);
        let unusable = |error: &io::Error| is_not_regular(error) || forbidden(error);
        match device.open(&path, Access::Read) {
            Ok(file) if !writes => Ok(Self { file: Some(file), exact: true, ..Self::default() }),
            Ok(file) => match device.open(&path, Access::Write) {
                Ok(file) => Ok(Self { file: Some(file), exact: true, ..Self::default() }),
                // Its frames count. The rewrite replaces the file.
                Err(error) if unusable(&error) => {
                    let reasons = vec![format!("manifest: {error}; written anew")];
                    Ok(Self { file: Some(file), reasons, ..Self::default() })
                }
                Err(error) => Err(failed(error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) if unusable(&error) => {
                let reason = if writes {
                    let renamed =
                        quarantine(device, folder, manifest::NAME, UNUSABLE).map_err(failed)?;
                    format!("manifest: {error}; set aside as {renamed}")
                } else {
                    format!("manifest: {error}")
                };
                Ok(Self { reasons: vec![reason], ..Self::default() })
            }
            Err(error) => Err(failed(error)),
        }
    }
}

/// Refuse a different geometry under the same identity. The identity should include it.
fn fits(wanted: &Settings, known: &Settings) -> Result<()> {
    for (name, wanted, known) in [
        ("layers", u64::from(wanted.layers), u64::from(known.layers)),
        ("layer_bytes", wanted.layer_bytes as u64, known.layer_bytes as u64),
        ("block_tokens", wanted.block_tokens.into(), known.block_tokens.into()),
    ] {
        if wanted != known {
            return Err(Error::config(format!(
                "{name} is {wanted}, but {known} in the store of the same identity"
            )));
        }
    }
    Ok(())
}
