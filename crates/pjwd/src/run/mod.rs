//! The event loop, its triggers, its CPU budget, its priority and its lateness; the files that the daemon keeps in
//! place.

mod abandoned;
pub mod budget;
pub mod daemon_records;
pub mod dry_runs;
pub mod event_loop;
pub mod lateness;
pub mod own_files;
pub mod own_mask;
pub mod owner_samples;
pub mod realtime;
pub mod triggers;
