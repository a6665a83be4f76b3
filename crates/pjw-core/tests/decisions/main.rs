//! Decisions of pjw on a simulated machine, without a kernel and without a clock.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unreachable_pub)] // a test may fail

mod active_threads;
mod address_spaces;
mod attempts;
mod audit;
mod commands;
mod defrag;
mod explain;
mod fork_fastpath;
mod hotplug;
mod idle_processes;
mod kernel_resets_masks;
mod lending;
mod machine;
mod masks;
mod membership;
mod original_cgroups;
mod overloaded;
mod provisions;
mod recovery;
mod refusals;
mod released;
mod restore;
mod steady;
mod unknown_masks;
mod unread_environments;
mod usage;
mod visits;
mod waiting_in_batch_cgroups;
mod waiting_jobs;
mod wanted_cores;
mod within_job;
mod without_cpuset;
