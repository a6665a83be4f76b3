//! The event loop, its triggers, its CPU budget and its lateness.

pub mod budget;
pub mod dry_runs;
pub mod event_loop;
pub mod lateness;
pub mod triggers;
