//! Manifest scanner: a pass over all frames when a store opens, single frames later.
//!
//! Invariant: invalid bytes are skipped and reported. Scanning resumes at the next valid frame on
//! an 8-byte boundary, up to the maximum length for the number of slots. Cost: a sequential read, a
//! megabyte at a time, without holes. Never a segment.

use std::io;

use kvtrie_core::Layers;

use crate::file::{File, read_full};
use crate::frame::{self, Frame, Head, Put, SMALLEST};
use crate::settings::{HEAD_FIXED, PAGE, Settings};
use crate::table::{Entry, Table};

/// Bytes read at a time.
const STEP: usize = 1 << 20;

/// Frames applied to the table as a batch, so that their cache misses overlap.
const TOGETHER: usize = 256;

/// Read buffer over a part of a file.
#[derive(Debug, Default)]
pub(crate) struct Window {
    bytes: Vec<u8>,
    start: u64,
}

impl Window {
    /// Return `length` bytes at `at`, or fewer at the end of the file.
    pub(crate) fn get(&mut self, file: &dyn File, at: u64, length: usize) -> io::Result<&[u8]> {
        let inside = at.checked_sub(self.start).and_then(|offset| usize::try_from(offset).ok());
        let held = inside.is_some_and(|offset| offset + length <= self.bytes.len());
        let offset = if held { inside.unwrap_or(0) } else { 0 };
        if !held {
            self.bytes.resize(length.max(STEP), 0);
            let got = read_full(file, &mut self.bytes, at)?;
            self.bytes.truncate(got);
            self.start = at;
        }
        let end = (offset + length).min(self.bytes.len());
        Ok(&self.bytes[offset..end])
    }
}

/// Read a manifest's header.
pub(crate) fn head(file: &dyn File) -> io::Result<Head> {
    let mut window = Window::default();
    let length = frame::head_length(window.get(file, 0, HEAD_FIXED)?);
    let length = length.filter(|&length| length <= 1 << 20).unwrap_or(0);
    Ok(frame::decode_head(window.get(file, 0, length)?))
}

/// Apply all frames from `from` on to the table. The manifest was made for `blocks` slots. Returns
/// the end of the last valid frame.
pub(crate) fn frames(
    file: &dyn File,
    from: u64,
    blocks: u32,
    settings: &Settings,
    table: &mut Table,
    reasons: &mut Vec<String>,
) -> io::Result<u64> {
    let len = file.size()?.len;
    let most = from + settings.manifest_bytes(blocks);
    if len > most {
        reasons.push(format!(
            "manifest: {len} bytes, at most {most} for {blocks} slots; the rest was not read"
        ));
    }
    let len = len.min(most);
    let mut window = Window::default();
    let (mut at, mut good) = (from, from);
    let mut entries = Vec::with_capacity(TOGETHER);
    while at < len {
        let start = window.get(file, at, SMALLEST)?;
        let fits = |&length: &usize| length as u64 <= settings.frame_bytes();
        // A damaged length is limited here and detected by the checksum.
        let length = frame::stated(start).filter(fits).unwrap_or(SMALLEST);
        let Some((found, length)) = frame::decode(window.get(file, at, length)?, settings.seed())
        else {
            at += 8;
            // Skip holes by pages, not by 8 bytes.
            if at.is_multiple_of(PAGE) {
                at = file.data_from(at).clamp(at, len);
            }
            continue;
        };
        if good < at {
            reasons.push(format!("manifest: bytes {good}..{at} are no frames and were skipped"));
        }
        match entry(found, at, length, settings) {
            Ok(entry) => entries.push(entry),
            Err(reason) => reasons.push(format!("manifest: frame at {at}: {reason}")),
        }
        let (Frame::Put(Put { sequence, .. }) | Frame::Free { sequence, .. }) = found;
        table.skip_to(sequence);
        if entries.len() == TOGETHER {
            entries.drain(..).for_each(|(slot, entry)| table.apply(slot, entry));
        }
        at += length as u64;
        good = at;
    }
    for (slot, entry) in entries {
        table.apply(slot, entry);
    }
    if good < len {
        reasons.push(format!("manifest: {} bytes after byte {good} are no frame", len - good));
    }
    Ok(good)
}

/// Slot and table entry of a frame. The error names an impossible value.
fn entry(
    frame: Frame<'_>,
    at: u64,
    length: usize,
    settings: &Settings,
) -> Result<(u32, Entry), String> {
    let (Frame::Put(Put { slot, .. }) | Frame::Free { slot, .. }) = frame;
    if slot >= settings.blocks {
        return Err(format!("slot {slot}, there are {}", settings.blocks));
    }
    match frame {
        Frame::Free { sequence, .. } => Ok((slot, Entry { sequence, ..Entry::default() })),
        Frame::Put(put) => {
            if put.layers.is_empty() || !Layers::new(0, settings.layers).covers(put.layers) {
                return Err(format!("layers {}, there are {}", put.layers, settings.layers));
            }
            let (key, sequence, layers) = (put.key, put.sequence, put.layers);
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            Ok((slot, Entry { key, sequence, at, length, layers }))
        }
    }
}
