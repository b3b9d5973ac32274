//! Second folder: every other slot, on another device.
//!
//! Its part of a store has the store's name with the suffix `.second`. Both parts have a file
//! `pair` with one random number, so that parts of two stores are never combined. Invariant: if the
//! second folder has blocks, both numbers exist and are equal, or the store does not open. Cost:
//! two small files, read when a store opens.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};

use crate::device::{Access, Device};
use crate::error::{Error, Result};
use crate::file::{read_full, write_full};
use crate::manifest;
use crate::quarantine;
use crate::regular::{forbidden, is_not_regular};
use crate::settings::Settings;
use crate::table::Table;

/// Name of the file with the number.
const PAIR: &str = "pair";

fn named(settings: &Settings) -> String {
    format!("{}.second", settings.folder_name())
}

/// Path of a store's part in its second folder, if it has one.
pub(crate) fn path(settings: &Settings) -> Option<PathBuf> {
    settings.second.as_ref().map(|folder| folder.join(named(settings)))
}

/// The folder with the manifest; the other one becomes the settings' second. The caller may give
/// them in either order, the first as an absolute path.
pub(crate) fn in_order(
    device: &dyn Device,
    folder: &Path,
    settings: &mut Settings,
) -> Result<PathBuf> {
    if let Some(second) = &mut settings.second {
        *second = std::path::absolute(&*second)
            .map_err(|error| Error::io(format!("finding {}", second.display()), error))?;
    }
    let exists = |path: PathBuf| device.open(&path, Access::Read).is_ok();
    let (name, half) = (settings.folder_name(), folder.join(named(settings)));
    if exists(folder.join(&name).join(manifest::NAME)) {
        return Ok(folder.to_path_buf());
    }
    let other = settings.second.clone().filter(|other| exists(other.join(&name).join(PAIR)));
    if let Some(other) = other {
        settings.second = Some(folder.to_path_buf());
        return Ok(other);
    }
    if exists(half.join(PAIR)) {
        return Err(Error::config(format!(
            "{} is half of a store whose other folder was not given or is not there; remove it to \
             begin anew",
            half.display()
        )));
    }
    Ok(folder.to_path_buf())
}

fn number(device: &dyn Device, part: &Path) -> Result<Option<String>> {
    let path = part.join(PAIR);
    let failed = |error| Error::io(format!("reading {}", path.display()), error);
    let file = match device.open(&path, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if is_not_regular(&error) || forbidden(&error) => {
            return Err(Error::config(format!("{}: {error}", path.display())));
        }
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = [0; 64];
    let count = read_full(&*file, &mut bytes, 0).map_err(failed)?;
    // A torn write of the number counts as none.
    Ok(std::str::from_utf8(&bytes[..count])
        .ok()
        .filter(|text| text.len() == 16)
        .map(str::to_string))
}

/// Checks that both folders exist and belong together.
pub(crate) fn check(
    device: &dyn Device,
    own: &Path,
    settings: &Settings,
    table: &Table,
) -> Result<()> {
    let blocks = table.blocks().count();
    // Without blocks an unusable file is simply replaced.
    let number = |folder: &Path| match number(device, folder) {
        Err(Error::Config(_)) if blocks == 0 => Ok(None),
        found => found,
    };
    let here = number(own)?;
    let wrong = |what: String| Err(Error::config(format!("{what}; {blocks} blocks are there")));
    let (one, store) = (own.display(), settings.folder_name());
    let Some(part) = path(settings) else {
        return match here {
            None => Ok(()),
            Some(_) => wrong(format!("{one} lies in two folders: give the second one too")),
        };
    };
    let two = part.display();
    match (here, number(&part)?) {
        (None, None) if blocks == 0 => Ok(()),
        (None, None) => {
            wrong(format!("{one} lies in one folder: give no second one, or remove it"))
        }
        (Some(_), None) if !table.in_second() => Ok(()),
        (Some(_), None) => wrong(format!(
            "{two} is not there, where every other block of {one} lies: mount its device, or remove \
             {one} to begin anew"
        )),
        (Some(here), Some(there)) if here == there => Ok(()),
        (_, Some(_)) => wrong(format!(
            "{two} is half of another store {store} than {one}: give the folders that belong \
             together, or remove both to begin anew"
        )),
    }
}

/// Writes the number to both folders if one has none; the second one has no blocks then.
pub(crate) fn join(device: &dyn Device, own: &Path, settings: &Settings) -> Result<()> {
    let Some(part) = path(settings) else { return Ok(()) };
    let number = |folder: &Path| match number(device, folder) {
        Err(Error::Config(_)) => Ok(None),
        found => found,
    };
    let known = number(own)?;
    if known.is_some() && number(&part)?.is_some() {
        return Ok(());
    }
    let text = known.unwrap_or_else(|| format!("{:016x}", RandomState::new().hash_one(own)));
    for folder in [own, &part] {
        let path = folder.join(PAIR);
        let failed = |error| Error::io(format!("writing {}", path.display()), error);
        let file = quarantine::create(device, folder, PAIR).map_err(failed)?;
        write_full(&*file, &mut [IoSlice::new(text.as_bytes())], 0).map_err(failed)?;
        file.sync().map_err(failed)?;
        device.sync_folder(folder).map_err(failed)?;
    }
    Ok(())
}
