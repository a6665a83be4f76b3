//! The system around the daemon: directories, the limit of open descriptors, the identity of files and the holders of
//! their locks, the log, messages to systemd, another pjwd that runs already, the task scan, the process that thaws
//! frozen jobs after the daemon was killed.

pub(crate) mod descriptors;
pub mod directories;
pub(crate) mod flock_holder;
pub(crate) mod inode;
pub mod logging;
pub mod notify;
pub(crate) mod other_pjwd;
pub(crate) mod task_scan;
pub mod thaw_watcher;
