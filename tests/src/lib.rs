//! What the host tests share: a real daemon of their own, real processes, and patience with a deadline.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // a test may fail

pub mod daemon;
pub mod patience;
pub mod programs;
pub mod skipping;
pub mod walls;
