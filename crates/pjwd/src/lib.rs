//! pjwd, the daemon: observe, reconcile, audit, journal, apply, and tell.
//!
//! [`attend`] is the loop, on a thread of its own, which owns all state; [`cycle`] is one turn of it, generic over
//! the node and the journal, so that the same code runs on a fake kernel; [`control`] answers the socket from what
//! [`publish`] published.
#![forbid(unsafe_code)]

pub mod admission;
pub mod attend;
pub mod budget;
pub mod config;
pub mod control;
pub mod cycle;
pub mod daemon;
pub mod dry_runs;
pub mod events;
pub mod journal;
pub mod logging;
pub mod metrics;
pub mod notify;
pub mod pace;
pub mod past;
pub mod places;
pub mod publish;
pub mod question;
pub mod report;
mod tally;
mod task_scan;
pub mod tree;
pub mod undo;
