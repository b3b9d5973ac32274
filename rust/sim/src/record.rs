//! Results of one request, and of one lane.
//!
//! Invariant: real tokens; hits and `computed` add up to the prompt. Cost: plain values.

use kvtrie_core::Nanos;

use crate::event::MachineId;

/// One request's times and hits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its place in the trace.
    pub id: u64,
    /// Where it ran.
    pub machine: MachineId,
    /// When it came in.
    pub arrival: Nanos,
    /// When its first token was there; `None` if it did not fit and was refused.
    pub first_token: Option<Nanos>,
    /// When its last token was there; `None` if it was refused.
    pub end: Option<Nanos>,
    /// Tokens found on each tier of its machine.
    pub hits: Vec<u64>,
    /// Tokens found on another machine.
    pub peer: u64,
    /// Nanoseconds that computing what was found on each tier, and last on a peer, would have taken.
    pub saved: Vec<Nanos>,
    /// Tokens of the match, as the manager takes them.
    pub matched: usize,
    /// Blocks of the match that were computed again, ascending.
    pub holes: Vec<u32>,
    /// Tokens of the prompt that were computed.
    pub computed: u64,
    /// Nanoseconds from its arrival until it got its blocks.
    pub queued: Nanos,
    /// Nanoseconds from its begin to its first token in which it waited for copies and computed
    /// nothing.
    pub stalled: Nanos,
    /// How often it was suspended for want of room.
    pub suspended: u64,
    /// Tokens of the answer.
    pub output: u64,
}

/// Traffic of a lane, over all machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneUse {
    /// Bytes.
    pub bytes: u64,
    /// Nanoseconds in which it carried something, latency included.
    pub busy: Nanos,
    /// Nanoseconds that transmissions waited for those before them, in all.
    pub waited: Nanos,
}
