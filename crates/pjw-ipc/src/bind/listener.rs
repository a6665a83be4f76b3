//! Whether a process listens on the socket at a path, and which one.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;

use super::error::BindError;
use crate::dial::{dial, listener_pid};

/// The device and inode of the file at `path`. `None` if there is no file.
pub(super) fn inode_of(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Returns the error for a socket on which the process `pid` listens. The kernel reports the process that called
/// listen(2). For a socket unit, this is the service manager, which must not be reported as pjwd.
pub(super) fn in_use_error(path: &Path, pid: Option<i32>) -> BindError {
    let path = path.to_owned();
    let comm = pid.and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    match comm.as_deref().map(str::trim_end) {
        Some("systemd") => BindError::HeldBySystemd { path },
        _ => BindError::InUse { path, pid },
    }
}

/// Whether a process listens at a path.
pub(super) enum Listening {
    Nothing,
    /// A process listens. Its pid is known if the process accepts connections.
    Process(Option<i32>),
}

impl Listening {
    pub(super) fn pid(self) -> Option<i32> {
        match self {
            Listening::Nothing => None,
            Listening::Process(pid) => pid,
        }
    }
}

/// Tries to connect to the socket at `path`, and returns whether a process listens there.
pub(super) fn probe_listener(path: &Path) -> Listening {
    match dial(path, Duration::ZERO) {
        Ok(stream) => Listening::Process(listener_pid(&stream)),
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Listening::Nothing,
        // The socket exists, and the process behind it does not answer. Another process owns the file: do not remove
        // it.
        Err(_) => Listening::Process(None),
    }
}
