//! Closing a listener in the tests of this crate.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::dial::dial;

/// Closes the listener at `path`, as the end of its process does, and waits until the kernel refuses connections. If
/// another test starts a program at the same time, the new process has a copy of the listener until it executes the
/// program. Connections succeed until then.
#[track_caller]
pub(crate) fn close(listener: UnixListener, path: &Path) {
    drop(listener);
    let deadline = Instant::now() + Duration::from_secs(60);
    while dial(path, Duration::ZERO).err() != Some(Errno::ECONNREFUSED) {
        assert!(Instant::now() < deadline, "a process still listens at {}", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}
