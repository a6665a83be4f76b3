//! Tests of the real daemon on real processes of this machine. They run as any user and with any cgroup version. A
//! test that needs more than this machine has is skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail
#![allow(missing_docs, unreachable_pub)]

mod abandoned;
mod address_spaces;
mod bad_commands;
mod bad_input;
mod beside;
mod borrowers;
mod confining;
mod core_map;
mod cpusets;
mod discovery;
mod doctor;
mod frozen;
mod hooks;
mod killed;
mod lending;
mod lost_events;
mod many_jobs;
mod many_threads;
mod map_lock;
mod memory;
mod memory_counted_once;
mod memory_over_time;
mod metrics;
mod mpi;
mod permissions;
mod processes;
mod programs;
mod realtime;
mod removed_files;
mod reporting;
mod restarting;
mod running;
mod sizes;
mod socket_paths;
mod spawning;
mod undoing;
mod verdicts;
