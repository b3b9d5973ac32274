//! Values of a shared store, for Python: names, checksums, and the value folder.
//!
//! Invariant: bytes are hashed and transferred in the caller's arrays, without the interpreter's
//! lock. Cost: the store's operation, plus a conversion per value.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvtrie_core::{BlockKey, Layers, Record};
use kvtrie_store::{
    Error, Outcome, QueueKind, System, ValueFolder as Folder, ValueFormat as Format, ValueRead,
    ValueWrite,
};
use numpy::{
    IntoPyArray, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1,
    PyReadwriteArray2, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{TransferError, bad};
use crate::index::label;
use crate::number;
use crate::text::chosen;

/// A value to write: key, label, layers.
type Labelled<'py> = (Vec<u8>, Vec<u8>, PyReadonlyArray2<'py, u8>);

/// A header, empty on failure, and the reason.
type Header<'py> = (Bound<'py, PyBytes>, Option<String>);

/// A read value: key, header, layers, memory.
type Read<'py> = (Vec<u8>, PyReadonlyArray1<'py, u8>, (u16, u16), PyReadonlyArray2<'py, u8>);

/// A value to read from a folder: name, header, offset of the layers, memory.
type Wanted<'py> = (Vec<u8>, PyReadwriteArray1<'py, u8>, u64, PyReadwriteArray2<'py, u8>);

/// A value to write to a folder: name, header, memory.
type Given<'py> = (Vec<u8>, Vec<u8>, PyReadonlyArray2<'py, u8>);

/// Result word and reason.
type Result = (&'static str, String);

fn raise(error: Error) -> PyErr {
    match error {
        Error::Config(message) => bad(message),
        other => TransferError::new_err(other.to_string()),
    }
}

fn contiguous() -> PyErr {
    bad("memory of layers is contiguous")
}

fn key(bytes: &[u8]) -> PyResult<BlockKey> {
    bytes.try_into().map_err(|_| bad(format!("a name has 32 bytes, not {}", bytes.len())))
}

/// Convert a wall-clock time.
fn wall(nanoseconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

fn result(outcome: Outcome) -> Result {
    match outcome {
        Outcome::Ok => ("ok", String::new()),
        Outcome::Missing => ("missing", "there is no such value".into()),
        Outcome::Damaged(reason) => ("damaged", reason),
        Outcome::Late => ("late", "the deadline passed".into()),
        Outcome::Unreachable(reason) => ("unreachable", reason),
        Outcome::Full(reason) => ("full", reason),
        Outcome::Refused(reason) => ("refused", reason),
    }
}

/// Format of the values and names of a deployment, layout and rank.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct ValueFormat(Format);

#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted, not lent")]
#[pymethods]
impl ValueFormat {
    #[new]
    #[pyo3(signature = (*, layers, layer_bytes, block_tokens, meaning, secret=None))]
    fn new(
        #[pyo3(from_py_with = number::layer)] layers: u16,
        layer_bytes: usize,
        block_tokens: u32,
        meaning: &[u8],
        secret: Option<&[u8]>,
    ) -> PyResult<Self> {
        let format = Format::new(layers, layer_bytes, block_tokens, &key(meaning)?, secret);
        format.map(Self).map_err(raise)
    }

    #[getter]
    fn header_bytes(&self) -> usize {
        self.0.header_bytes()
    }

    #[getter]
    fn value_bytes(&self) -> u64 {
        self.0.value_bytes()
    }

    /// Offset of a layer in a value.
    fn layer_at(&self, layer: u16) -> u64 {
        self.0.layer_at(layer)
    }

    /// Names of blocks.
    fn names<'py>(
        &self,
        py: Python<'py>,
        keys: PyReadonlyArray2<'py, u8>,
    ) -> PyResult<Bound<'py, PyArray2<u8>>> {
        let shape = [keys.shape()[0], keys.shape()[1]];
        if shape[1] != 32 {
            return Err(bad(format!("keys of {} bytes, 32 wanted", shape[1])));
        }
        let keys = keys.as_array();
        let keys = keys.rows().into_iter().map(|row| key(&row.to_vec()));
        let names: Vec<u8> =
            keys.map(|key| Ok(self.0.name(&key?))).collect::<PyResult<Vec<_>>>()?.into_flattened();
        names.into_pyarray(py).reshape(shape)
    }

    /// Headers of blocks. `memory` has all layers. Invalid blocks give a reason.
    fn headers<'py>(
        &self,
        py: Python<'py>,
        blocks: Vec<Labelled<'_>>,
    ) -> PyResult<Vec<Header<'py>>> {
        let given = blocks.iter().map(|(key, label, memory)| {
            let memory = memory.as_slice().map_err(|_| contiguous())?;
            Ok((self::key(key)?, self::label(label)?.record, memory))
        });
        let given = given.collect::<PyResult<Vec<_>>>()?;
        let made = py.detach(|| {
            let header = |(key, record, memory): &(BlockKey, Record, &[u8])| {
                self.0.header(key, record, memory)
            };
            given.iter().map(header).collect::<Vec<_>>()
        });
        let made = made.into_iter().map(|header| match header {
            Ok(header) => (PyBytes::new(py, &header), None),
            Err(error) => (PyBytes::new(py, &[]), Some(error.to_string())),
        });
        Ok(made.collect())
    }

    /// Verify read blocks. Returns a reason for each difference.
    fn verify(&self, py: Python<'_>, blocks: Vec<Read<'_>>) -> PyResult<Vec<Option<String>>> {
        let given = blocks.iter().map(|(key, header, (lo, hi), memory)| {
            let memory = memory.as_slice().map_err(|_| contiguous())?;
            let header = header.as_slice().map_err(|_| contiguous())?;
            Ok((self::key(key)?, header, Layers::new(*lo, *hi), memory))
        });
        let given = given.collect::<PyResult<Vec<_>>>()?;
        Ok(py.detach(|| {
            let verify = |(key, header, layers, memory): &(BlockKey, &[u8], Layers, &[u8])| {
                self.0.verify(key, header, *layers, memory).err()
            };
            given.iter().map(verify).collect()
        }))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Folder of values of equal size.
#[pyclass(frozen, module = "kvtrie")]
pub(crate) struct ValueFolder {
    folder: Folder,
    header_bytes: usize,
}

#[expect(clippy::needless_pass_by_value, reason = "what Python gives is converted, not lent")]
#[pymethods]
impl ValueFolder {
    /// Open a folder, and create it if missing.
    #[new]
    #[pyo3(signature = (folder, *, header_bytes, value_bytes, ttl=None, io="direct"))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        header_bytes: usize,
        value_bytes: u64,
        ttl: Option<u64>,
        io: &str,
    ) -> PyResult<Self> {
        let direct = chosen(io, "io", &[("direct", true), ("buffered", false)])?;
        let opened = py.detach(|| {
            let device = Arc::new(System::new(direct, QueueKind::Best));
            Folder::open(device, &folder, value_bytes, ttl.map(Duration::from_nanos))
        });
        Ok(Self { folder: opened.map_err(raise)?, header_bytes })
    }

    /// Remove expired files and staging files of a shared folder in use. Times are nanoseconds of
    /// the wall clock. Returns the numbers of expired values and staging files, the bytes of both,
    /// and the number of remaining values.
    #[staticmethod]
    #[pyo3(signature = (folder, *, expired, stale))]
    fn collect(
        py: Python<'_>,
        folder: PathBuf,
        expired: Option<u64>,
        stale: u64,
    ) -> PyResult<(u64, u64, u64, u64)> {
        let found = py
            .detach(|| kvtrie_store::collect(&folder, expired.map(wall), wall(stale)))
            .map_err(raise)?;
        let bytes = found.expired.bytes + found.staged.bytes;
        Ok((found.expired.files, found.staged.files, bytes, found.kept))
    }

    /// Remove staging files last changed before a time. Returns their number.
    fn sweep(&self, py: Python<'_>, before: u64) -> u64 {
        py.detach(|| self.folder.sweep(wall(before))).files
    }

    /// Path of a value.
    fn path(&self, name: &[u8]) -> PyResult<PathBuf> {
        Ok(self.folder.path(&key(name)?))
    }

    /// Check for values with these names.
    fn exists_many(&self, py: Python<'_>, names: Vec<Vec<u8>>, left: u64) -> PyResult<Vec<Result>> {
        let names = names.iter().map(|name| key(name)).collect::<PyResult<Vec<_>>>()?;
        let left = Duration::from_nanos(left);
        let found = py.detach(|| self.folder.exists_many(&names, left));
        Ok(found.into_iter().map(result).collect())
    }

    /// Read headers and layers of values.
    fn get_many(
        &self,
        py: Python<'_>,
        mut values: Vec<Wanted<'_>>,
        left: u64,
    ) -> PyResult<Vec<Result>> {
        let wanted = values.iter_mut().map(|(name, header, at, memory)| {
            let name = key(name)?;
            let header = header.as_slice_mut().map_err(|_| contiguous())?;
            if header.len() != self.header_bytes {
                let (given, wanted) = (header.len(), self.header_bytes);
                return Err(bad(format!("a header of {given} bytes, {wanted} wanted")));
            }
            let out = memory.as_slice_mut().map_err(|_| contiguous())?;
            Ok(ValueRead { name, header, at: *at, out })
        });
        let wanted = wanted.collect::<PyResult<Vec<_>>>()?;
        let found = py.detach(|| self.folder.get_many(wanted, Duration::from_nanos(left)));
        Ok(found.into_iter().map(result).collect())
    }

    /// Write missing values.
    fn put_many(&self, py: Python<'_>, values: Vec<Given<'_>>, left: u64) -> PyResult<Vec<Result>> {
        let given = values.iter().map(|(name, header, memory)| {
            let bytes = memory.as_slice().map_err(|_| contiguous())?;
            Ok(ValueWrite { name: key(name)?, header, bytes })
        });
        let given = given.collect::<PyResult<Vec<_>>>()?;
        let found = py.detach(|| self.folder.put_many(&given, Duration::from_nanos(left)));
        Ok(found.into_iter().map(result).collect())
    }

    /// Remove values.
    fn remove_many(&self, py: Python<'_>, names: Vec<Vec<u8>>) -> PyResult<Vec<Result>> {
        let names = names.iter().map(|name| key(name)).collect::<PyResult<Vec<_>>>()?;
        let found = py.detach(|| self.folder.remove_many(&names));
        Ok(found.into_iter().map(result).collect())
    }

    fn __repr__(&self) -> String {
        format!("ValueFolder({})", self.folder.folder().display())
    }
}
