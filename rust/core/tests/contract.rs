//! The contract, point by point: how a decision becomes a finished copy.

mod rig;

mod contract {
    mod acquire;
    mod branch;
    mod commit;
    mod completion;
    mod moves;
    mod orders;
    mod ranges;
    mod room;
    mod slots;
    mod suspend;
}
