//! The contract, point by point: how a decision becomes a finished copy.

mod rig;

mod contract {
    mod slots;
}
