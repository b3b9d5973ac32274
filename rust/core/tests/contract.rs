//! The contract, point by point: how a decision becomes a finished copy.

mod rig;

mod contract {
    mod acquire;
    mod ahead;
    mod batches;
    mod branch;
    mod commit;
    mod completion;
    mod crowds;
    mod engine;
    mod failed_moves;
    mod failure;
    mod finish;
    mod flood;
    mod hints;
    mod holes;
    mod leaving;
    mod liveness;
    mod mark;
    mod meter;
    mod moves;
    mod orders;
    mod prefetch;
    mod ranges;
    mod restart;
    mod room;
    mod scopes;
    mod sessions;
    mod sharing;
    mod slots;
    mod suspend;
    mod tails;
    mod tenants;
    mod transit;
    mod victims;
    mod write;
}
