//! Blocks that await a price by the user.
//!
//! Invariant: all arrays have one entry per block, in one order. Cost: one copy per array.

use kvtrie_core::manager;
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::column;
use crate::record::record;

record! {
    /// Blocks without a price, as a struct of arrays.
    Unpriced(Vec<manager::Unpriced>) |blocks, py| {
        /// The blocks' handles.
        id: Bound<'py, PyArray1<u64>> = column(py, blocks, |known| known.block.0);
        /// Tokens before each block.
        context: Bound<'py, PyArray1<u64>> = column(py, blocks, |known| known.context);
        /// Each block's index in its sequence.
        index: Bound<'py, PyArray1<u32>> = column(py, blocks, |known| known.index);
        /// Number of uses of each.
        uses: Bound<'py, PyArray1<u32>> = column(py, blocks, |known| known.uses);
        /// Number of blocks of each one's session.
        session_blocks: Bound<'py, PyArray1<u32>> =
            column(py, blocks, |known| known.session_blocks);
    }
    repr format!("Unpriced({} blocks)", blocks.len());

    fn __len__(&self) -> usize {
        self.0.len()
    }
}
