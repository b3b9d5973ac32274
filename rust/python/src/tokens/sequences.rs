//! Tokens of several sequences per call.
//!
//! Invariant: each sequence is checked like a single sequence. Cost: the sum over the sequences.

use kvtrie_core::Token;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::error::bad;
use crate::memory::{items, vector};
use crate::number::shown;

use super::{Tokens, check_length};

/// Limit of sequences per call.
const MOST: usize = 1 << 20;

/// Tokens of several sequences.
pub(crate) enum Sequences<'py> {
    /// A single token per sequence.
    Singles(Tokens<'py>),
    Many(Vec<Tokens<'py>>),
}

impl<'py> Sequences<'py> {
    /// Convert a token per sequence (an array or a list of integers), or a sequence each.
    pub(crate) fn new(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let singles = match given.cast::<PyUntypedArray>() {
            Ok(array) => array.ndim() == 1 && array.dtype().kind() != b'O',
            Err(_) => given.get_item(0).is_ok_and(|first| first.is_instance_of::<PyInt>()),
        };
        if singles { Tokens::new(given).map(Self::Singles) } else { Self::many(given) }
    }

    /// Convert a list of sequences.
    pub(crate) fn many(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        if given.try_iter().is_err() {
            return Err(bad(format!("tokens are {}, a sequence for each wanted", shown(given))));
        }
        if let Ok(array) = given.cast::<PyUntypedArray>() {
            check_length(array.len())?;
        }
        items(given, MOST, "sequences", |_, tokens| Tokens::new(&tokens)).map(Self::Many)
    }

    /// Number of sequences.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Singles(tokens) => tokens.as_slice().len(),
            Self::Many(all) => all.len(),
        }
    }

    /// Tokens of each sequence.
    pub(crate) fn slices(&self) -> Vec<&[Token]> {
        match self {
            Self::Singles(tokens) => tokens.as_slice().chunks(1).collect(),
            Self::Many(all) => all.iter().map(Tokens::as_slice).collect(),
        }
    }

    /// Copies of the sequences, valid without the interpreter's lock.
    pub(crate) fn into_vecs(self) -> PyResult<Vec<Vec<Token>>> {
        match self {
            Self::Singles(tokens) => {
                let mut all = vector(tokens.as_slice().len(), "tokens")?;
                all.extend(tokens.as_slice().chunks(1).map(<[Token]>::to_vec));
                Ok(all)
            }
            Self::Many(all) => all.into_iter().map(Tokens::into_vec).collect(),
        }
    }
}
