//! Child processes: their start, their output, their end, and the private daemon.

pub mod daemon;
pub mod interrupt;
pub mod program;
