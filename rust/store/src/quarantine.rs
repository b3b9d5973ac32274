//! Quarantine: renames unusable files out of the way.
//!
//! Invariant: only the writer renames, and no file is lost, not even an earlier quarantined file.
//! Cost: a listing of the folder and a rename.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::device::{Access, Device};
use crate::file::File;
use crate::regular::is_not_regular;

/// Suffix of an unusable file.
pub(crate) const UNUSABLE: &str = "aside";

/// Rename `name` to `name.why`, or to the first free of `name.why.2`, …. Returns the new name.
pub(crate) fn quarantine(
    device: &dyn Device,
    folder: &Path,
    name: &str,
    why: &str,
) -> io::Result<String> {
    let taken: BTreeSet<String> = device.list(folder)?.into_iter().map(|item| item.name).collect();
    let mut free = format!("{name}.{why}");
    for count in 2.. {
        if !taken.contains(&free) {
            break;
        }
        free = format!("{name}.{why}.{count}");
    }
    device.rename(&folder.join(name), &folder.join(&free))?;
    Ok(free)
}

/// Create a new file `name`, replacing any old file.
pub(crate) fn create(device: &dyn Device, folder: &Path, name: &str) -> io::Result<Arc<dyn File>> {
    let path = folder.join(name);
    match device.open(&path, Access::Fresh) {
        // A folder, possibly with files in it.
        Err(error) if is_not_regular(&error) => {
            quarantine(device, folder, name, UNUSABLE)?;
            device.open(&path, Access::Fresh)
        }
        opened => opened,
    }
}
