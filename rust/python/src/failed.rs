//! Failure report: tokens of a lease's plan that will not arrive.

use kvtrie_core::manager;

use crate::record::record;

record! {
    /// Tokens of a lease's plan that will not arrive.
    Failed(manager::Failed) |failed, py| {
        /// The lease concerned; 0 if none is.
        lease: u64 = failed.lease;
        /// Handle of the block; None for a partial one.
        block: Option<u64> = failed.block.map(|block| block.0);
        /// First token on the lease's path.
        start: u64 = failed.start;
        /// One behind the last token.
        stop: u64 = failed.stop;
        /// The executor's message.
        reason: &str = &failed.reason;
    }
    repr format!(
        "Failed(lease={}, block={}, start={}, stop={}, reason={:?})",
        failed.lease,
        failed.block.map_or_else(|| "None".to_owned(), |block| format!("{:#x}", block.0)),
        failed.start, failed.stop, failed.reason
    );
}
