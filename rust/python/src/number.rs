//! Conversion of Python integers, with a function per argument to name it in errors.
//!
//! Invariant: a non-integer, a bool or a number out of range is a `ConfigError` showing it, never
//! an `OverflowError` or a `TypeError`. Cost: a conversion.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyTuple};

use crate::error::bad;

/// Latest accepted time: 292 years, so sums of two fit in 64 bits.
const LATEST: u64 = i64::MAX as u64;

/// Limit of counts, above any tier, to avoid overflows in products.
const MANY: u64 = 1 << 44;

/// Convert an integer `0..=most`.
pub(crate) fn whole(number: &Bound<'_, PyAny>, name: &str, most: u64) -> PyResult<u64> {
    if number.is_instance_of::<PyBool>() {
        return Err(unlike(number, name, most));
    }
    // Python converts most numbers faster as signed.
    if let Some(whole) = number.extract::<i64>().ok().and_then(|signed| u64::try_from(signed).ok())
        && whole <= most
    {
        return Ok(whole);
    }
    match number.extract::<u64>() {
        Ok(whole) if whole <= most => Ok(whole),
        Err(error) if !error.is_instance_of::<PyOverflowError>(number.py()) => {
            Err(unlike(number, name, most))
        }
        _ => Err(bad(format!("{name} is {}, 0 to {most} wanted", shown(number)))),
    }
}

fn unlike(given: &Bound<'_, PyAny>, name: &str, most: u64) -> PyErr {
    bad(format!("{name} is {}, a whole number 0 to {most} wanted", shown(given)))
}

/// Short representation of any value for a message.
pub(crate) fn shown(given: &Bound<'_, PyAny>) -> String {
    let show = || {
        let module = given.py().import("kvtrie.settings.argument")?;
        module.getattr("shown")?.call1((given,))?.extract::<String>()
    };
    show().unwrap_or_else(|_| format!("a {}", given.get_type()))
}

/// Convert a float.
pub(crate) fn real(given: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    let number = (!given.is_instance_of::<PyBool>()).then(|| given.extract::<f64>().ok()).flatten();
    number.ok_or_else(|| bad(format!("{name} is {}, a number wanted", shown(given))))
}

/// Convert a bool.
pub(crate) fn flag(given: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    // Numpy's bools are accepted too.
    let found = given.extract::<bool>();
    found.map_err(|_| bad(format!("{name} is {}, True or False wanted", shown(given))))
}

/// Both items of a tuple.
pub(crate) fn pair<'py>(given: &Bound<'py, PyAny>, name: &str) -> PyResult<[Bound<'py, PyAny>; 2]> {
    let of = || {
        let pair = given.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2)?;
        Some([pair.get_item(0).ok()?, pair.get_item(1).ok()?])
    };
    of().ok_or_else(|| bad(format!("{name} is {}, a pair of numbers wanted", shown(given))))
}

/// Convert an integer to the target type.
pub(crate) fn small<T>(number: &Bound<'_, PyAny>, name: &str, most: T) -> PyResult<T>
where
    T: Into<u64> + TryFrom<u64>,
{
    let most: u64 = most.into();
    let found = whole(number, name, most)?;
    T::try_from(found).map_err(|_| bad(format!("{name} is {found}, 0 to {most} wanted")))
}

/// Convert a count of tokens, blocks or moves.
pub(crate) fn count(number: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let found = whole(number, name, MANY)?;
    usize::try_from(found).map_err(|_| bad(format!("{name} is {found}, too many")))
}

/// Convert a time in nanoseconds.
pub(crate) fn nanos(number: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    whole(number, name, LATEST)
}

/// Call a conversion for an argument, with its limit if any.
macro_rules! convert {
    ($convert:ident ($($most:expr)?) $given:expr, $name:expr) => {
        $convert($given, $name $(, $most)?)
    };
}

macro_rules! arguments {
    ($($convert:ident $most:tt $number:ty: $($name:ident)*;)*) => {$($(
        pub(crate) fn $name(given: &Bound<'_, PyAny>) -> PyResult<$number> {
            convert!($convert $most given, stringify!($name))
        }
    )*)*};
}

arguments! {
    nanos() u64: context sample_ns;
    whole(MANY) u64: token_budget max_running;
    small(u32::MAX) u32: block_tokens token_weight machine ranks events rank block border session_blocks;
    small(1 << 20) u32: eviction_log;
    small(u16::MAX) u16: layer;
    count() usize: keep skip reserve best first_block group most moves_per_job prefill;
    real() f64: epsilon;
    flag() bool: explain reuse spans present ok hung cancelled layerwise;
}

/// Defines types for arguments without a default, to keep signatures short.
macro_rules! types {
    ($($class:ident($name:literal) = $convert:ident $most:tt $number:ty;)*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $class(pub(crate) $number);

        impl FromPyObject<'_, '_> for $class {
            type Error = PyErr;

            fn extract(given: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
                convert!($convert $most &given, $name).map(Self)
            }
        }
    )*};
}

types! {
    Now("now") = nanos() u64;
    Pin("pin") = whole(u64::MAX) u64;
    LeaseNumber("lease_id") = whole(u64::MAX) u64;
    Limit("limit") = count() usize;
    SharedBlocks("shared") = count() usize;
    Count("count") = count() usize;
    Blocks("blocks") = small(u32::MAX) u32;
    Clients("clients") = count() usize;
    Running("running") = count() usize;
    Tokens("tokens") = count() usize;
    Forks("n") = small(1 << 20) u32;
    Layer("layer") = small(u16::MAX) u16;
    LayersDone("layers_done") = small(u16::MAX) u16;
    Layers("layers") = small(u16::MAX) u16;
    SessionBlocks("session_blocks") = small(u32::MAX) u32;
    Deadline("deadline") = nanos() u64;
    DirectoryTime("directory_ns") = nanos() u64;
    Ready("ready") = nanos() u64;
    First("first") = nanos() u64;
    LayerTime("per_layer") = nanos() u64;
    BusyTime("busy_ns") = nanos() u64;
    BlockRange("blocks") = range_of_blocks() (usize, usize);
    LayerRange("layers") = range_of_layers() (u16, u16);
}

fn range_of_blocks(given: &Bound<'_, PyAny>, name: &str) -> PyResult<(usize, usize)> {
    let [first, end] = pair(given, name)?;
    Ok((count(&first, "first block")?, count(&end, "block after the last")?))
}

fn range_of_layers(given: &Bound<'_, PyAny>, name: &str) -> PyResult<(u16, u16)> {
    let [first, end] = pair(given, name)?;
    Ok((small(&first, "first layer", u16::MAX)?, small(&end, "layer after the last", u16::MAX)?))
}
