//! Measures CPU time and memory, and writes the results to `target/bench`.

pub mod other_programs;
pub mod results;
pub mod usage;
