//! The machine: its topology, its devices, the PUs that are kept for the system, and the sizes of parts of it.

pub mod address_space_threads;
pub mod cpu_count_variables;
pub mod devices;
pub mod housekeeping;
pub mod parts;
pub mod topology;
pub mod within_job;

pub(crate) use self::{address_space_threads::*, devices::*, topology::*, within_job::*};
