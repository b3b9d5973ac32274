//! Slots of requests: the next slots of a lease, its held slots in each group, and room for them.

pub(in crate::manager) mod ahead;
pub(in crate::manager) mod bind;
pub(in crate::manager) mod engine_stores;
pub(in crate::manager) mod lease_slots;
pub(in crate::manager) mod memory_check;
pub(in crate::manager) mod next_slots;
pub(in crate::manager) mod parts;
pub(in crate::manager) mod pins;
pub(in crate::manager) mod place;
pub(in crate::manager) mod placed_slots;
pub(in crate::manager) mod refused;
pub(in crate::manager) mod request_room;
pub(in crate::manager) mod reserve;
pub(in crate::manager) mod table;
pub(in crate::manager) mod victims;
