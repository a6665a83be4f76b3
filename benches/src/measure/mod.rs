//! Measures CPU time and memory, and writes the results to `target/bench`.

pub mod chart;
pub mod other_programs;
pub mod results;
pub mod start_cost;
pub mod usage;
