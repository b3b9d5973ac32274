//! Slots of requests: those a lease writes next, those it holds in each group, and room for them.

pub(in crate::manager) mod ahead;
pub(in crate::manager) mod bound_windows;
pub(in crate::manager) mod next_slots;
pub(in crate::manager) mod open_slot;
pub(in crate::manager) mod pins;
pub(in crate::manager) mod placed_slots;
pub(in crate::manager) mod refused;
pub(in crate::manager) mod reserve;
pub(in crate::manager) mod victims;
pub(in crate::manager) mod weigh;
pub(in crate::manager) mod window_slots;
pub(in crate::manager) mod windows;
