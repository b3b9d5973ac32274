//! kvtrie-sim: a discrete-event simulator of machines serving a trace, over kvtrie-core.
//!
//! Each machine is the production `Manager`, called as an engine calls it, with an executor that
//! takes the time of a copy instead of copying. Time is integer nanoseconds of the trace; costs
//! come in as integers. Equal runs give equal bytes on every platform and in every build.
//!
//! ```text
//! simulation --> router, decision            which machine serves a request
//!     +--> engine --> cost, record           steps of a machine's batch
//!     +--> peers --> directory --> machine   blocks of other machines
//!     +--> machine --> transfer --> timeline, network      a manager, and the time of its copies
//!             +--> remote                    a store of all machines
//! event, request, call      nouns
//! ```

#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![deny(clippy::float_arithmetic)]

pub mod call;
pub mod cost;
pub mod decision;
pub mod directory;
pub mod engine;
pub mod event;
pub mod machine;
pub mod network;
pub mod peers;
pub mod record;
pub mod remote;
pub mod request;
pub mod router;
pub mod simulation;
pub mod timeline;
pub mod transfer;
