//! Child processes, the handling of signals, and the private daemon.

pub mod daemon;
pub mod interrupt;
pub mod program;
pub mod spawned_group;
