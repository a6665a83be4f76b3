//! The warden: one cycle of observe, reconcile, audit, journal and apply, and the report of a cycle.

mod apply;
mod auditing;
mod cpuset_changes;
mod cycle;
mod dry_run;
mod forks;
mod recording;
mod report;
mod unenforceable;
mod usage;

pub use cycle::Warden;
pub use report::{ConfinedNewProcess, CycleReport, EventCount, OngoingFailures, RefusedMask};
