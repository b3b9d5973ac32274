//! Reader for trace lines of block hashes, with a single call per ordinary line.
//!
//! Invariant: gives the same result as the Python reader, and leaves all unusual lines to the
//! Python reader, for its error messages. Equal hashes have equal ids, distinct hashes distinct
//! ids. Cost: a pass over the line, and an entry per numbered hash.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use rustc_hash::FxHashMap;
use serde::de::{Error, IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::bad;

/// A line of a trace of block hashes.
#[derive(Deserialize)]
struct Hashed<'a> {
    #[serde(borrow)]
    timestamp: Option<Word<'a>>,
    arrival_ns: Option<u64>,
    input_length: u32,
    output_length: u32,
    hash_ids: Option<Vec<Hash>>,
    ranges: Option<Vec<(u64, u64)>>,
    #[serde(borrow)]
    session: Option<Word<'a>>,
    #[serde(default)]
    session_id: Seen,
    request_id: Option<String>,
    wait_for: Option<Vec<String>>,
    tool_wait_ms: Option<u64>,
    #[serde(default)]
    delay: Seen,
    #[serde(default)]
    chat_id: Seen,
    #[serde(default)]
    parent_chat_id: Seen,
    #[serde(default)]
    turn: Seen,
    #[serde(default, rename = "type")]
    kind: Seen,
    #[serde(default)]
    branches: Seen,
    #[serde(default)]
    prefix_reset: Seen,
}

/// Whether a field is present, with any value.
#[derive(Clone, Copy, Default)]
struct Seen(bool);

impl<'de> Deserialize<'de> for Seen {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(from).map(|_| Self(true))
    }
}

/// A number or a text.
#[derive(IntoPyObject)]
enum Word<'a> {
    Number(u64),
    Text(Cow<'a, str>),
}

impl<'de: 'a, 'a> Deserialize<'de> for Word<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WordVisitor)
    }
}

struct WordVisitor;

impl<'de> Visitor<'de> for WordVisitor {
    type Value = Word<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a number or a text")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Word::Number(number))
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Word::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Word::Text(Cow::Owned(text.into())))
    }
}

/// A 64-bit number or hexadecimal text.
struct Hash(u64);

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(HashVisitor)
    }
}

struct HashVisitor;

impl Visitor<'_> for HashVisitor {
    type Value = Hash;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a hash")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Hash, E> {
        Ok(Hash(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Hash, E> {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = plain.then(|| u64::from_str_radix(digits, 16).ok()).flatten();
        number.map(Hash).ok_or_else(|| E::custom("no hash"))
    }
}

/// Maximum length of a name.
const MOST_NAME: usize = u16::MAX as usize;
/// Maximum pause.
const MOST_WAIT_MS: u64 = (1 << 53) / 1_000_000;

/// Fields affecting the result without being read here, in the order of their flags.
const UNREAD: [&str; 7] =
    ["chat_id", "parent_chat_id", "delay", "turn", "type", "branches", "prefix_reset"];

/// `(request_id, wait_for, tool_wait_ms)`.
type Waits = (Option<String>, Option<Vec<String>>, Option<u64>);

/// `(timestamp, arrival_ns, input tokens, output tokens, block ids, session, unread fields,
/// waits)`.
type Row<'a, 'py> = (
    Option<Word<'a>>,
    Option<u64>,
    u32,
    u32,
    Bound<'py, PyArray1<u32>>,
    Option<Cow<'a, str>>,
    Option<Vec<&'static str>>,
    Option<Waits>,
);

/// Reader of lines. Hashes below `own` are used as ids. All larger hashes get ids from `own` to
/// `room`, in order of appearance.
#[pyclass(frozen, module = "kvtrie._kvtrie")]
pub(crate) struct HashLines {
    hash_tokens: Option<u32>,
    most: usize,
    own: u64,
    room: u64,
    numbers: Mutex<FxHashMap<u64, u32>>,
}

impl HashLines {
    /// Ids of hashes. `None` without room.
    fn numbered(&self, hashes: impl Iterator<Item = u64>, into: &mut Vec<u32>) -> Option<()> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        for hash in hashes {
            let id = if hash < self.own {
                hash
            } else {
                let next = self.own + numbers.len() as u64;
                let known = numbers.get(&hash).copied().map(u64::from);
                let id = known.or_else(|| (next < self.room).then_some(next))?;
                if known.is_none() {
                    numbers.insert(hash, u32::try_from(id).ok()?);
                }
                id
            };
            into.push(u32::try_from(id).ok()?);
        }
        Some(())
    }

    /// Ids of a line. `None` if invalid.
    fn ids_of(&self, row: &Hashed<'_>) -> Option<Vec<u32>> {
        let length = row.input_length;
        let mut left = u64::from(length.max(1));
        let total = match (&row.hash_ids, &row.ranges) {
            (Some(hashes), None) => hashes.len(),
            (None, Some(spans)) => {
                // A block has at least one token, so a short line cannot name billions of blocks.
                for (first, end) in spans {
                    let ids = end.checked_sub(*first).filter(|&ids| ids > 0)?;
                    left = left.checked_sub(ids)?;
                }
                usize::try_from(u64::from(length.max(1)) - left).ok()?
            }
            _ => return None,
        };
        let fits = self.hash_tokens.is_none_or(|size| {
            let (low, high) = (length / size, length.div_ceil(size));
            (low as usize..=high as usize).contains(&total)
        });
        if total == 0 || total > self.most || !fits {
            return None;
        }
        let mut ids = Vec::with_capacity(total);
        if let Some(hashes) = &row.hash_ids {
            self.numbered(hashes.iter().map(|hash| hash.0), &mut ids)?;
        }
        for &(first, end) in row.ranges.iter().flatten() {
            if end <= self.own {
                ids.extend(u32::try_from(first).ok()?..u32::try_from(end).ok()?);
            } else {
                self.numbered(first..end, &mut ids)?;
            }
        }
        Some(ids)
    }
}

#[pymethods]
impl HashLines {
    #[new]
    #[pyo3(signature = (*, most, own, room, hash_tokens=None))]
    fn new(most: usize, own: u32, room: u64, hash_tokens: Option<u32>) -> PyResult<Self> {
        if room > 1 << 32 || hash_tokens == Some(0) {
            return Err(bad(format!(
                "room is {room}, at most 2^32 wanted, and hash_tokens above 0"
            )));
        }
        Ok(Self { hash_tokens, most, own: own.into(), room, numbers: Mutex::default() })
    }

    /// Read a line. None if it is unusual or invalid.
    fn row<'a, 'py>(&self, py: Python<'py>, line: &'a str) -> Option<Row<'a, 'py>> {
        // serde would accept an array as the fields in order.
        let object = line.trim_start().starts_with('{');
        let mut row: Hashed<'a> = object.then(|| serde_json::from_str(line).ok()).flatten()?;
        let session = row.session.take().map(|name| match name {
            Word::Number(number) => Cow::Owned(number.to_string()),
            Word::Text(text) => text,
        });
        let names = [session.as_deref(), row.request_id.as_deref()];
        let long = names.iter().flatten().any(|name| name.len() > MOST_NAME);
        let late = row.arrival_ns.is_some_and(|at| at >= 1 << 63 || row.timestamp.is_some());
        if row.session_id.0 || long || late || row.tool_wait_ms.is_some_and(|ms| ms > MOST_WAIT_MS)
        {
            return None;
        }
        let ids = self.ids_of(&row)?;
        let seen = [
            row.chat_id,
            row.parent_chat_id,
            row.delay,
            row.turn,
            row.kind,
            row.branches,
            row.prefix_reset,
        ];
        let unread = seen.iter().any(|field| field.0).then(|| {
            let given = std::iter::zip(UNREAD, seen).filter(|(_, field)| field.0);
            given.map(|(name, _)| name).collect()
        });
        let waits = (row.request_id.take(), row.wait_for.take(), row.tool_wait_ms);
        // With `wait_for`, a delay is part of the pause.
        if waits.1.is_some() && row.delay.0 {
            return None;
        }
        let waits = (waits.0.is_some() || waits.1.is_some() || waits.2.is_some()).then_some(waits);
        let ids = ids.into_pyarray(py);
        let Hashed { timestamp, arrival_ns, input_length, output_length, .. } = row;
        Some((timestamp, arrival_ns, input_length, output_length, ids, session, unread, waits))
    }

    /// Ids of 64-bit hashes.
    fn ids<'py>(&self, py: Python<'py>, hashes: Vec<u64>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let mut ids = Vec::with_capacity(hashes.len());
        self.numbered(hashes.into_iter(), &mut ids).map(|()| ids.into_pyarray(py)).ok_or_else(
            || {
                let (own, room) = (self.own, self.room.saturating_sub(self.own));
                bad(format!(
                    "more than {room} distinct hashes of at least {own}, and no id is left"
                ))
            },
        )
    }
}
