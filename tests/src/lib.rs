//! The code that the host tests share: a private daemon, waiting with a timeout, cpusets, a stale socket, and the
//! report of skipped tests. The benches use the private daemon too.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

pub mod cpusets;
pub mod daemon;
pub mod private_daemon;
pub mod programs;
pub mod skipping;
pub mod stale_socket;
pub mod waiting;
