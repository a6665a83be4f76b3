//! What is measured, and how results are written to `target/bench`.

pub mod other_programs;
pub mod results;
pub mod usage;
