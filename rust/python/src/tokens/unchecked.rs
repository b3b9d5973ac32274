//! Tokens of long arrays, with checks only for tokens not matched in the trie.
//!
//! Invariant: numbers not compared with known tokens are checked before a call returns. Cost: a
//! pass over the unmatched tokens.

use kvtrie_core::{Query, Token};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

use super::{MOST, Numbers, out_of_range, unsigned};

/// Token count up to which all are checked before the lookup.
const SHORT: usize = 4096;

/// Numbers of a long contiguous array, compared directly with known tokens. Equal numbers need no
/// check.
pub(crate) enum Unchecked<'py> {
    Signed(Numbers<'py, i32>),
    Wide(Numbers<'py, i64>),
}

impl<'py> Unchecked<'py> {
    /// Numbers of a long array of `int32` or `int64`.
    pub(crate) fn of(given: &Bound<'py, PyAny>) -> Option<Self> {
        let array = given.cast::<PyUntypedArray>().ok()?;
        if array.len() <= SHORT || array.len() > MOST {
            return None;
        }
        let dtype = array.dtype();
        match (dtype.kind(), dtype.itemsize()) {
            (b'i', 4) => Numbers::of(array).map(Self::Signed),
            (b'i', 8) => Numbers::of(array).map(Self::Wide),
            _ => None,
        }
    }

    /// Numbers as a query.
    pub(crate) fn query(&self) -> Query<'_> {
        match self {
            Self::Signed(numbers) => Query::Signed(numbers.as_slice()),
            Self::Wide(numbers) => Query::Wide(bytemuck::cast_slice(numbers.as_slice())),
        }
    }

    /// Refuse the first invalid token after `matched` tokens.
    pub(crate) fn check(&self, matched: usize) -> PyResult<()> {
        match self.query() {
            Query::Tokens(_) => Ok(()),
            Query::Signed(numbers) => unsigned(numbers, matched),
            Query::Wide(numbers) => {
                let rest = &numbers[matched..];
                if rest.iter().fold(0, |all, number| all | number) <= u64::from(Token::MAX) {
                    return Ok(());
                }
                let large = rest.iter().position(|&number| number > u64::from(Token::MAX));
                let wrong = large.map(|at| (matched + at, rest[at].cast_signed()));
                wrong.map_or(Ok(()), |(at, token)| Err(out_of_range(at, token)))
            }
        }
    }
}
