//! The machine: its topology, its devices, and the PUs that are kept for the system.

pub mod devices;
pub mod housekeeping;
pub mod parts;
pub mod topology;

pub(crate) use self::{devices::*, topology::*};
