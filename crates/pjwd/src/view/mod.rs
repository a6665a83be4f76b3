//! What the daemon publishes: the status after each cycle, the events, the machine.

pub mod counts;
pub mod history;
mod jobs;
pub mod report;
pub mod status;
pub mod to_wire;
pub mod topology_tree;
mod warnings;
