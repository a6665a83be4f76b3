//! pjw-core makes all decisions of pjw. It takes plain data and returns plain data.
//!
//! The crate does no I/O, reads no clock, and has no threads and no global state. A [`snapshot::Snapshot`]
//! describes the node, a [`command::Command`] is a user's request, and the time is a number. The result of a
//! cycle is a [`plan::Plan`]. [`reconcile::reconcile`] runs one cycle. [`audit::audit`] checks every plan and
//! shares no code with the phases that made it.
//!
//! The layers, lowest first. Each layer imports only the layers below it:
//!
//! - `basics`: CPU sets, process and thread ids, times, the cgroups of a process, text helpers.
//! - `machine`: the topology, its devices, the housekeeping rule, the parts of a group of processes.
//! - `terms`: plain data types of the decisions, from [`job::Job`] to [`plan::Plan`].
//! - [`state`]: the data kept between two cycles.
//! - [`allocate`]: chooses the cores for a request.
//! - `phases`: the steps of one cycle.
//! - [`reconcile`] runs the phases in order. [`command_scan`], [`audit`], [`explain`], [`provision_rules`], [`report`],
//!   [`fork_fastpath`], [`core_map`], [`memory`] and [`diagnosis`] are on the same layer.
#![no_std]
#![forbid(unsafe_code)]

#[macro_use]
extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod allocate;
pub mod audit;
mod basics;
pub mod command_scan;
pub mod core_map;
pub mod diagnosis;
pub mod explain;
pub mod fork_fastpath;
mod machine;
pub mod memory;
mod next_scan;
mod phases;
pub mod provision_rules;
pub mod reconcile;
pub mod report;
pub mod state;
mod terms;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use basics::{cpuset, ids, process_cgroups, text, time};
pub use machine::{
    address_space_threads, cpu_count_variables, devices, housekeeping, parts, topology, within_job,
};
pub use phases::commands::types as command;
pub use phases::usage as usage_times;
pub use phases::{cpusets, lending, pinning, unassigned};
pub use terms::{
    cpuset_group, event, evidence, job, own_cgroups, plan, policy, ports, record, refusal, scan, snapshot,
    usage,
};
