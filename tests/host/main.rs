//! The real daemon on real processes of this machine, whatever its cgroups and whoever runs the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail
#![allow(missing_docs, unreachable_pub)]

mod bad_input;
mod confining;
mod discovery;
mod doctor;
mod hooks;
mod lost_events;
mod many_jobs;
mod metrics;
mod mpi;
mod permissions;
mod processes;
mod restarting;
mod running;
mod socket_paths;
mod undoing;
mod walls;
