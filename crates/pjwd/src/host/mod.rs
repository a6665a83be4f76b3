//! The system around the daemon: directories, the log, messages to systemd, the task scan.

pub mod directories;
pub mod logging;
pub mod notify;
pub(crate) mod task_scan;
