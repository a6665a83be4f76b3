//! A socket file on which no process listens, as a killed daemon leaves it.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::waiting::wait_until;

/// Makes a socket file at `path` on which no process listens.
///
/// # Panics
/// If the file can't be made.
pub fn leave_stale_socket(path: &Path) {
    drop(UnixListener::bind(path).expect("the socket can be made"));
    // A child that another test starts at the same time has the socket open too, until the child has executed its
    // program. Until then a connection succeeds.
    wait_until("no process listens on the socket", || UnixStream::connect(path).is_err());
}
