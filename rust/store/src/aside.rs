//! Setting aside what stands under a name of the store's and is no good there.
//!
//! Invariant: only the writer does it; nothing is lost, not even what was set aside before.
//! Cost: a listing of the folder and a rename.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::device::{Access, Device, File};
use crate::regular::is_no_file;

/// What is behind the name of something that is no file.
pub(crate) const ASIDE: &str = "aside";

/// Renames `name` to `name.why`, or to the first of `name.why.2`, … that is free; returns which.
pub(crate) fn set_aside(
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

/// A new file under `name`, whatever stood there.
pub(crate) fn fresh(device: &dyn Device, folder: &Path, name: &str) -> io::Result<Arc<dyn File>> {
    let path = folder.join(name);
    match device.open(&path, Access::Fresh) {
        // A folder, which may have files of its own.
        Err(error) if is_no_file(&error) => {
            set_aside(device, folder, name, ASIDE)?;
            device.open(&path, Access::Fresh)
        }
        opened => opened,
    }
}
