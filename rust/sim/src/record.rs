//! Results per request and per lane.
//!
//! Invariant: counts are real tokens, and hits and `computed` add up to the prompt. Cost: plain
//! values.

use kvtrie_core::Nanos;

use crate::event::MachineId;

/// Times and hits of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Position in the trace.
    pub id: u64,
    /// Machine of the request.
    pub machine: MachineId,
    /// Arrival time.
    pub arrival: Nanos,
    /// Time of the first token, or `None` if the request was refused for its size.
    pub first_token: Option<Nanos>,
    /// Time of the last token, or `None` if the request was refused.
    pub end: Option<Nanos>,
    /// Tokens found on each tier of its machine.
    pub hits: Vec<u64>,
    /// Tokens found on a peer.
    pub peer: u64,
    /// Nanoseconds of computation saved by the hits on each tier, and last on a peer.
    pub saved: Vec<Nanos>,
    /// Matched tokens, in manager tokens.
    pub matched: usize,
    /// Recomputed blocks of the match, ascending.
    pub holes: Vec<u32>,
    /// Computed tokens of the prompt.
    pub computed: u64,
    /// Nanoseconds from arrival until it acquired its blocks.
    pub queued: Nanos,
    /// Nanoseconds between start and first token spent waiting for copies without computing.
    pub stalled: Nanos,
    /// Number of suspensions for lack of room.
    pub suspended: u64,
    /// Tokens of the answer.
    pub output: u64,
}

/// Traffic of a lane, over all machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneUse {
    /// Bytes.
    pub bytes: u64,
    /// Nanoseconds of activity, including latency.
    pub busy: Nanos,
    /// Total queueing time of transmissions, in nanoseconds.
    pub waited: Nanos,
}
