//! A device in memory with a log of every operation, to replay a loss of power.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kvtrie_store::{Access, Device, File, Item, Op as Job, Size, Work};

use super::Random;

/// Logged operation.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Write { file: usize, at: u64, bytes: Vec<u8> },
    SetLen { file: usize, len: u64 },
    Punch { file: usize, at: u64, len: u64 },
    Sync { file: usize },
    Create { path: PathBuf, file: usize },
    Rename { from: PathBuf, to: PathBuf },
    Remove { path: PathBuf },
    SyncFolder { path: PathBuf },
}

/// Names and bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Image {
    pub(crate) names: BTreeMap<PathBuf, usize>,
    pub(crate) files: BTreeMap<usize, Vec<u8>>,
}

#[derive(Debug, Default)]
struct State {
    image: Image,
    folders: Vec<PathBuf>,
    locked: Vec<usize>,
    log: Vec<Op>,
    next: usize,
}

/// The device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory(Arc<Mutex<State>>);

#[derive(Debug)]
struct MemoryFile {
    state: Arc<Mutex<State>>,
    file: usize,
    locks: Mutex<bool>,
}

impl Image {
    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Write { file, at, bytes } => {
                let content = self.files.entry(*file).or_default();
                let at = usize::try_from(*at).unwrap();
                content.resize(content.len().max(at + bytes.len()), 0);
                content[at..at + bytes.len()].copy_from_slice(bytes);
            }
            Op::SetLen { file, len } => {
                self.files.entry(*file).or_default().resize(usize::try_from(*len).unwrap(), 0);
            }
            Op::Punch { file, at, len } => {
                let content = self.files.entry(*file).or_default();
                let at = usize::try_from(*at).unwrap().min(content.len());
                let end = (at + usize::try_from(*len).unwrap()).min(content.len());
                content[at..end].fill(0);
            }
            Op::Create { path, file } => {
                self.names.insert(path.clone(), *file);
                self.files.entry(*file).or_default();
            }
            Op::Rename { from, to } => {
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Op::Remove { path } => {
                self.names.remove(path);
            }
            Op::Sync { .. } | Op::SyncFolder { .. } => {}
        }
    }
}

impl Memory {
    /// A device that starts with these files, all durable.
    pub(crate) fn from_image(image: Image) -> Self {
        let memory = Self::default();
        {
            let mut state = memory.0.lock().unwrap();
            state.next = image.files.keys().next_back().map_or(0, |last| last + 1);
            state.image = image;
        }
        memory
    }

    pub(crate) fn device(&self) -> Arc<dyn Device> {
        Arc::new(self.clone())
    }

    pub(crate) fn image(&self) -> Image {
        self.0.lock().unwrap().image.clone()
    }

    pub(crate) fn log(&self) -> Vec<Op> {
        self.0.lock().unwrap().log.clone()
    }

    /// Number of operations so far.
    pub(crate) fn clock(&self) -> usize {
        self.0.lock().unwrap().log.len()
    }

    /// Another device with the same files.
    pub(crate) fn copy(&self) -> Self {
        Self::from_image(self.image())
    }

    /// A file's bytes, by its name without the folder.
    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let state = self.0.lock().unwrap();
        let file = state.image.names.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
        state.image.files[file].clone()
    }

    /// Changes a file's bytes without the store.
    pub(crate) fn alter(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.0.lock().unwrap();
        let file = *state.image.names.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
        change(state.image.files.get_mut(&file).unwrap());
    }
}

impl State {
    fn act(&mut self, op: Op) {
        self.image.apply(&op);
        self.log.push(op);
    }
}

impl Device for Memory {
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock().unwrap();
        if access == Access::Fresh && state.image.names.contains_key(path) {
            state.act(Op::Remove { path: path.to_path_buf() });
        }
        let file = match state.image.names.get(path).copied() {
            Some(file) => file,
            None if access == Access::Read => return Err(io::ErrorKind::NotFound.into()),
            None => {
                let file = state.next;
                state.next += 1;
                state.act(Op::Create { path: path.to_path_buf(), file });
                file
            }
        };
        Ok(Arc::new(MemoryFile { state: Arc::clone(&self.0), file, locks: Mutex::new(false) }))
    }

    /// Up to eight operations are in flight, and complete in any order.
    fn run<'a>(&self, work: &mut dyn Work<'a>) {
        let mut random = Random(self.clock() as u64);
        let mut under_way: Vec<Job<'a>> = Vec::new();
        loop {
            while under_way.len() < 8
                && let Some(job) = work.next()
            {
                under_way.push(job);
            }
            let more = random.below(2) == 0 && work.between();
            if under_way.is_empty() {
                if more || work.between() {
                    continue;
                }
                return;
            }
            let at = usize::try_from(random.below(under_way.len() as u64)).unwrap();
            let mut job = under_way.swap_remove(at);
            let moved = job.perform();
            work.done(job, moved);
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let op = Op::Rename { from: from.to_path_buf(), to: to.to_path_buf() };
        self.0.lock().unwrap().act(op);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if !state.image.names.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.act(Op::Remove { path: path.to_path_buf() });
        Ok(())
    }

    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.0.lock().unwrap().folders.push(path.to_path_buf());
        Ok(())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.0.lock().unwrap().act(Op::SyncFolder { path: path.to_path_buf() });
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        let state = self.0.lock().unwrap();
        let inside = state.image.names.keys().filter(|name| name.parent() == Some(path));
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        Ok(inside.map(|path| Item { name: name(path), folder: false }).collect())
    }
}

impl File for MemoryFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let state = self.state.lock().unwrap();
        let content = &state.image.files[&self.file];
        let at = usize::try_from(at).unwrap().min(content.len());
        let count = buffer.len().min(content.len() - at);
        buffer[..count].copy_from_slice(&content[at..at + count]);
        Ok(count)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let bytes: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
        let count = bytes.len();
        self.state.lock().unwrap().act(Op::Write { file: self.file, at, bytes });
        Ok(count)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state.lock().unwrap().act(Op::SetLen { file: self.file, len });
        Ok(())
    }

    fn size(&self) -> io::Result<Size> {
        let state = self.state.lock().unwrap();
        let len = state.image.files[&self.file].len() as u64;
        Ok(Size { len, allocated: len.next_multiple_of(4096) })
    }

    fn sync(&self) -> io::Result<()> {
        self.state.lock().unwrap().act(Op::Sync { file: self.file });
        Ok(())
    }

    fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        self.state.lock().unwrap().act(Op::Punch { file: self.file, at, len });
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        let mut state = self.state.lock().unwrap();
        if state.locked.contains(&self.file) {
            return Ok(false);
        }
        state.locked.push(self.file);
        *self.locks.lock().unwrap() = true;
        Ok(true)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if *self.locks.lock().unwrap() {
            self.state.lock().unwrap().locked.retain(|&file| file != self.file);
        }
    }
}

/// Files after a loss of power: everything synced, and any part of the rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Power {
    durable: Image,
    bytes: BTreeMap<usize, Vec<Op>>,
    names: Vec<Op>,
}

impl Power {
    pub(crate) fn from_image(durable: Image) -> Self {
        Self { durable, ..Self::default() }
    }

    pub(crate) fn step(&mut self, op: &Op) {
        match op {
            Op::Write { file, .. } | Op::SetLen { file, .. } | Op::Punch { file, .. } => {
                self.bytes.entry(*file).or_default().push(op.clone());
            }
            Op::Sync { file } => {
                for op in self.bytes.remove(file).unwrap_or_default() {
                    self.durable.apply(&op);
                }
            }
            Op::SyncFolder { path } => {
                let inside = |op: &Op| match op {
                    Op::Create { path: name, .. } | Op::Remove { path: name } => {
                        name.parent() == Some(path)
                    }
                    Op::Rename { to, .. } => to.parent() == Some(path),
                    _ => false,
                };
                let (done, left) = self.names.drain(..).partition(inside);
                self.names = left;
                let done: Vec<Op> = done;
                for op in &done {
                    self.durable.apply(op);
                }
            }
            Op::Create { .. } | Op::Rename { .. } | Op::Remove { .. } => {
                self.names.push(op.clone());
            }
        }
    }

    /// Number of writes that are not durable.
    pub(crate) fn open(&self) -> usize {
        self.bytes.values().map(Vec::len).sum()
    }

    /// The files after the loss. Bit `i` of `keep` keeps the `i`th write that is not durable; a
    /// kept one may be torn. Of the directory entries that are not durable the first `names` are
    /// kept.
    pub(crate) fn lose(
        &self,
        keep: u64,
        torn: Option<usize>,
        names: usize,
        random: &mut Random,
    ) -> Image {
        let mut image = self.durable.clone();
        for op in self.names.iter().take(names) {
            image.apply(op);
        }
        for (at, op) in self.bytes.values().flatten().enumerate() {
            if keep >> (at % 64) & 1 == 0 {
                continue;
            }
            match op {
                Op::Write { file, at: start, bytes } if torn == Some(at) => {
                    let mut done = 0;
                    while done < bytes.len() {
                        let place = start + done as u64;
                        let left = usize::try_from(512 - place % 512).unwrap();
                        let end = (done + left).min(bytes.len());
                        if random.below(2) == 0 {
                            let bytes = bytes[done..end].to_vec();
                            image.apply(&Op::Write { file: *file, at: place, bytes });
                        }
                        done = end;
                    }
                }
                _ => image.apply(op),
            }
        }
        image
    }

    /// Number of directory entries that are not durable.
    pub(crate) fn open_names(&self) -> usize {
        self.names.len()
    }
}
