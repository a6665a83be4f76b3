//! The event loop, its triggers, its CPU budget, its priority and its lateness.

mod abandoned;
pub mod budget;
pub mod dry_runs;
pub mod event_loop;
pub mod lateness;
pub mod triggers;
