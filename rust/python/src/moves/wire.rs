//! Binary format of moves, for worker processes, little-endian.
//!
//! ```text
//!   magic "kvtrmove" | version u32 = 2 | zero u32 | count u64
//!   columns, unpadded: id u64 | kind u8 | lease u64 | block u64 | key 32 B | src u8 | dst u8
//!                      src slot u32 | dst slot u32 | group u8 | layer lo u16 | layer hi u16
//!                      after u64 | tokens u32 | label length u32
//!   labels
//! ```
//!
//! Invariant: decoding an encoding gives equal moves, and invalid bytes are refused. Cost: a
//! pass per column.

use pyo3::PyResult;

use super::Move;
use super::row::columns;
use crate::error::bad;

const MAGIC: &[u8; 8] = b"kvtrmove";
const VERSION: u32 = 2;
const HEADER: usize = 24;

/// Value of a column, as an array of bytes.
trait Cell: Sized {
    type Array: IntoIterator<Item = u8>;
    fn bytes(&self) -> Self::Array;
    fn take(bytes: &mut Bytes<'_>) -> Self;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Cell for $number {
            type Array = [u8; size_of::<$number>()];

            fn bytes(&self) -> Self::Array {
                self.to_le_bytes()
            }

            fn take(bytes: &mut Bytes<'_>) -> Self {
                Self::from_le_bytes(bytes.take())
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64);

impl Cell for [u8; 32] {
    type Array = Self;

    fn bytes(&self) -> Self {
        *self
    }

    fn take(bytes: &mut Bytes<'_>) -> Self {
        bytes.take()
    }
}

macro_rules! wire {
    ({ $($(#[$doc:meta])* $name:ident: $type:ty;)* }) => {
        /// Bytes of a move without its label.
        const ROW: usize = $(size_of::<$type>() +)* size_of::<u32>();

        // An iterator over arrays has an exact length, so each column is reserved once.
        fn put_columns(rows: &[Move], out: &mut Vec<u8>) {
            $(out.extend(rows.iter().flat_map(|row| Cell::bytes(&row.$name)));)*
        }

        fn take_columns(rows: &mut [Move], body: &mut Bytes<'_>) {
            $(for row in &mut *rows { row.$name = Cell::take(body); })*
        }
    };
}

columns!(wire);

/// Encode moves.
pub(super) fn encode(rows: &[Move]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + rows.len() * ROW);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&0_u32.to_le_bytes());
    out.extend_from_slice(&(rows.len() as u64).to_le_bytes());
    put_columns(rows, &mut out);
    let length = |row: &Move| u32::try_from(row.label.len()).unwrap_or(u32::MAX);
    out.extend(rows.iter().flat_map(|row| length(row).to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.label.iter().copied()));
    out
}

/// Decode and check moves.
pub(super) fn decode(data: &[u8]) -> PyResult<Vec<Move>> {
    let refuse = |what: &str| bad(format!("{} bytes are no moves: {what}", data.len()));
    let (header, body) =
        data.split_at_checked(HEADER).ok_or_else(|| refuse("the header is cut short"))?;
    let mut header = Bytes(header);
    if header.take::<8>() != *MAGIC {
        return Err(refuse("they do not start with the magic"));
    }
    let version = u32::take(&mut header);
    if version != VERSION || u32::take(&mut header) != 0 {
        return Err(refuse(&format!("their version is {version}, {VERSION} wanted")));
    }
    let count = u64::take(&mut header);
    let columns = usize::try_from(count).ok().and_then(|count| count.checked_mul(ROW));
    let Some((body, mut labels)) = columns.and_then(|columns| body.split_at_checked(columns))
    else {
        return Err(refuse(&format!("{count} moves take {HEADER} + {count} * {ROW} and more")));
    };
    let count = body.len() / ROW;
    let mut body = Bytes(body);
    let mut rows = vec![Move::default(); count];
    take_columns(&mut rows, &mut body);
    for row in &mut rows {
        let length = u32::take(&mut body) as usize;
        let label = labels.split_at_checked(length);
        let (label, rest) = label.ok_or_else(|| refuse("the labels are cut short"))?;
        row.label = label.to_vec();
        labels = rest;
    }
    if !labels.is_empty() {
        return Err(refuse(&format!("{} are left after the labels", labels.len())));
    }
    let wrong = |row: &Move| row.id == 0 || row.kind > 2 || row.layer_lo >= row.layer_hi;
    match rows.iter().position(wrong) {
        Some(at) => Err(refuse(&format!(
            "move {at} has id {}, kind {} and layers {}..{}",
            rows[at].id, rows[at].kind, rows[at].layer_lo, rows[at].layer_hi
        ))),
        None => Ok(rows),
    }
}

/// Byte reader with length checks.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (front, rest) = self.0.split_at(N);
        taken.copy_from_slice(front);
        self.0 = rest;
        taken
    }
}
