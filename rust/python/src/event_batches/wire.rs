//! Encoding of block events as msgpack, in the format of vLLM's KV events.
//!
//! Invariants: consecutive blocks of a tier and group are a single event. A reader applying all
//! events in order knows the copies. Cost: the encoded bytes, and a scan of the last runs per
//! stored block.

use kvtrie_core::{BlockEvent, BlockEventKind, BlockKey, TierId, Token};
use rmp::{Marker, encode};

/// Number of last runs a stored block may extend.
const OPEN_RUNS: usize = 64;

/// Encoding of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Map with field names.
    Map,
    /// Array of the fields, in order.
    Array,
}

/// Encoding of a block's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hashes {
    /// Last 8 bytes of the content key, as a number.
    Int,
    /// Content key.
    Bytes,
}

/// Layer group with vLLM's names.
#[derive(Clone, Debug)]
pub(super) struct EventGroup {
    /// Kind of the layers.
    pub(super) kind: &'static str,
    /// Window in tokens.
    pub(super) window: Option<u64>,
}

/// Settings shared by all events of a manager.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) form: Form,
    pub(super) hashes: Hashes,
    pub(super) rank: u32,
    pub(super) block_tokens: u32,
    /// Medium of each tier, or `None` for an unpublished tier.
    pub(super) mediums: Vec<Option<String>>,
    /// Tier kept as a prefix tree by readers.
    pub(super) tree: Option<TierId>,
    /// Layer groups, for a model with several.
    pub(super) groups: Vec<EventGroup>,
}

/// Blocks of an event, on the same tier and in the same group. Each stored block is the child of
/// the preceding block.
struct Run {
    kind: BlockEventKind,
    tier: TierId,
    group: u8,
    /// Key of the parent of the first block, or `None` for the first block of a sequence.
    parent: Option<BlockKey>,
    /// Key of the last block.
    end: BlockKey,
    adapter: Option<String>,
    blocks: u32,
    hashes: Vec<u8>,
    token_count: u32,
    tokens: Vec<u8>,
}

/// Block counts of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) stored: u64,
    pub(super) removed: u64,
    /// Stored blocks with a tenant or digests.
    pub(super) withheld: u64,
}

/// Encoder of a batch.
pub(super) struct Batch<'a> {
    wire: &'a Wire,
    /// Encoded events.
    events: Vec<u8>,
    event_count: u32,
    /// Extensible runs, all of the same kind.
    runs: Vec<Run>,
    counts: Counts,
}

impl<'a> Batch<'a> {
    pub(super) fn new(wire: &'a Wire) -> Self {
        let (events, runs) = (Vec::new(), Vec::new());
        Self { wire, events, event_count: 0, runs, counts: Counts::default() }
    }

    /// Add an event clearing all blocks of the reader.
    pub(super) fn clear(&mut self) {
        self.close();
        self.event_count += 1;
        match self.wire.form {
            Form::Map => {
                map(&mut self.events, 1);
                text(&mut self.events, "type");
            }
            Form::Array => array(&mut self.events, 1),
        }
        text(&mut self.events, "AllBlocksCleared");
    }

    /// Add an event. Partial copies, tiers without a medium and private blocks are left out.
    pub(super) fn add(&mut self, event: &BlockEvent) {
        if !event.whole || self.wire.mediums[event.tier].is_none() {
            return;
        }
        let stored = event.kind == BlockEventKind::Stored;
        if event.private {
            self.counts.withheld += u64::from(stored);
            return;
        }
        if self.runs.last().is_some_and(|run| run.kind != event.kind) {
            self.close();
        }
        let at = self.run_of(event).unwrap_or_else(|| self.open(event));
        let run = &mut self.runs[at];
        run.blocks += 1;
        run.end = event.key;
        hash(&mut run.hashes, &event.key, self.wire.hashes);
        if stored {
            self.counts.stored += 1;
            run.token_count += u32::try_from(event.tokens.len()).expect("tokens of a block");
            tokens(&mut run.tokens, &event.tokens);
        } else {
            self.counts.removed += 1;
        }
    }

    /// Run to extend by a block. Removed blocks extend a run in any order.
    fn run_of(&self, event: &BlockEvent) -> Option<usize> {
        let follows = |run: &Run| match event.kind {
            BlockEventKind::Stored => !event.first && run.end == event.parent,
            BlockEventKind::Removed => true,
        };
        let runs = self.runs.iter().enumerate().rev().take(OPEN_RUNS);
        let mut of_place =
            runs.filter(|(_, run)| (run.tier, run.group) == (event.tier, event.group));
        of_place.find(|(_, run)| follows(run)).map(|(at, _)| at)
    }

    fn open(&mut self, event: &BlockEvent) -> usize {
        let adapter = event.owner.as_ref().map(|owner| owner.lora().to_owned());
        self.runs.push(Run {
            kind: event.kind,
            tier: event.tier,
            group: event.group,
            parent: (!event.first).then_some(event.parent),
            end: event.key,
            adapter,
            blocks: 0,
            hashes: Vec::new(),
            token_count: 0,
            tokens: Vec::new(),
        });
        self.runs.len() - 1
    }

    /// Encode the runs.
    fn close(&mut self) {
        for run in std::mem::take(&mut self.runs) {
            self.event_count += 1;
            self.encode(&run);
        }
    }

    fn encode(&mut self, run: &Run) {
        let wire = self.wire;
        let medium = wire.mediums[run.tier].as_deref().expect("runs have a medium");
        let group = (!wire.groups.is_empty()).then(|| &wire.groups[usize::from(run.group)]);
        let out = &mut self.events;
        let mut event = match run.kind {
            BlockEventKind::Stored => {
                Fields::new(out, wire.form, "BlockStored", if group.is_some() { 12 } else { 8 })
            }
            BlockEventKind::Removed => {
                Fields::new(out, wire.form, "BlockRemoved", if group.is_some() { 4 } else { 3 })
            }
        };
        event.field("block_hashes", |out| items(out, run.blocks, &run.hashes));
        if run.kind == BlockEventKind::Stored {
            event.field("parent_block_hash", |out| {
                option(out, run.parent.as_ref(), |out, key| hash(out, key, wire.hashes));
            });
            event.field("token_ids", |out| items(out, run.token_count, &run.tokens));
            event.field("block_size", |out| uint(out, wire.block_tokens.into()));
            event.field("lora_id", nil);
        }
        event.field("medium", |out| text(out, medium));
        if run.kind == BlockEventKind::Stored {
            event.field("lora_name", |out| option(out, run.adapter.as_deref(), text));
        }
        let Some(group) = group else { return };
        if run.kind == BlockEventKind::Stored {
            event.field("extra_keys", nil);
        }
        event.field("group_idx", |out| uint(out, run.group.into()));
        if run.kind == BlockEventKind::Stored {
            event.field("kv_cache_spec_kind", |out| text(out, group.kind));
            event.field("kv_cache_spec_sliding_window", |out| option(out, group.window, uint));
        }
    }

    /// Payload of the message, or `None` without events, with the counts.
    pub(super) fn end(mut self, ts: f64) -> (Option<Vec<u8>>, Counts) {
        self.close();
        if self.event_count == 0 {
            return (None, self.counts);
        }
        let mut out = Vec::with_capacity(self.events.len() + 32);
        array(&mut out, 3);
        encode::write_f64(&mut out, ts).expect("memory takes all");
        items(&mut out, self.event_count, &self.events);
        uint(&mut out, self.wire.rank.into());
        (Some(out), self.counts)
    }
}

/// Fields of an event.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    form: Form,
}

impl<'a> Fields<'a> {
    /// Begin an event with a number of fields, including its type.
    fn new(out: &'a mut Vec<u8>, form: Form, kind: &str, count: u32) -> Self {
        match form {
            Form::Map => map(out, count),
            Form::Array => array(out, count),
        }
        let mut fields = Self { out, form };
        fields.field("type", |out| text(out, kind));
        fields
    }

    fn field(&mut self, name: &str, value: impl FnOnce(&mut Vec<u8>)) {
        if self.form == Form::Map {
            text(self.out, name);
        }
        value(self.out);
    }
}

fn hash(out: &mut Vec<u8>, key: &BlockKey, form: Hashes) {
    match form {
        Hashes::Int => {
            let last = key.last_chunk().expect("a key has 32 bytes");
            uint(out, u64::from_be_bytes(*last));
        }
        Hashes::Bytes => encode::write_bin(out, key).expect("memory takes all"),
    }
}

fn items(out: &mut Vec<u8>, count: u32, encoded: &[u8]) {
    array(out, count);
    out.extend_from_slice(encoded);
}

fn option<T>(out: &mut Vec<u8>, value: Option<T>, write: impl FnOnce(&mut Vec<u8>, T)) {
    match value {
        Some(value) => write(out, value),
        None => nil(out),
    }
}

fn array(out: &mut Vec<u8>, count: u32) {
    encode::write_array_len(out, count).expect("memory takes all");
}

fn map(out: &mut Vec<u8>, count: u32) {
    encode::write_map_len(out, count).expect("memory takes all");
}

fn text(out: &mut Vec<u8>, value: &str) {
    encode::write_str(out, value).expect("memory takes all");
}

fn uint(out: &mut Vec<u8>, value: u64) {
    encode::write_uint(out, value).expect("memory takes all");
}

/// Token ids, encoded by hand, because they are most of a batch.
fn tokens(out: &mut Vec<u8>, ids: &[Token]) {
    let begin = out.len();
    out.resize(begin + 5 * ids.len(), 0);
    let (mut at, room) = (0, &mut out[begin..]);
    for &id in ids {
        let [a, b, c, d] = id.to_be_bytes();
        let (marker, used) = match id {
            0..=0x7f => ([d, 0, 0, 0, 0], 1),
            0x80..=0xff => ([Marker::U8.to_u8(), d, 0, 0, 0], 2),
            0x100..=0xffff => ([Marker::U16.to_u8(), c, d, 0, 0], 3),
            _ => ([Marker::U32.to_u8(), a, b, c, d], 5),
        };
        room[at..at + 5].copy_from_slice(&marker);
        at += used;
    }
    out.truncate(begin + at);
}

fn nil(out: &mut Vec<u8>) {
    encode::write_nil(out).expect("memory takes all");
}
