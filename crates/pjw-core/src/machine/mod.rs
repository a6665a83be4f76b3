//! The machine: its topology, its devices, the PUs that are kept for the system, and the sizes of parts of it.

pub mod cpu_count_variables;
pub mod devices;
pub mod housekeeping;
pub mod parts;
pub mod thread_groups;
pub mod topology;
pub mod within_job;

pub(crate) use self::{devices::*, thread_groups::*, topology::*, within_job::*};
