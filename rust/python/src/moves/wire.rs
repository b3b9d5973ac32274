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
//! Invariant: decoding an encoding gives equal moves; other bytes are refused. Cost: one pass per
//! column.

use pyo3::PyResult;

use super::Move;
use crate::error::bad;

const MAGIC: &[u8; 8] = b"kvtrmove";
const VERSION: u32 = 2;
const HEADER: usize = 24;
const ROW: usize = 8 * 4 + 32 + 4 * 3 + 2 * 2 + 4 * 2;

/// Encodes moves.
pub(super) fn encode(rows: &[Move]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + rows.len() * ROW);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&0_u32.to_le_bytes());
    out.extend_from_slice(&(rows.len() as u64).to_le_bytes());
    out.extend(rows.iter().flat_map(|row| row.id.to_le_bytes()));
    out.extend(rows.iter().map(|row| row.kind));
    out.extend(rows.iter().flat_map(|row| row.lease.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.block.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.key));
    out.extend(rows.iter().map(|row| row.src));
    out.extend(rows.iter().map(|row| row.dst));
    out.extend(rows.iter().flat_map(|row| row.src_slot.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.dst_slot.to_le_bytes()));
    out.extend(rows.iter().map(|row| row.group));
    out.extend(rows.iter().flat_map(|row| row.layer_lo.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.layer_hi.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.after.to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.tokens.to_le_bytes()));
    let length = |row: &Move| u32::try_from(row.label.len()).unwrap_or(u32::MAX);
    out.extend(rows.iter().flat_map(|row| length(row).to_le_bytes()));
    out.extend(rows.iter().flat_map(|row| row.label.iter().copied()));
    out
}

/// Decodes and checks moves.
pub(super) fn decode(data: &[u8]) -> PyResult<Vec<Move>> {
    let refuse = |what: &str| bad(format!("{} bytes are no moves: {what}", data.len()));
    let (header, body) =
        data.split_at_checked(HEADER).ok_or_else(|| refuse("the header is cut short"))?;
    let mut header = Bytes(header);
    if header.take::<8>() != *MAGIC {
        return Err(refuse("they do not start with the magic"));
    }
    let version = u32::from_le_bytes(header.take());
    if version != VERSION || u32::from_le_bytes(header.take()) != 0 {
        return Err(refuse(&format!("their version is {version}, {VERSION} wanted")));
    }
    let count = u64::from_le_bytes(header.take());
    let columns = usize::try_from(count).ok().and_then(|count| count.checked_mul(ROW));
    let Some((body, mut labels)) = columns.and_then(|columns| body.split_at_checked(columns))
    else {
        return Err(refuse(&format!("{count} moves take {HEADER} + {count} * {ROW} and more")));
    };
    let count = body.len() / ROW;
    let mut body = Bytes(body);
    let empty = Move {
        id: 0,
        kind: 0,
        lease: 0,
        block: 0,
        key: [0; 32],
        src: 0,
        dst: 0,
        src_slot: 0,
        dst_slot: 0,
        group: 0,
        layer_lo: 0,
        layer_hi: 0,
        after: 0,
        tokens: 0,
        label: Vec::new(),
    };
    let mut rows = vec![empty; count];
    for row in &mut rows {
        row.id = u64::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.kind = u8::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.lease = u64::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.block = u64::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.key = body.take();
    }
    for row in &mut rows {
        row.src = u8::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.dst = u8::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.src_slot = u32::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.dst_slot = u32::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.group = u8::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.layer_lo = u16::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.layer_hi = u16::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.after = u64::from_le_bytes(body.take());
    }
    for row in &mut rows {
        row.tokens = u32::from_le_bytes(body.take());
    }
    for row in &mut rows {
        let length = u32::from_le_bytes(body.take()) as usize;
        let label = labels.split_at_checked(length);
        let (label, rest) = label.ok_or_else(|| refuse("the labels are cut short"))?;
        row.label = label.to_vec();
        labels = rest;
    }
    if !labels.is_empty() {
        return Err(refuse(&format!("{} are left behind the labels", labels.len())));
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

/// Byte reader that checks lengths.
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
