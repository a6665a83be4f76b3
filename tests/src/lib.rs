//! Shared by the host tests: a private daemon, real processes, and waiting with a deadline. The benches use the private
//! daemon too.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

pub mod cpusets;
pub mod daemon;
pub mod private_daemon;
pub mod programs;
pub mod skipping;
pub mod waiting;
