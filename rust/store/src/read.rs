//! Reading: layers into the caller's memory, proved there.
//!
//! Invariant: what is read was proved against its key, every time and over the bytes that the
//! caller gets. Cost: one read of the header pages and one of the layers, or one per layer where a
//! layer does not end on a page; a hash of all of it.

use kvtrie_core::block::Layers;
use kvtrie_core::record::Key;
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::lock;
use crate::error::{Error, Result};
use crate::page;
use crate::settings::hex;
use crate::store::Store;

impl Store {
    /// Reads layers of a block into `out` and proves them. On an error `out` holds anything.
    ///
    /// # Errors
    /// [`Error::Bad`] if the slot does not hold this block and these layers, whole and unchanged;
    /// what is damaged is removed if this is the writer. [`Error::Io`] if the device failed;
    /// [`Error::Config`] for wrong arguments.
    pub fn read(&self, key: &Key, slot: u32, layers: Layers, out: &mut [u8]) -> Result<()> {
        self.check(slot, layers, out.len())?;
        let _claim = self.claims.one(slot);
        let found = lock(&self.table).get(slot);
        let Some(entry) = found.filter(|entry| entry.key == *key) else {
            let holds = found.map_or("nothing".into(), |entry| hex(&entry.key[..8]));
            return Err(Error::bad(slot, format!("holds {holds}, not {}", hex(&key[..8]))));
        };
        if !entry.layers.covers(layers) {
            return Err(Error::bad(slot, format!("holds layers {}, not {layers}", entry.layers)));
        }
        self.fetch(key, slot, layers, out).inspect_err(|error| self.discard(slot, error))
    }

    /// Reads and proves; the slot is claimed.
    pub(crate) fn fetch(&self, key: &Key, slot: u32, layers: Layers, out: &mut [u8]) -> Result<()> {
        let settings = &*self.settings;
        let both = self.headers(slot)?;
        let (_, page) = page::choose(settings, slot, key, None, &both)
            .map_err(|reason| Error::bad(slot, reason))?;
        if !page.layers.covers(layers) {
            let reason = format!("header of layers {}, not {layers}", page.layers);
            return Err(Error::bad(slot, reason));
        }
        let each = settings.layer_bytes;
        if settings.stride() == each {
            self.segments.read(slot, settings.layer_at(layers.lo), out)?;
        } else {
            for (layer, bytes) in layers.iter().zip(out.chunks_exact_mut(each)) {
                self.segments.read(slot, settings.layer_at(layer), bytes)?;
            }
        }
        for (layer, bytes) in layers.iter().zip(out.chunks_exact(each)) {
            let (stated, found) = (page.sum(layer), xxh3_64(bytes));
            if stated != found {
                let reason =
                    format!("layer {layer} has checksum {found:#018x}, not {stated:#018x}");
                return Err(Error::bad(slot, reason));
            }
        }
        Ok(())
    }

    /// Both header pages of a slot.
    pub(crate) fn headers(&self, slot: u32) -> Result<Vec<u8>> {
        let mut both = vec![0; 2 * self.settings.header_bytes()];
        self.segments.read(slot, 0, &mut both)?;
        Ok(both)
    }

    /// Reads layers and proves them, one at a time.
    pub(crate) fn prove(&self, key: &Key, slot: u32, layers: Layers) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let mut bytes = vec![0; self.settings.layer_bytes];
        let mut each =
            layers.iter().map(|at| self.fetch(key, slot, Layers::new(at, at + 1), &mut bytes));
        each.try_for_each(|proved| proved)
    }
}
