//! The daemon pjwd: observe, reconcile, audit, journal, apply, publish.
//!
//! The event loop ([`run`]) has a thread of its own and owns all state. The loop runs one cycle ([`warden`]) at a
//! time. A cycle is generic over the node and the journal, so that the same code runs on a fake kernel. After each
//! cycle the loop publishes a status ([`view`]). The control server ([`control`]) and the metrics ([`metrics`]) read
//! the published status.
//!
//! Imports go one way: `startup` -> `run` -> `control`, `metrics` -> `view` -> `warden` -> `store`, `config`, `host`.
//! The control server sends requests to the thread that reads the memory of jobs ([`memory`]).
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod error_text;
pub mod host;
pub mod job_files;
pub mod memory;
pub mod metrics;
pub mod options;
pub mod run;
pub mod startup;
pub mod store;
pub mod undo;
pub mod view;
pub mod warden;
