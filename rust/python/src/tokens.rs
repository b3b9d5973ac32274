//! Token ids from Python objects.
//!
//! A contiguous array of `uint32` or `int32` is read in place. Everything else is copied and
//! checked. Invariant: every token is an integer in `0..2**32`. Otherwise a `ConfigError` shows the
//! value and its index, or the dtype and the shape. A call releasing the interpreter's lock has a
//! copy of the array. Cost: a pass over the tokens.

#![expect(unsafe_code, reason = "to register a borrow takes longer than copying a prompt")]

mod sequences;
mod unchecked;

use numpy::{
    Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList, PySet, PyString, PyTuple};

use kvtrie_core::Token;

use crate::error::bad;
use crate::memory::{claimed, fits, items, vector};
use crate::number::shown;

pub(crate) use sequences::Sequences;
pub(crate) use unchecked::Unchecked;

/// Token limit of a sequence: a gigabyte.
const MOST: usize = 1 << 28;

/// Tokens checked and converted per chunk, within the L1 cache.
const CHUNK: usize = 1024;

/// A sequence of tokens.
pub(crate) enum Tokens<'py> {
    Unsigned(Numbers<'py, Token>),
    /// All known to be non-negative.
    Signed(Numbers<'py, i32>),
}

/// Contiguous numbers.
pub(crate) enum Numbers<'py, T> {
    InPlace(Bound<'py, PyArray1<T>>),
    Copied(Vec<T>),
}

impl<'py, T: Element> Numbers<'py, T> {
    /// Numbers of an array, unless it has a different type, several dimensions or gaps.
    fn of(array: &Bound<'py, PyUntypedArray>) -> Option<Self> {
        let array = array.cast::<PyArray1<T>>().ok()?;
        in_place(array).is_some().then(|| Self::InPlace(array.clone()))
    }

    fn as_slice(&self) -> &[T] {
        match self {
            Self::InPlace(array) => in_place(array).unwrap_or_default(),
            Self::Copied(numbers) => numbers,
        }
    }
}

/// Numbers of an array in place. `None` if it has gaps or is misaligned.
fn in_place<'a, T: Element>(array: &'a Bound<'_, PyArray1<T>>) -> Option<&'a [T]> {
    // SAFETY: the array is held as long as the slice, and we never write to arrays. A concurrent
    // write to the array breaks the assumptions of every reader, including numpy.
    unsafe { array.as_slice() }.ok()
}

impl<'py> Tokens<'py> {
    /// Convert any sequence of integers, array, buffer or CPU tensor.
    pub(crate) fn new(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = given.cast::<PyUntypedArray>() {
            return Self::of_array(array);
        }
        if given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>() {
            return from_items(given).map(Self::from);
        }
        let py = given.py();
        let refused = given.is_instance_of::<PyString>()
            || given.is_instance_of::<PyBytes>()
            || given.is_instance_of::<PyByteArray>()
            || given.is_instance_of::<PyDict>()
            || given.is_instance_of::<PySet>();
        if refused {
            return Err(bad(format!(
                "tokens are a sequence of integers or an integer array, not {}",
                given.get_type().name()?
            )));
        }
        if given.hasattr(intern!(py, "__array__"))? || is_buffer(given)? {
            static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let asarray = ASARRAY.import(py, "numpy", "asarray")?;
            let array = asarray.call1((given,)).map_err(|error| fits(error, py, "tokens"))?;
            return Self::of_array(array.cast::<PyUntypedArray>()?);
        }
        from_items(given).map(Self::from)
    }

    fn of_array(array: &Bound<'py, PyUntypedArray>) -> PyResult<Self> {
        check_length(array.len())?;
        // Reading the dtype is faster than trying several types.
        let dtype = array.dtype();
        let plain = match (dtype.kind(), dtype.itemsize()) {
            (b'u', 4) => Numbers::of(array).map(Self::Unsigned),
            (b'i', 4) => Numbers::of(array).map(Self::Signed),
            _ => None,
        };
        if let Some(Self::Signed(tokens)) = &plain {
            unsigned(tokens.as_slice(), 0)?;
        }
        plain.map_or_else(|| from_array(array).map(Self::from), Ok)
    }

    /// The tokens.
    pub(crate) fn as_slice(&self) -> &[Token] {
        match self {
            Self::Unsigned(tokens) => tokens.as_slice(),
            Self::Signed(tokens) => bytemuck::cast_slice(tokens.as_slice()),
        }
    }

    /// Copy of the tokens, valid without the interpreter's lock.
    pub(crate) fn into_vec(self) -> PyResult<Vec<Token>> {
        match self {
            Self::Unsigned(Numbers::Copied(tokens)) => Ok(tokens),
            Self::Signed(Numbers::Copied(tokens)) => Ok(bytemuck::cast_vec(tokens)),
            in_place => {
                let tokens = in_place.as_slice();
                let mut copied = vector(tokens.len(), "tokens")?;
                copied.extend_from_slice(tokens);
                Ok(copied)
            }
        }
    }
}

impl From<Vec<Token>> for Tokens<'_> {
    fn from(tokens: Vec<Token>) -> Self {
        Self::Unsigned(Numbers::Copied(tokens))
    }
}

/// Refuse the first negative token at or after an index. A single pass without a branch per token
/// if there is none.
fn unsigned(tokens: &[i32], from: usize) -> PyResult<()> {
    if tokens[from..].iter().fold(0, |all, token| all | token) >= 0 {
        return Ok(());
    }
    let negative = tokens.iter().enumerate().skip(from).find(|(_, token)| **token < 0);
    negative.map_or(Ok(()), |(at, token)| Err(out_of_range(at, token)))
}

fn is_buffer(given: &Bound<'_, PyAny>) -> PyResult<bool> {
    static MEMORYVIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = MEMORYVIEW.import(given.py(), "builtins", "memoryview")?;
    Ok(given.is_instance(class)? || class.call1((given,)).is_ok())
}

fn from_array(array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<Token>> {
    let dtype = array.dtype();
    let (kind, size) = (dtype.kind(), dtype.itemsize());
    if array.ndim() != 1 || !(kind == b'i' || kind == b'u') {
        // An empty list becomes a float array without tokens.
        if array.ndim() == 1 && array.is_empty() && kind == b'f' {
            return Ok(Vec::new());
        }
        return Err(bad(format!(
            "tokens of dtype {dtype} and shape {:?}, one dimension of integers wanted",
            array.shape()
        )));
    }
    if dtype.byteorder() == b'>' {
        return Err(bad(format!("tokens of dtype {dtype}, native byte order wanted")));
    }
    if !array.is_aligned() {
        let copied = array.call_method0(intern!(array.py(), "copy"));
        return from_array(copied.map_err(|error| fits(error, array.py(), "tokens"))?.cast()?);
    }
    match (kind, size) {
        (b'u', 1) => read::<u8>(array),
        (b'u', 2) => read::<u16>(array),
        (b'u', 4) => read::<u32>(array),
        (b'u', _) => read_wide::<u64>(array),
        (_, 1) => read::<i8>(array),
        (_, 2) => read::<i16>(array),
        (_, 4) => read::<i32>(array),
        (_, _) => read_wide::<i64>(array),
    }
}

fn read<T>(array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<Token>>
where
    T: numpy::Element + Copy + std::fmt::Display,
    Token: TryFrom<T>,
{
    let array = array.cast::<PyArray1<T>>()?;
    if let Some(tokens) = in_place(array) {
        return check(tokens.iter().copied());
    }
    let array = array.try_readonly().map_err(|error| bad(format!("tokens: {error}")))?;
    check(array.as_array().iter().copied())
}

/// 8-byte tokens, valid if all upper halves are zero.
fn read_wide<T>(array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<Token>>
where
    T: Element + bytemuck::Pod + std::fmt::Display,
    Token: TryFrom<T>,
{
    if let Some(tokens) = in_place(array.cast::<PyArray1<T>>()?) {
        let mut narrow: Vec<Token> = vector(tokens.len(), "tokens")?;
        let mut all = 0;
        for chunk in bytemuck::cast_slice::<T, u64>(tokens).chunks(CHUNK) {
            all |= chunk.iter().fold(0, |all, token| all | token);
            #[expect(clippy::cast_possible_truncation, reason = "it is looked at before")]
            narrow.extend(chunk.iter().map(|token| *token as Token));
        }
        if all <= u64::from(Token::MAX) {
            return Ok(narrow);
        }
    }
    read::<T>(array)
}

/// A pass without a branch per token. On failure, a second pass finds the invalid token.
fn check<T>(given: impl ExactSizeIterator<Item = T> + Clone) -> PyResult<Vec<Token>>
where
    T: Copy + std::fmt::Display,
    Token: TryFrom<T>,
{
    let mut good = true;
    let token = |token: T| {
        let converted = Token::try_from(token);
        good &= converted.is_ok();
        converted.unwrap_or(0)
    };
    let mut tokens = vector(given.len(), "tokens")?;
    tokens.extend(given.clone().map(token));
    if good {
        return Ok(tokens);
    }
    let mut wrong = given.enumerate().filter(|(_, token)| Token::try_from(*token).is_err());
    match wrong.next() {
        Some((at, token)) => Err(out_of_range(at, token)),
        None => Ok(tokens),
    }
}

fn out_of_range(at: usize, token: impl std::fmt::Display) -> PyErr {
    bad(format!("token {at} is {token}, 0 to {} wanted", Token::MAX))
}

fn check_length(tokens: usize) -> PyResult<()> {
    if tokens > MOST {
        return Err(bad(format!("{tokens} tokens, at most {MOST} wanted")));
    }
    Ok(())
}

fn from_items(given: &Bound<'_, PyAny>) -> PyResult<Vec<Token>> {
    // Only a list's claimed length is reliable.
    if given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>() {
        let mut tokens = vector(claimed(given, MOST, "tokens")?, "tokens")?;
        for (at, item) in given.try_iter()?.enumerate() {
            tokens.push(token(at, &item?)?);
        }
        return Ok(tokens);
    }
    if given.try_iter().is_err() {
        return Err(bad(format!("tokens are {}, a sequence of integers wanted", shown(given))));
    }
    items(given, MOST, "tokens", |at, item| token(at, &item))
}

fn token(at: usize, item: &Bound<'_, PyAny>) -> PyResult<Token> {
    match item.extract::<i64>() {
        Ok(token) => Token::try_from(token).map_err(|_| out_of_range(at, token)),
        Err(_) if item.hasattr(intern!(item.py(), "__index__"))? => {
            Err(out_of_range(at, shown(item)))
        }
        Err(_) => {
            let kind = item.get_type();
            Err(bad(format!("token {at} is {}, an integer wanted", kind.name()?)))
        }
    }
}
