//! Header of a kept file: its format and the offsets of its parts.
//!
//! ```text
//!   0 magic  8 checksum of 16..128 and of about  16 version  20 layers  22 zero  24 identity
//!   56 layer_bytes  64 block_tokens  68 blocks  72 table  80 pool  88 file length  96 about length
//!   100 zero  128 owner: process, its namespace, its start  152 zero  160 about, zeros to a page
//! ```
//!
//! Invariant: on a given file system, equal settings give equal offsets. The owner is outside the
//! checksum, because each process writes it. Cost: a page.

use std::fs;
use std::os::unix::fs::MetadataExt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::page::{half, word};
use crate::pages::SIZE;
use crate::settings::{Durability, Settings};

pub(super) const MAGIC: [u8; 8] = *b"kvtrieK1";
/// Version of the format.
pub(super) const VERSION: u32 = 1;
const FIXED: usize = 160;
const SUMMED: usize = 128;
pub(super) const OWNER: usize = 128;
/// Offset of the 8-byte checksum.
pub(super) const SUM: usize = 8;

/// Bytes of a slot's entry before its record.
pub(super) const ENTRY_FIXED: usize = 96;

/// Offsets of a file's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) table: usize,
    pub(super) entry: usize,
    pub(super) pool: u64,
    pub(super) length: u64,
}

impl Places {
    /// Offsets for the settings, on a file system with pages of `page` bytes.
    pub(super) fn of(settings: &Settings, page: u64) -> Self {
        let page = page.max(SIZE as u64);
        let table = (FIXED + settings.about.len()).next_multiple_of(SIZE);
        let entry = (ENTRY_FIXED + settings.record_bytes()).next_multiple_of(64);
        let end = table as u64 + u64::from(settings.blocks) * entry as u64;
        let pool = end.next_multiple_of(page);
        let block = u64::from(settings.layers) * settings.layer_bytes as u64;
        let length = (pool + u64::from(settings.blocks) * block).next_multiple_of(page);
        Self { table, entry, pool, length }
    }
}

/// Process writing to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process id.
    pub process: u32,
    namespace: u64,
    started: u64,
}

impl Owner {
    /// This process.
    pub(super) fn this() -> Self {
        let process = std::process::id();
        Self { process, namespace: namespace(), started: started(process).unwrap_or(0) }
    }

    /// Whether the process has died, even if its id was reused. A process of a different namespace
    /// counts as alive, because its id is unknown here.
    #[must_use]
    pub fn dead(&self) -> bool {
        self.namespace == namespace()
            && self.started != 0
            && started(self.process) != Some(self.started)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        [u64::from(self.process), self.namespace, self.started]
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect()
    }

    pub(super) fn decode(head: &[u8]) -> Option<Self> {
        let process = u32::try_from(word(head, OWNER)).ok().filter(|&process| process > 0)?;
        Some(Self { process, namespace: word(head, OWNER + 8), started: word(head, OWNER + 16) })
    }
}

/// Namespace of process ids, or 0.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

/// Clock tick of a process start. `None` if the process is gone or a zombie.
fn started(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may contain spaces. The state follows, and 19 fields later the start.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok()).flatten()
}

/// Encode a header.
pub(super) fn encode(settings: &Settings, places: &Places) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend([0; 8]);
    out.extend(VERSION.to_le_bytes());
    out.extend(settings.layers.to_le_bytes());
    out.extend([0; 2]);
    out.extend(settings.identity);
    out.extend((settings.layer_bytes as u64).to_le_bytes());
    out.extend(settings.block_tokens.to_le_bytes());
    out.extend(settings.blocks.to_le_bytes());
    for place in [places.table as u64, places.pool, places.length] {
        out.extend(place.to_le_bytes());
    }
    out.extend(u32::try_from(settings.about.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.resize(FIXED, 0);
    out.extend(settings.about.as_bytes());
    let sum = sum(&out);
    out[8..16].copy_from_slice(&sum.to_le_bytes());
    out.resize(places.table, 0);
    out
}

fn sum(head: &[u8]) -> u64 {
    xxh3_64_with_seed(&head[FIXED..], xxh3_64_with_seed(&head[16..SUMMED], head.len() as u64))
}

/// Content of a header.
#[derive(Debug)]
pub(super) enum Head {
    /// Not written yet.
    Empty,
    /// A different format.
    Foreign,
    /// Written by a different version.
    Version(u32),
    /// Damaged.
    Damaged,
    /// Valid settings and offsets.
    Good(Box<(Settings, Places)>),
}

/// Decode the start of a file. `head` has the whole file or the longest possible header.
pub(super) fn decode(head: &[u8]) -> Head {
    if head.iter().take(SIZE).all(|&byte| byte == 0) {
        return Head::Empty;
    }
    if head.len() < FIXED || head[..8] != MAGIC {
        return Head::Foreign;
    }
    let version = half(head, 16);
    let about = head.get(FIXED..FIXED.saturating_add(half(head, 96) as usize));
    let whole = about.map(|about| &head[..FIXED + about.len()]);
    let (Some(about), true) = (about, whole.is_some_and(|head| sum(head) == word(head, 8))) else {
        return Head::Damaged;
    };
    if version != VERSION {
        return Head::Version(version);
    }
    let settings = Settings {
        identity: std::array::from_fn(|at| head[24 + at]),
        about: String::from_utf8_lossy(about).into_owned(),
        layers: u16::from_le_bytes([head[20], head[21]]),
        layer_bytes: usize::try_from(word(head, 56)).unwrap_or(usize::MAX),
        block_tokens: half(head, 64),
        blocks: half(head, 68),
        durability: Durability::default(),
    };
    let Ok(table) = usize::try_from(word(head, 72)) else { return Head::Damaged };
    let entry = (ENTRY_FIXED + settings.record_bytes()).next_multiple_of(64);
    let places = Places { table, entry, pool: word(head, 80), length: word(head, 88) };
    if settings.check().is_err() || places != Places::of(&settings, 1).with(places) {
        return Head::Damaged;
    }
    Head::Good(Box::new((settings, places)))
}

impl Places {
    /// Use a different file's alignment, if possible.
    fn with(self, other: Self) -> Self {
        if other.pool >= self.pool && other.length >= self.length {
            Self { pool: other.pool, length: other.length, ..self }
        } else {
            self
        }
    }
}
